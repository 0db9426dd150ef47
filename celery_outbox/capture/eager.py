"""Eager mode: a task that would have been stored runs when its transaction has committed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import states
from celery.result import EagerResult, GroupResult
from kombu import serialization

from ..errors import DispatchError

__all__ = ["DeferredResult", "copied"]


class DeferredResult(EagerResult):  # type: ignore[misc]  # Celery has no types
    """The result of a task that runs after the commit; pending until then."""

    def __init__(self, id: str, name: str | None = None) -> None:  # noqa: A002 - Celery's name
        super().__init__(id, None, states.PENDING, name=name)

    def run(self, apply: Callable[[], Any]) -> None:
        """Run the task, or what a canvas runs last, and take its result over."""
        try:
            result = apply()
        except Exception as error:
            self._state, self._result = states.FAILURE, error
            raise
        if isinstance(result, GroupResult):
            self._take_group(result)
            return
        self._state = result.state
        self._result = result.result
        self._traceback = result.traceback

    def _take_group(self, group: GroupResult) -> None:
        failed = [each for each in group.results if each.state in states.PROPAGATE_STATES]
        self._state = failed[0].state if failed else states.SUCCESS
        self._result = failed[0].result if failed else group.join(disable_sync_subtasks=False)

    def __reduce__(self) -> Any:
        # What is pickled stays as it is now.
        return EagerResult, self.__reduce_args__()

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """The task's value. Raises DispatchError before the commit: waiting would be in vain."""
        if not self.ready():
            raise DispatchError(
                f"expected the task {self.id} to have run, found that its transaction has not "
                "committed. In eager mode it runs after the commit: ask for its result then."
            )
        return super().get(*args, **kwargs)

    wait = get

    def ready(self) -> bool:
        """Whether the task has run."""
        return self._state in states.READY_STATES


def copied(args: Any, kwargs: Any, serializer: str) -> tuple[Any, Any]:
    """Arguments as they were at the call, through the serializer, whose errors show at the call."""
    content_type, content_encoding, data = serialization.dumps((args, kwargs), serializer)
    args, kwargs = serialization.loads(data, content_type, content_encoding, accept=[content_type])
    return args, kwargs
