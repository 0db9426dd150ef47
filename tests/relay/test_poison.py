"""Messages in front that cannot be delivered: those behind them flow all the same, and soon."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_outbox import Outbox
from tests.publishers.sqs_stub import SQSStub
from tests.publishers.sqs_wire import envelope
from tests.relay.apps import rows, send
from tests.relay.commands import environment, outbox_command, running
from tests.relay.conftest import OpenOutbox
from tests.relay.wire import task_ids
from tests.storage.rows import add, make_message
from tests.waiting import wait_until

SLEEP = 1.0
BATCH = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Poison:
    """A kind of message that is never delivered.

    ``store`` stores one and returns its task id; ``arrived`` are the task ids on the broker.
    """

    outbox: Outbox
    env: dict[str, str]
    says: str
    store: Callable[[int], str]
    arrived: Callable[[], list[str]]


@contextmanager
def unreadable(request: pytest.FixtureRequest, open_: OpenOutbox, database: str) -> Iterator[Poison]:
    """What stands in the row is no envelope."""
    url: str = request.getfixturevalue("redis_url")
    outbox = open_(url, database)

    def store(number: int) -> str:
        add(outbox.databases["default"], make_message(f"bad {number}", envelope="truncated {"))
        return f"bad {number}"

    yield Poison(
        outbox=outbox,
        env=environment(broker=url, database=database),
        says="JSONDecodeError",
        store=store,
        arrived=lambda: task_ids(url),
    )


@contextmanager
def refused(request: pytest.FixtureRequest, open_: OpenOutbox, database: str) -> Iterator[Poison]:
    """Redis refuses: where the queue should be is something else."""
    url: str = request.getfixturevalue("redis_url")
    outbox = open_(url, database)
    with redis.Redis.from_url(url) as client:
        client.set("taken", "by somebody")
    yield Poison(
        outbox=outbox,
        env=environment(broker=url, database=database),
        says="WRONGTYPE",
        store=lambda number: send(outbox, queue="taken"),
        arrived=lambda: task_ids(url),
    )


@contextmanager
def too_large(request: pytest.FixtureRequest, open_: OpenOutbox, database: str) -> Iterator[Poison]:
    """Stored for an SQS without base64 around everything, relayed with it."""
    stub: SQSStub = request.getfixturevalue("sqs_stub")
    options = {"broker_transport_options": {"sqs_base64_encoding": False}}
    storing, outbox = open_(stub.url, database, config=options), open_(stub.url, database)
    yield Poison(
        outbox=outbox,
        env=environment(broker=stub.url, database=database),
        says="size",
        store=lambda number: send(storing, "x" * 700_000, 1),
        arrived=lambda: [envelope(body)["headers"]["id"] for body in stub.bodies()],
    )


@pytest.mark.parametrize("count", [1, BATCH])
@pytest.mark.parametrize("kind", [unreadable, refused, too_large])
def test_what_stands_behind_poison_leaves_within_two_sleeps(
    kind: Any,
    count: int,
    request: pytest.FixtureRequest,
    open_outbox: OpenOutbox,
    postgresql_url: str,
    tmp_path: Path,
) -> None:
    command = outbox_command("relay", "--sleep", str(SLEEP), "--batch", str(BATCH))
    with kind(request, open_outbox, postgresql_url) as poison:
        bad = {poison.store(number) for number in range(count)}
        good = [send(poison.outbox) for _ in range(2 * BATCH)]
        with running(command, tmp_path, poison.env) as relay:
            wait_until(lambda: any(row.attempts for row in rows(poison.outbox)), 30, "the first batch")
            began = time.monotonic()
            wait_until(lambda: left(poison.outbox) == bad, 20, "the good ones")
            assert time.monotonic() - began < 2 * SLEEP
            # They are settled when they are no longer in hand.
            wait_until(lambda: all(row.error for row in rows(poison.outbox)), 10, "the errors")
            assert relay.popen.poll() is None
        assert sorted(poison.arrived()) == sorted(good)
        assert all(poison.says in row.error for row in rows(poison.outbox))


def left(outbox: Outbox) -> set[str]:
    return {row.task_id for row in rows(outbox)}
