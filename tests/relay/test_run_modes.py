"""How the options of a relay end it, in processes: with several databases, brokers and threads."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
import sqlalchemy as sa
from celery import Celery

from celery_outbox import Outbox
from tests.processes import HOST, unused_port
from tests.redis_servers import private_redis
from tests.relay.apps import rows, rows_of, send
from tests.relay.commands import environment, outbox_command, run, running
from tests.relay.conftest import OpenOutbox
from tests.relay.wire import task_ids
from tests.servers import RedisServer
from tests.waiting import wait_until

PROJECT = """
import os
from celery import Celery
from celery_outbox import Outbox

app = Celery("shop", broker=os.environ["SHOP_BROKER"])
outbox = Outbox(
    app,
    databases={"one": os.environ["SHOP_ONE"], "two": os.environ["SHOP_TWO"]},
    brokers={"reports": os.environ["SHOP_REPORTS"]},
)
"""


@pytest.fixture
def env(redis_server: RedisServer, postgresql_url: str, tmp_path: Path) -> dict[str, str]:
    """A project with two databases and two brokers."""
    (tmp_path / "two_of_each.py").write_text(PROJECT)
    broker, reports = redis_server.empty_database(), redis_server.empty_database()
    return environment(broker=broker, database="") | {
        "PYTHONPATH": str(tmp_path),
        "SHOP_ONE": postgresql_url,
        "SHOP_TWO": f"sqlite:///{tmp_path / 'two.db'}",
        "SHOP_REPORTS": reports,
    }


@contextmanager
def shop_of(env: dict[str, str]) -> Iterator[Outbox]:
    engines = {name: sa.create_engine(env[f"SHOP_{name.upper()}"]) for name in ("one", "two")}
    app = Celery("shop", broker=env["SHOP_BROKER"], set_as_current=False)
    outbox = Outbox(app, databases=dict(engines), brokers={"reports": env["SHOP_REPORTS"]})
    outbox.install()
    yield outbox
    app.close()
    for engine in engines.values():
        engine.dispose()


def relay(*arguments: str) -> list[str]:
    return outbox_command("relay", *arguments, app="two_of_each")


def arrived(env: dict[str, str]) -> tuple[int, int]:
    """How many messages each broker has."""
    return len(task_ids(env["SHOP_BROKER"])), len(task_ids(env["SHOP_REPORTS"]))


@pytest.mark.parametrize("concurrency", ["1", "4"])
def test_once_is_one_batch_of_each_database_shared_by_its_brokers_whatever_the_concurrency(
    concurrency: str, env: dict[str, str], tmp_path: Path
) -> None:
    with shop_of(env) as shop:
        for database in ("one", "two"):
            for broker in ("shop", "reports"):
                for _ in range(7):
                    send(shop, outbox_database=database, outbox_broker=broker)
        began = time.monotonic()
        command = relay("--once", "--batch", "10", "--concurrency", concurrency, "--sleep", "1h")
        done = run(command, env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert time.monotonic() - began < 30  # it has not slept
        assert [len(rows_of(each)) for each in shop.databases.values()] == [4, 4]
        assert arrived(env) == (14, 6)


def test_once_waits_neither_for_a_broker_that_refuses_nor_takes_from_it_more_than_a_batch(
    env: dict[str, str], tmp_path: Path
) -> None:
    with private_redis(tmp_path / "full", "--maxmemory", "1") as full:
        port = full.connection_pool.connection_kwargs["port"]
        env["SHOP_BROKER"] = f"redis://{HOST}:{port}/0"
        with shop_of(env) as shop:
            for _ in range(25):
                send(shop, outbox_database="one")
            done = run(relay("--once", "--batch", "10", "--sleep", "1h"), env, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            assert sum(row.attempts for row in rows_of(shop.databases["one"])) == 10


@pytest.mark.parametrize("mode", ["--once", "--stop-when-empty"])
def test_a_database_that_cannot_be_read_counts_as_empty_and_the_other_is_drained(
    mode: str, env: dict[str, str], tmp_path: Path
) -> None:
    with shop_of(env) as shop:
        stored = [send(shop, outbox_database="two") for _ in range(10)]
        port = unused_port()
        env["SHOP_ONE"] = f"postgresql+psycopg://nobody@{HOST}:{port}/nothing"
        done = run(relay(mode, "--sleep", "1h"), env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "The database 'one' cannot be used" in done.stderr
        assert task_ids(env["SHOP_BROKER"]) == stored
        assert rows_of(shop.databases["two"]) == []
        env["SHOP_TWO"] = f"sqlite:///{tmp_path}/no/folder.db"
        assert run(relay(mode, "--sleep", "1h"), env, cwd=tmp_path).returncode == 1


def test_a_named_database_alone_is_relayed_from(env: dict[str, str], tmp_path: Path) -> None:
    with shop_of(env) as shop:
        kept, sent = send(shop, outbox_database="one"), send(shop, outbox_database="two")
        done = run(relay("two", "--stop-when-empty"), env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert task_ids(env["SHOP_BROKER"]) == [sent]
        assert [row.task_id for row in rows_of(shop.databases["one"])] == [kept]


@pytest.mark.parametrize("concurrency", ["1", "4"])
def test_the_limit_of_messages_is_kept_to_over_all_databases_and_brokers(
    concurrency: str, env: dict[str, str], tmp_path: Path
) -> None:
    with shop_of(env) as shop:
        for database in ("one", "two"):
            for broker in ("shop", "reports"):
                for _ in range(20):
                    send(shop, outbox_database=database, outbox_broker=broker)
        command = relay("--max-jobs", "33", "--batch", "10", "--concurrency", concurrency)
        done = run(command, env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert sum(arrived(env)) == 33
        left = [row for each in shop.databases.values() for row in rows_of(each)]
        assert (len(left), [row.claim_token for row in left if row.claim_token]) == (47, [])


def test_the_limit_of_time_ends_a_relay_in_the_middle_of_a_backlog_and_finishes_its_batches(
    open_outbox: OpenOutbox, postgresql_url: str, redis_url: str, tmp_path: Path
) -> None:
    outbox = open_outbox(redis_url, postgresql_url)
    env = environment(broker=redis_url, database=postgresql_url)
    task, stored = outbox.app.tasks["shop.add"], set[str]()
    with running(outbox_command("relay", "--max-time", "2", "--batch", "1"), tmp_path, env) as relay:
        relay.wait_for("Relaying from")
        began = time.monotonic()

        def has_ended() -> bool:
            stored.update(result.id for result in outbox.bulk(task.s(1, 2) for _ in range(100)))
            return relay.popen.poll() is not None

        wait_until(has_ended, 30, "the end")
        assert relay.wait() == 0, relay.output
        assert 1 < time.monotonic() - began < 10
    left = rows(outbox)
    assert left
    delivered = task_ids(redis_url)
    assert sorted([*delivered, *(row.task_id for row in left)]) == sorted(stored)
    assert all((row.attempts, row.claim_token) == (0, None) for row in left)


def test_a_relay_warns_that_a_batch_may_outlast_its_lease(
    open_outbox: OpenOutbox, sqlite_url: str, redis_url: str
) -> None:
    outbox = open_outbox(redis_url, sqlite_url)
    send(outbox)
    env = environment(broker=redis_url, database=sqlite_url, settings={"retry_after": 15})
    done = run(outbox_command("relay", "--once"), env)
    assert done.stderr.count("Publishing a batch of 100 to broker 'shop' may take 20 seconds") == 1
    assert "the lease (outbox_retry_after) is 15" in done.stderr
    env = environment(broker=redis_url, database=sqlite_url, settings={"retry_after": 30})
    send(outbox)
    assert "may take" not in run(outbox_command("relay", "--once"), env).stderr
    with redis.Redis.from_url(redis_url) as client:
        assert client.llen("celery") == 2


def test_a_relay_warns_of_its_lease_at_its_start_though_nothing_waits(
    open_outbox: OpenOutbox, sqlite_url: str, redis_url: str
) -> None:
    open_outbox(redis_url, sqlite_url)
    env = environment(broker=redis_url, database=sqlite_url, settings={"retry_after": 15})
    done = run(outbox_command("relay", "--stop-when-empty"), env)
    assert done.returncode == 0, done.stderr
    assert "may take 20 seconds" in done.stderr
