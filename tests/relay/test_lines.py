"""Messages of one line leave in the order of their dispatch, whatever fails, with one relay."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import sqlalchemy as sa
from kombu import Connection

from celery_outbox import ClaimedMessage, Outbox, Outcome, Publisher, Transport
from tests.relay.apps import relay_once, relaying, rows, send
from tests.relay.conftest import OpenOutbox
from tests.waiting import wait_until

NOBODY = "redis://127.0.0.1:1/0"


class Lined(Publisher):
    """Takes messages into a list; queues that are named ``line-…`` keep their order."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, str]] = []
        self.refusals: dict[str, int] = {}  # by task id: how often it is refused
        self.raises = 0  # how often a whole batch fails
        self._is_connected = False

    @property
    def is_connected(self) -> bool:
        return self._is_connected

    def connect(self) -> None:
        self._is_connected = True

    def close(self) -> None:
        self._is_connected = False

    def line_of(self, message: ClaimedMessage) -> str | None:
        return message.queue if message.queue.startswith("line-") else None

    def publish(
        self, messages: Sequence[ClaimedMessage], *, deadline: float, read_at: float
    ) -> Outcome:
        if self.raises:
            self.raises -= 1
            raise RuntimeError("the whole batch")
        accepted, unsent, errors = set(), set(), {}
        stuck: set[str] = set()
        for message in messages:
            line = self.line_of(message)
            if line in stuck:
                unsent.add(message.id)
            elif self.refusals.get(message.task_id, 0) > 0:
                self.refusals[message.task_id] -= 1
                errors[message.id] = "refused"
                stuck |= {line} - {None}  # type: ignore[arg-type]
            else:
                accepted.add(message.id)
                self.taken.append((message.queue, message.task_id))
        return Outcome(accepted=accepted, unsent=unsent, errors=errors)


@pytest.fixture
def publisher() -> Lined:
    return Lined()


@pytest.fixture
def outbox(publisher: Lined, open_outbox: OpenOutbox, database_url: str) -> Outbox:
    class Lining(Transport):
        """The transport of that one publisher."""

        def publisher(self, connection: Connection) -> Publisher:
            return publisher

    retry = {"base_delay": 0.05, "max_delay": 0.2}
    return open_outbox(NOBODY, database_url, transports={"redis": Lining}, retry=retry)


def taken(publisher: Lined, queue: str) -> list[str]:
    return [task_id for name, task_id in publisher.taken if name == queue]


@pytest.mark.parametrize("seed", range(2))
def test_lines_keep_their_order_through_refusals(outbox: Outbox, publisher: Lined, seed: int) -> None:
    chance = random.Random(seed)
    sent: dict[str, list[str]] = {"line-a": [], "line-b": [], "free": []}

    def add(count: int) -> None:
        for _ in range(count):
            queue = chance.choice(list(sent))
            sent[queue].append(send(outbox, queue=queue))
            if chance.random() < 0.2:
                publisher.refusals[sent[queue][-1]] = chance.randint(1, 2)

    add(25)
    publisher.raises = 1
    with relaying(outbox, batch=7):
        for done in (0, 10, 20):
            wait_until(lambda done=done: len(publisher.taken) >= done, timeout=30)
            add(5)  # while earlier ones wait
        wait_until(lambda: not rows(outbox), timeout=60)
    assert taken(publisher, "line-a") == sent["line-a"]
    assert taken(publisher, "line-b") == sent["line-b"]
    assert sorted(taken(publisher, "free")) == sorted(sent["free"])


def test_what_waits_behind_another_costs_no_attempt_and_names_no_error(
    outbox: Outbox, publisher: Lined
) -> None:
    first, *others = (send(outbox, queue="line-a") for _ in range(3))
    publisher.refusals[first] = 1
    relay_once(outbox)
    stored = {row.task_id: row for row in rows(outbox)}
    assert (stored[first].attempts, stored[first].error) == (1, "refused")
    for behind in others:
        assert (stored[behind].attempts, stored[behind].error) == (0, None)
        assert stored[behind].scheduled_at > stored[first].scheduled_at
        assert stored[behind].claim_token is None


def test_a_refused_message_holds_up_no_other_line(outbox: Outbox, publisher: Lined) -> None:
    first = send(outbox, queue="line-a")
    publisher.refusals[first] = 1
    others = [send(outbox, queue=queue) for queue in ("line-b", "free")]
    relay_once(outbox)
    assert [task_id for _, task_id in publisher.taken] == others


@pytest.mark.parametrize("how", ["forgotten", "given up"])
def test_a_line_goes_on_when_its_first_is_gone(outbox: Outbox, publisher: Lined, how: str) -> None:
    options: dict[str, Any] = {"outbox_retry": {"max_attempts": 2}} if how == "given up" else {}
    first = send(outbox, queue="line-a", **options)
    others = [send(outbox, queue="line-a") for _ in range(3)]
    publisher.refusals[first] = 1000
    database = outbox.databases["default"]
    t = database.tables.messages
    with relaying(outbox):
        wait_until(lambda: publisher.refusals[first] < 1000, timeout=30)
        if how == "forgotten":
            with database.begin() as connection:
                connection.execute(sa.delete(t).where(t.c.task_id == first))
        wait_until(lambda: len(publisher.taken) == len(others), timeout=30)
    assert taken(publisher, "line-a") == others
