"""Brokers that exist in the test alone, and relays to them from databases of any number."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from celery_outbox import ClaimedMessage, Outcome, Publisher
from celery_outbox.policy import RetryPolicy
from celery_outbox.relay.loop import Relay, RelayOptions
from celery_outbox.storage.database import Database
from tests.waiting import wait_until

Messages = Sequence[ClaimedMessage]
PATIENCE = 30.0


def accept(messages: Messages) -> Outcome:
    return Outcome(accepted={each.id for each in messages})


def lost(messages: Messages) -> Outcome:
    """The connection breaks before anything is sent."""
    return Outcome(unsent={each.id for each in messages}, is_connection_lost=True)


class Broker:
    """Makes publishers; what they do is decided here, what they did is noted here.

    Attributes:
        answer: what becomes of a batch; may wait, or raise.
        reach: called for each connection; may wait, or raise.
        connects: the monotonic time of each.
        batches: the task ids of each batch that was begun.
        most: batches that were under way at once, at most.
    """

    def __init__(self) -> None:
        self.answer: Callable[[Messages], Outcome] = accept
        self.reach: Callable[[], None] = lambda: None
        self.line: Callable[[ClaimedMessage], str | None] = lambda message: None
        self.keep_alive: Callable[[], None] = lambda: None
        self.publishers: list[FakePublisher] = []
        self.connects: list[float] = []
        self.batches: list[list[str]] = []
        self.most = 0
        self._under_way = 0
        self._lock = threading.Lock()

    def __call__(self) -> Publisher:
        made = FakePublisher(self)
        self.publishers.append(made)
        return made

    @property
    def taken(self) -> list[str]:
        return [each for batch in self.batches for each in batch]

    def publish(self, messages: Messages) -> Outcome:
        with self._lock:
            self.batches.append([each.task_id for each in messages])
            self._under_way += 1
            self.most = max(self.most, self._under_way)
        try:
            return self.answer(messages)
        finally:
            with self._lock:
                self._under_way -= 1


class FakePublisher(Publisher):
    """A publisher that says when two threads use it at once."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._is_connected = False
        self._lock = threading.Lock()
        self.was_shared = False

    @property
    def is_connected(self) -> bool:
        return self._is_connected

    def connect(self) -> None:
        with self._alone():
            self._broker.connects.append(time.monotonic())
            self._broker.reach()
            self._is_connected = True

    def publish(self, messages: Messages, *, deadline: float, read_at: float) -> Outcome:
        with self._alone():
            outcome = self._broker.publish(messages)
            self._is_connected = self._is_connected and not outcome.is_connection_lost
            return outcome

    def line_of(self, message: ClaimedMessage) -> str | None:
        return self._broker.line(message)

    def keep_alive(self) -> None:
        with self._alone():
            self._broker.keep_alive()

    def close(self) -> None:
        with self._alone():
            self._is_connected = False

    @contextmanager
    def _alone(self) -> Iterator[None]:
        is_alone = self._lock.acquire(blocking=False)
        self.was_shared = self.was_shared or not is_alone
        try:
            yield
        finally:
            if is_alone:
                self._lock.release()


class Gate:
    """A place where threads wait until it is opened.

    Attributes:
        waiting: threads that have come to it.
    """

    def __init__(self) -> None:
        self.waiting = 0
        self._event = threading.Event()

    def pass_(self) -> None:
        self.waiting += 1
        assert self._event.wait(PATIENCE), "nobody has opened the gate"

    def open(self) -> None:
        self._event.set()

    def accept(self, messages: Messages) -> Outcome:
        """Answer for a broker that hangs, until the gate is opened."""
        self.pass_()
        return accept(messages)


def relay_of(databases: Sequence[Database], brokers: Mapping[str, Any], **options: Any) -> Relay:
    chosen: dict[str, Any] = {
        "lease": timedelta(minutes=5),
        "retry": RetryPolicy(),
        "sleep": timedelta(seconds=0.05),
    }
    return Relay(databases, brokers, RelayOptions(**chosen | options))


class Running:
    """A relay that runs in a thread, and how it ended."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.error: BaseException | None = None
        self.result: bool | None = None
        self._thread = threading.Thread(target=self._run, name="relay")
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self.relay.run()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def wait(self, timeout: float = PATIENCE) -> None:
        wait_until(lambda: not self.is_alive, timeout, "the end of the relay")


@contextmanager
def running(
    databases: Sequence[Database], brokers: Mapping[str, Any], **options: Any
) -> Iterator[Running]:
    """Run a relay beside the test; afterwards it has ended without an error."""
    it = Running(relay_of(databases, brokers, **options))
    try:
        yield it
    finally:
        it.relay.stop()
        it.wait()
    assert it.error is None
