"""Result objects that leave the result backend alone until somebody asks for a result.

Celery opens the backend in the constructor of each result, and a group subscribes to it for every
member. A stored dispatch must do neither: the backend may be down, and the task has not been sent.
Celery's own fulfilling of promises is only postponed to the first ``get``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery
from celery.result import AsyncResult, GroupResult

from .batch import current_batch

__all__ = ["Later", "attach_results"]


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
        """Call ``callback`` with the result; of a stored canvas, no sooner than somebody waits."""
        batch = current_batch()
        if batch is None:
            return super().then(callback, on_error, weak)
        if not self._is_unsubscribed:
            self._is_unsubscribed = True
            batch.subscribe_later(self.subscribe)
        return self.on_ready.then(callback, on_error)

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
