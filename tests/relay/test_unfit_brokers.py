"""Brokers that forget: refused by the command where they end with its process, else warned of once."""

from pathlib import Path
from typing import Any

import pytest

from celery_outbox import Transport
from tests.relay.apps import make_outbox, rows, send
from tests.relay.commands import environment, outbox_command, run
from tests.relay.wire import task_ids

WARNING = "keeps its messages in memory only"
NOBODY = "redis://127.0.0.1:1/0"


class Forgetful(Transport):
    """Redis, as somebody may have set it up."""

    is_persistent = False


def relayed(broker: str, database: str, *arguments: str, **settings: Any) -> tuple[int, str]:
    """The exit code of the command, and what it said."""
    env = environment(broker=broker, database=database, settings=settings)
    done = run(outbox_command("relay", *arguments), env)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "broker",
    [
        "memory://",
        "sqla+sqlite://",
        "sqla+sqlite:///:memory:",
        "sqla+sqlite:///file:x?mode=memory&cache=shared&uri=true",
    ],
)
@pytest.mark.parametrize("mode", ["--once", "--stop-when-empty", None])
def test_a_broker_in_the_relays_own_process_is_refused_and_the_rows_stay(
    broker: str, mode: str | None, sqlite_url: str
) -> None:
    outbox = make_outbox(broker, sqlite_url)
    stored = send(outbox)
    code, said = relayed(broker, sqlite_url, *[mode] if mode else [])
    assert code == 1
    assert "broker 'shop': expected one that other processes can reach" in said
    assert "Traceback" not in said
    assert [(row.task_id, row.attempts, row.error) for row in rows(outbox)] == [(stored, 0, None)]
    outbox.app.close()


def test_one_of_several_brokers_is_enough_to_refuse(redis_url: str, sqlite_url: str) -> None:
    brokers = {"own": "memory://"}
    outbox = make_outbox(redis_url, sqlite_url, brokers=brokers)
    kept = [send(outbox), send(outbox, outbox_broker="own")]
    code, said = relayed(redis_url, sqlite_url, "--once", brokers=brokers)
    assert (code, "broker 'own'" in said) == (1, True)
    assert [row.task_id for row in rows(outbox)] == kept
    outbox.app.close()


def test_a_broker_that_forgets_is_warned_of_once(redis_url: str, sqlite_url: str) -> None:
    # Nobody connects to the first: Kombu's transport wants a package that is not here.
    forgetful = {"redis": "tests.relay.test_unfit_brokers:Forgetful"}
    brokers = {"far": "pyro://127.0.0.1:1/kombu"}
    outbox = make_outbox(redis_url, sqlite_url)
    sent = [send(outbox) for _ in range(5)]
    settings = {"brokers": brokers, "transports": forgetful}
    code, said = relayed(redis_url, sqlite_url, "--stop-when-empty", "--batch", "2", **settings)
    assert code == 0
    assert said.count(WARNING) == 2
    assert said.count(f"Broker 'far' (pyro) {WARNING}") == 1
    assert said.count(f"Broker 'shop' (redis) {WARNING}") == 1
    assert task_ids(redis_url) == sent
    outbox.app.close()


def test_a_broker_that_keeps_its_messages_is_not_warned_of(
    redis_url: str, sqlite_url: str, tmp_path: Path
) -> None:
    brokers = {
        "rabbit": "amqp://127.0.0.1:1//",
        "queue": "sqs://127.0.0.1:1",
        "database": f"sqla+sqlite:///{tmp_path}/broker.db",
        "files": "filesystem://",
    }
    code, said = relayed(redis_url, install(sqlite_url), "--once", brokers=brokers)
    assert (code, WARNING in said) == (0, False)


def install(url: str) -> str:
    make_outbox(NOBODY, url).app.close()
    return url
