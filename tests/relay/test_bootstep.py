"""``celery worker --outbox-relay``: a worker that also relays, and ends as any other."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from kombu import Connection

from celery_outbox import Outbox, Publisher, Transport
from tests.relay.apps import make_outbox, rows, send
from tests.relay.commands import PROJECT, Running, environment, outbox_command, program, run, running
from tests.waiting import wait_until

BARE = ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=INFO"]
SOLO = ["-P", "solo"]
# Each task in a child of its own: all but the first are forked while the relay runs.
PREFORK = ["-P", "prefork", "-c", "1", "--max-tasks-per-child", "1"]
GEVENT = ["-P", "gevent", "-c", "2"]


class Broken(Transport):
    """Whose publisher takes the relay down with it."""

    def publisher(self, connection: Connection) -> Publisher:
        raise SystemExit("broken")


@contextmanager
def worker(
    directory: Path, broker: str, database: str, *arguments: str, settings: Any = None
) -> Iterator[tuple[Running, Outbox]]:
    """A worker of the project, and the outbox of an app that sends to it."""
    engine = sa.create_engine(database)
    outbox = make_outbox(broker, engine)
    command = [program("celery"), "-A", PROJECT, "worker", *BARE, *arguments]
    env = environment(broker=broker, database=database, settings=settings)
    with running(command, directory, env) as process:
        process.wait_for("ready.", timeout=60)
        yield process, outbox
    outbox.app.close()
    engine.dispose()


def relays(outbox: Outbox) -> list[int]:
    database = outbox.databases["default"]
    return [each.about["pid"] for each in database.read(database.state.relays)]


@pytest.mark.parametrize("pool", [SOLO, PREFORK, GEVENT], ids=["solo", "prefork", "gevent"])
def test_a_worker_that_relays_runs_what_is_stored_and_ends_when_told(
    pool: list[str], postgresql_url: str, redis_url: str, tmp_path: Path
) -> None:
    with worker(tmp_path, redis_url, postgresql_url, "--outbox-relay", *pool) as (process, outbox):
        for _ in range(3):
            process.wait_for(f"shop.add[{send(outbox)}] succeeded")
        wait_until(lambda: not rows(outbox))
        assert relays(outbox) == [process.popen.pid]
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.output
        assert relays(outbox) == []


def test_a_restart_of_the_relays_is_one_of_the_relay_in_a_worker_too(
    postgresql_url: str, redis_url: str, tmp_path: Path
) -> None:
    with worker(tmp_path, redis_url, postgresql_url, "--outbox-relay", *SOLO) as (process, outbox):
        process.wait_for(f"shop.add[{send(outbox)}] succeeded")
        database = outbox.databases["default"]
        (before,) = [each.name for each in database.read(database.state.relays)]
        env = environment(broker=redis_url, database=postgresql_url)
        done = run(outbox_command("restart"), env)
        assert done.returncode == 0, done.stderr
        process.wait_for("asked for a restart", timeout=15)
        process.wait_for(f"shop.add[{send(outbox)}] succeeded")
        wait_until(lambda: relays(outbox) == [process.popen.pid])
        (after,) = [each.name for each in database.read(database.state.relays)]
        assert after != before
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.output
        assert relays(outbox) == []


def test_a_worker_relays_nothing_unless_it_is_told_to(
    sqlite_url: str, redis_url: str, tmp_path: Path
) -> None:
    with worker(tmp_path, redis_url, sqlite_url, *SOLO) as (process, outbox):
        stored = send(outbox)
        direct = outbox.app.send_task("shop.add", (1, 2))
        process.wait_for(f"shop.add[{direct.id}] succeeded")
        assert [(row.task_id, row.attempts) for row in rows(outbox)] == [(stored, 0)]
        assert relays(outbox) == []


def test_a_worker_relays_to_a_broker_in_its_own_memory(sqlite_url: str, tmp_path: Path) -> None:
    with worker(tmp_path, "memory://", sqlite_url, "--outbox-relay", *SOLO) as (process, outbox):
        process.wait_for(f"shop.add[{send(outbox)}] succeeded")
        wait_until(lambda: not rows(outbox))


def test_a_cold_shutdown_ends_a_worker_that_relays(
    sqlite_url: str, redis_url: str, tmp_path: Path
) -> None:
    with worker(tmp_path, redis_url, sqlite_url, "--outbox-relay", *SOLO) as (process, outbox):
        wait_until(lambda: relays(outbox))
        process.send(signal.SIGQUIT)
        process.wait()
        assert relays(outbox) == []


def test_a_worker_ends_with_an_error_when_its_relay_has_failed(
    sqlite_url: str, redis_url: str, tmp_path: Path
) -> None:
    broken = {"transports": {"redis": f"{__name__}:Broken"}}
    arguments = ["--outbox-relay", *SOLO]
    with worker(tmp_path, redis_url, sqlite_url, *arguments, settings=broken) as (process, outbox):
        send(outbox)
        assert process.wait(timeout=30) == 1, process.output
        assert "The relay in the worker failed" in process.output
        assert relays(outbox) == []


def test_the_help_of_the_worker_names_the_option(sqlite_url: str) -> None:
    env = environment(broker="memory://", database=sqlite_url)
    done = run([program("celery"), "-A", PROJECT, "worker", "--help"], env)
    assert "--outbox-relay" in done.stdout
