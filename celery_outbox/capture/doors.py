"""The two doors through which every dispatch goes, and what is told apart there.

``Celery.send_task`` is where a dispatch is stored or sent; ``Task.apply_async`` is where eager mode
turns off. Both are wrapped once, on Celery's classes, so that every task of every app is reached,
however it was made, and other libraries' wrappers are called as ever. An app without an Outbox falls
straight through.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from celery import Celery
from celery.app.task import Task
from celery.canvas import group

from ..errors import NoOutboxError
from .results import Later, noting_stored

__all__ = ["OPTIONS", "Outlet", "attach", "attached", "open_doors"]

#: The options of ours: popped at the doors, never on the wire.
OPTIONS = ("via_outbox", "outbox_database", "outbox_broker", "outbox_retry")

_ATTRIBUTE = "_celery_outbox"

# Task.retry and Task.replace end by raising, which rolls back the transaction around them: what they
# dispatch is told apart by this.
_is_republishing: ContextVar[bool] = ContextVar("celery_outbox_republishing", default=False)


class Outlet(Protocol):
    """What the doors ask of the Outbox of an app."""

    def send(
        self,
        send_task: Callable[..., Any],
        task: Any,
        name: str,
        options: dict[str, Any],
        asked: dict[str, Any],
        *,
        is_republished: bool,
    ) -> Any:
        """Store the dispatch, or send it by calling ``send_task(app, name, **options)``."""

    def apply_eagerly(
        self, apply: Callable[..., Any], task: Any, options: dict[str, Any], asked: dict[str, Any]
    ) -> Any:
        """Run ``apply(task, **options)`` when the transaction has committed, or at once."""


def attach(app: Celery, outlet: Outlet) -> None:
    """Make ``outlet`` the Outbox of ``app``; an attribute, so that a pickled app has none."""
    setattr(app, _ATTRIBUTE, outlet)


def attached(app: Any) -> Outlet | None:
    """The Outbox of ``app``, None when it has none."""
    outlet: Outlet | None = getattr(app, _ATTRIBUTE, None)
    return outlet


def open_doors(app: Celery | None = None) -> None:
    """Wrap Celery's classes; again does nothing.

    Also a Celery fixup: an app that was pickled brings it along, so that in the other process, too,
    our options are refused rather than let through.
    """
    _wrap(Celery, "send_task", _send_task)
    _wrap(Task, "apply_async", _apply_async)
    _wrap(Task, "retry", _republish)
    _wrap(Task, "replace", _republish)
    _wrap(Task, "AsyncResult", _async_result)
    _wrap(group, "apply_async", _group_apply_async)


def _wrap(owner: type, name: str, wrapper: Callable[[Callable[..., Any]], Any]) -> None:
    function = getattr(owner, name)
    inner = function
    while inner is not None:
        if getattr(inner, "_is_outbox_door", False):
            return
        inner = getattr(inner, "__wrapped__", None)
    door: Any = functools.wraps(function)(wrapper(function))
    door._is_outbox_door = True
    setattr(owner, name, door)


def _send_task(original: Callable[..., Any]) -> Callable[..., Any]:
    names = [name for name in inspect.signature(original).parameters if name != "self"]

    def send_task(self: Celery, name: str, *positional: Any, **options: Any) -> Any:
        options.update(zip(names[1:], positional, strict=False))
        asked = _asked(options)
        outlet = attached(self)
        task = options.get("task_type")
        if task is None:
            # As Celery does: without finalizing the app.
            task = self._tasks.get(name)
        if outlet is None:
            if not _is_republishing.get():
                _refuse_unattached(self, task, asked)
            return original(self, name, **options)
        return outlet.send(original, task, name, options, asked, is_republished=_is_republishing.get())

    return send_task


def _apply_async(original: Callable[..., Any]) -> Callable[..., Any]:
    names = [name for name in inspect.signature(original).parameters if name != "self"]

    def apply_async(self: Any, *positional: Any, **options: Any) -> Any:
        app = self._get_app()
        # Only eager mode never reaches send_task, the other door.
        if not app.conf.task_always_eager:
            return original(self, *positional, **options)
        options.update(zip(names, positional, strict=False))
        asked = _asked(options)
        outlet = attached(app)
        if outlet is None:
            _refuse_unattached(app, self, asked)
            return original(self, **options)
        return outlet.apply_eagerly(original, self, options, asked)

    return apply_async


def _asked(options: dict[str, Any]) -> dict[str, Any]:
    """Take our options out of ``options``."""
    return {option: options.pop(option) for option in OPTIONS if option in options}


def _refuse_unattached(app: Celery, task: Any, asked: dict[str, Any]) -> None:
    defaults = {option: getattr(task, option, None) for option in OPTIONS}
    if asked.get("via_outbox") is False and not any(
        asked.get(option) for option in OPTIONS if option != "via_outbox"
    ):
        return
    found = sorted(option for option in OPTIONS if asked.get(option) or defaults[option])
    if found:
        raise NoOutboxError(
            f"expected an Outbox on the Celery app {app.main!r}, because this dispatch says "
            f"{', '.join(found)}, found none. Create Outbox(app, databases=...) in this process "
            "(a pickled app brings none along)."
        )


def _republish(original: Callable[..., Any]) -> Callable[..., Any]:
    def republish(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _republishing():
            return original(self, *args, **kwargs)

    return republish


@contextmanager
def _republishing() -> Iterator[None]:
    token = _is_republishing.set(True)
    try:
        yield
    finally:
        _is_republishing.reset(token)


def _async_result(original: Callable[..., Any]) -> Callable[..., Any]:
    def async_result(self: Any, task_id: str, **kwargs: Any) -> Any:
        app = self._get_app()
        if attached(app) is None:
            return original(self, task_id, **kwargs)
        kwargs.setdefault("backend", Later(lambda: self.backend))
        return app.AsyncResult(task_id, task_name=self.name, **kwargs)

    return async_result


def _group_apply_async(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        with noting_stored():
            return original(self, *args, **kwargs)

    return apply_async
