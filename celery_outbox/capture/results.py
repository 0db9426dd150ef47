"""Result objects that leave the result backend alone until somebody asks for a result.

Celery opens the backend in the constructor of each result, and a group subscribes to it for every
member. A stored dispatch must do neither: the backend may be down, and the task has not been sent.
Celery's own fulfilling of promises is only postponed to the first ``get``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from celery import Celery
from celery.result import AsyncResult, GroupResult

__all__ = ["Later", "attach_results", "note_stored", "noting_stored"]

#: The ids stored by the canvas that is being dispatched; None outside one.
_stored_ids: ContextVar[set[str] | None] = ContextVar("celery_outbox_stored_ids", default=None)


class Later:
    """A result backend that is not opened yet."""

    __slots__ = ("open",)

    def __init__(self, open_: Callable[[], Any]) -> None:
        self.open = open_


class StoredResult(AsyncResult):  # type: ignore[misc]  # Celery has no types
    """An AsyncResult that opens its backend at the first use."""

    _backend: Any = None
    _is_unsubscribed = False

    def __init__(
        self,
        id: str,  # noqa: A002 - Celery's name
        backend: Any = None,
        task_name: str | None = None,
        app: Celery | None = None,
        parent: Any = None,
    ) -> None:
        later = backend or Later(lambda: self.app.backend)
        super().__init__(id, later, task_name, app, parent)

    @property
    def backend(self) -> Any:
        """The result backend."""
        if isinstance(self._backend, Later):
            self._backend = self._backend.open()
        return self._backend

    @backend.setter
    def backend(self, value: Any) -> None:
        self._backend = value

    def then(self, callback: Any, on_error: Any = None, weak: bool = False) -> Any:
        """Call ``callback`` with the result; of a stored task, no sooner than somebody waits."""
        if self.id in (_stored_ids.get() or ()):
            self._is_unsubscribed = True
            return self.on_ready.then(callback, on_error)
        return super().then(callback, on_error, weak)

    def subscribe(self) -> None:
        """Tell the backend that this result is waited for, where ``then`` did not."""
        if self._is_unsubscribed:
            self._is_unsubscribed = False
            self.backend.add_pending_result(self, weak=True)

    def __del__(self) -> None:
        # Celery cancels its subscription here: there is none in a backend that was never opened.
        if not isinstance(self._backend, Later):
            super().__del__()


class StoredGroupResult(GroupResult):  # type: ignore[misc]  # Celery has no types
    """A GroupResult whose members are subscribed to when they are waited for."""

    def iter_native(self, *args: Any, **kwargs: Any) -> Any:
        """Iterate over results as they arrive."""
        _subscribe(self)
        return super().iter_native(*args, **kwargs)


def _subscribe(group: Any) -> None:
    for member in group.results:
        if isinstance(member, StoredResult):
            member.subscribe()
        elif isinstance(member, GroupResult):
            _subscribe(member)


def attach_results(app: Celery) -> None:
    """Make the result classes of ``app`` these; Celery keeps them in the same two attributes."""
    app.AsyncResult = app.subclass_with_self(StoredResult, name="AsyncResult", reverse="AsyncResult")
    app.GroupResult = app.subclass_with_self(
        StoredGroupResult, name="GroupResult", reverse="GroupResult"
    )


@contextmanager
def noting_stored() -> Iterator[None]:
    """While a canvas is dispatched: remember which of its tasks were stored."""
    token = _stored_ids.set(set())
    try:
        yield
    finally:
        _stored_ids.reset(token)


def note_stored(task_id: str) -> None:
    """Remember, for the canvas being dispatched, that this task was stored."""
    ids = _stored_ids.get()
    if ids is not None:
        ids.add(task_id)
