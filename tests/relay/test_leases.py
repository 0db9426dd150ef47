"""Relays that die, stall or come late: the same id again, and nothing of another owner's touched."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import sqlalchemy as sa

from celery_outbox import Outbox
from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.publishers import sqs_wire
from tests.relay.apps import relay_all, relay_once, rows, send
from tests.relay.commands import Running, environment, outbox_command, running
from tests.relay.conftest import OpenOutbox
from tests.relay.wire import take, task_ids
from tests.storage.rows import change, claim, fail, hours_from_now
from tests.waiting import wait_until

MakeProxy = Callable[[str, int], TcpProxy]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A relay process that has delivered once, through a proxy, and an outbox beside it."""

    relay: Running
    proxy: TcpProxy
    outbox: Outbox
    broker_url: str
    first: str

    def reserved(self) -> list[Any]:
        """The rows that a relay holds."""
        return [row for row in rows(self.outbox) if row.claim_token is not None]


@pytest.fixture
def broker_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty broker: Redis, where a test does not say another."""
    url: str = request.getfixturevalue(f"{getattr(request, 'param', 'redis')}_url")
    return url


@pytest.fixture
def stage(
    database_url: str,
    broker_url: str,
    open_outbox: OpenOutbox,
    tcp_proxy: MakeProxy,
    tmp_path: Path,
) -> Iterator[Stage]:
    """Start a relay process with a lease of two seconds and wait for its first delivery."""
    proxy = tcp_proxy(HOST, urlsplit(broker_url).port or 0)
    outbox = open_outbox(broker_url, database_url, retry_after=2)
    env = environment(
        broker=proxy.through(broker_url), database=database_url, settings={"retry_after": 2}
    )
    first = send(outbox)
    with running(outbox_command("relay", "--sleep", "0.05s"), tmp_path, env) as relay:
        wait_until(lambda: not rows(outbox), 30, "the first delivery")
        yield Stage(relay=relay, proxy=proxy, outbox=outbox, broker_url=broker_url, first=first)


@pytest.mark.parametrize(
    ("database_url", "broker_url"),
    [
        ("sqlite", "redis"),
        ("postgresql", "redis"),
        ("mariadb", "redis"),
        ("postgresql", "rabbitmq"),
        ("sqlite", "sqs"),
    ],
    indirect=True,
)
def test_a_relay_killed_between_publish_and_settle_delivers_the_same_again(stage: Stage) -> None:
    assert [each["headers"]["id"] for each in taken(stage.broker_url)] == [stage.first]
    stage.proxy.swallow_replies()
    stored = send(stage.outbox, countdown=1, headers={"tenant": "a"}, expires=900)
    (once,) = wait_until(lambda: taken(stage.broker_url), 15, "the publish")
    stage.relay.send(signal.SIGKILL)
    stage.relay.wait()
    assert [row.task_id for row in rows(stage.outbox)] == [stored]
    wait_until(lambda: relay_all(stage.outbox), 10, "the lease's end")
    (again,) = taken(stage.broker_url)
    assert once["headers"]["id"] == stored
    for message in (once, again):
        message["properties"] = {**message["properties"], "delivery_tag": "", "expiration": "less"}
    assert again == once


def taken(url: str) -> list[dict[str, Any]]:
    """Take the messages off the queue of a broker."""
    if url.startswith("sqs:"):
        return [sqs_wire.envelope(each["Body"]) for each in sqs_wire.taken(url)]
    messages: list[dict[str, Any]] = take(url, keeps_declared=True).get("celery", [])
    return messages


@contextmanager
def waiting_deletes(url: str) -> Iterator[None]:
    """Have PostgreSQL delete nothing from the outbox until the block ends."""
    with sa.create_engine(url, poolclass=sa.NullPool).connect() as connection:
        connection.execute(
            sa.text(
                "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS "
                "'BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN OLD; END'"
            )
        )
        connection.execute(
            sa.text(
                "CREATE TRIGGER wait BEFORE DELETE ON celery_outbox "
                "FOR EACH ROW EXECUTE FUNCTION wait()"
            )
        )
        connection.execute(sa.text("SELECT pg_advisory_lock(1)"))
        connection.commit()
        yield


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")  # of Kombu's tables
@pytest.mark.parametrize("broker", ["mariadb", "sqlite"])
def test_a_relay_killed_after_the_commit_to_its_broker_delivers_the_same_again(
    broker: str,
    postgresql_url: str,
    open_outbox: OpenOutbox,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    url = f"sqla+{request.getfixturevalue(f'{broker}_url')}"
    outbox = open_outbox(url, postgresql_url, retry_after=2)
    env = environment(broker=url, database=postgresql_url, settings={"retry_after": 2})
    stored = send(outbox, countdown=1, headers={"tenant": "a"}, expires=900)
    command = outbox_command("relay", "--sleep", "0.05s")
    with waiting_deletes(postgresql_url), running(command, tmp_path, env) as relay:
        (once,) = wait_until(lambda: taken(url), 30, "the publish")
        relay.send(signal.SIGKILL)
        relay.wait()
    assert [row.task_id for row in rows(outbox)] == [stored]
    wait_until(lambda: relay_all(outbox), 10, "the lease's end")
    (again,) = taken(url)
    assert once["headers"]["id"] == stored
    for message in (once, again):
        message["properties"] |= {"delivery_tag": "", "expiration": "less"}
    assert again == once


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_nobody_gets_a_message_before_the_lease_of_a_killed_relay_has_ended(stage: Stage) -> None:
    stage.proxy.stall()
    send(stage.outbox)
    (row,) = wait_until(stage.reserved, 15, "the claim")
    stage.relay.send(signal.SIGKILL)
    stage.relay.wait()
    change(stage.outbox.databases["default"], lease_until=hours_from_now(1))
    relay_once(stage.outbox)
    (after,) = rows(stage.outbox)
    assert (after.claim_token, after.attempts) == (row.claim_token, 1)
    assert task_ids(stage.broker_url) == [stage.first]


@pytest.mark.parametrize(
    ("database_url", "broker_url"),
    [
        ("sqlite", "redis"),
        ("postgresql", "redis"),
        ("mariadb", "redis"),
        ("postgresql", "rabbitmq"),
    ],
    indirect=True,
)
def test_a_relay_stalled_beyond_its_lease_changes_nothing_of_what_the_next_owner_did(
    stage: Stage,
) -> None:
    arrived = [each["headers"]["id"] for each in taken(stage.broker_url)]

    def have_arrived() -> bool:
        arrived.extend(each["headers"]["id"] for each in taken(stage.broker_url))
        return len(arrived) > 4

    stage.proxy.hold_replies()
    stored = send_together(stage.outbox, 4)
    wait_until(have_arrived, 15, "the publish")
    stage.relay.send(signal.SIGSTOP)
    wait_until(lambda: settle_each_in_another_way(stage.outbox), 10, "the lease's end")
    before = rows(stage.outbox)
    assert [row.task_id for row in before] == stored[1:]
    stage.relay.send(signal.SIGCONT)
    stage.proxy.resume()
    stage.relay.wait_for("The lease of a batch ended before it was settled: 4 of 4 messages")
    assert rows(stage.outbox) == before
    have_arrived()
    assert arrived == [stage.first, *stored]


def send_together(outbox: Outbox, count: int) -> list[str]:
    """Store some tasks in one transaction, so that one claim finds them all; return their ids."""
    task = outbox.app.tasks["shop.add"]
    return [str(result.id) for result in outbox.bulk([task.s(1, 2) for _ in range(count)])]


def settle_each_in_another_way(outbox: Outbox) -> bool:
    """Claim what has become free; accept, defer, fail and keep reserved one message each."""
    database = outbox.databases["default"]
    made = claim(database)
    if not made.messages:
        return False
    accepted, deferred, failed, _ = made.messages
    change(database, deferred.task_id, deliver_at=hours_from_now(1))
    with database.begin() as connection:
        database.store.accept(connection, made.token, [accepted.id], keep=False)
        database.store.defer(connection, made.token, [deferred.id])
    fail(database, made.token, failed.id, "refused")
    return True


def test_a_signal_lets_the_batch_be_finished(
    sqlite_url: str,
    redis_url: str,
    open_outbox: OpenOutbox,
    tcp_proxy: MakeProxy,
    tmp_path: Path,
) -> None:
    proxy = tcp_proxy(HOST, int(redis_url.rpartition("/")[0].rpartition(":")[2]))
    outbox = open_outbox(redis_url, sqlite_url)
    first = send(outbox)
    env = environment(broker=proxy.through(redis_url), database=sqlite_url)
    command = outbox_command("relay", "--batch", "5", "--sleep", "0.05s")
    with running(command, tmp_path, env) as relay:
        wait_until(lambda: not rows(outbox), 30, "the first delivery")
        proxy.stall()
        stored = send_together(outbox, 12)
        wait_until(lambda: [row for row in rows(outbox) if row.claim_token], 15, "the claim")
        relay.send(signal.SIGTERM)
        proxy.resume()
        assert relay.wait(timeout=10) == 0, relay.output
    assert task_ids(redis_url) == [first, *stored[:5]]
    assert [(row.task_id, row.attempts, row.claim_token) for row in rows(outbox)] == [
        (task_id, 0, None) for task_id in stored[5:]
    ]
