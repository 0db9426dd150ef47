"""Many dispatches that are stored together: of a canvas, or of ``outbox.bulk``.

Nothing is stored before the last of them has been built; then each database gets its messages in as
few statements as it allows, all of them or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from ..message import OutboxMessage
from .place import OpenPlace, Place, Sink

__all__ = ["Batch", "batching", "current_batch"]


class Batch:
    """What has been built and not stored yet."""

    def __init__(self, *, holds_direct: bool, subscribes: bool) -> None:
        #: Whether what is sent directly waits, too, until everything is stored.
        self.holds_direct = holds_direct
        self._subscribes = subscribes
        self._unsubscribed: list[Callable[[], None]] = []
        self._before: list[tuple[Place, str, Callable[[], None]]] = []
        self._messages: dict[object, tuple[Sink, Place, list[OutboxMessage]]] = {}
        self._direct: list[Callable[[], None]] = []

    def add(self, place: Place, messages: Sequence[OutboxMessage], sink: Sink) -> None:
        """Store ``messages`` in ``place`` when the batch is complete, by way of ``sink``."""
        _, _, kept = self._messages.setdefault(_key(place), (sink, place, []))
        kept += messages

    def call_before_commit(self, place: Place, task_name: str, action: Callable[[], None]) -> None:
        """Call ``action`` before COMMIT and before anything is stored, if the batch is completed."""
        self._before.append((place, task_name, action))

    def subscribe_later(self, subscribe: Callable[[], None]) -> None:
        """Call ``subscribe`` when the batch is complete, unless something of it was stored.

        Of what was stored, results are subscribed to when somebody waits for them.
        """
        self._unsubscribed.append(subscribe)

    def send_later(self, send: Callable[[], None]) -> None:
        """Call ``send`` when everything has been stored."""
        self._direct.append(send)

    def complete(self) -> None:
        """Store everything, then send what is direct."""
        for place, task_name, action in self._before:
            place.call_before_commit(task_name, action)
        for sink, place, messages in self._messages.values():
            sink(place, messages)
        for send in self._direct:
            send()
        if self._subscribes and not self._messages:
            for subscribe in self._unsubscribed:
                subscribe()


_current: ContextVar[Batch | None] = ContextVar("celery_outbox_batch", default=None)


def current_batch() -> Batch | None:
    """The batch that is being built here, None outside one."""
    return _current.get()


@contextmanager
def batching(*, holds_direct: bool = False, subscribes: bool = True) -> Iterator[Batch]:
    """Build a batch; the outermost one is stored at its end, unless there was an error."""
    outer = _current.get()
    if outer is not None:
        yield outer
        return
    batch = Batch(holds_direct=holds_direct, subscribes=subscribes)
    token = _current.set(batch)
    try:
        yield batch
    finally:
        _current.reset(token)
    batch.complete()


def _key(place: Place) -> object:
    if isinstance(place, OpenPlace):
        return (id(place.record), place.database.name)
    return (None, place.database.name)
