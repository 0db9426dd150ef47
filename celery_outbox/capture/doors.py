"""The two doors through which every dispatch goes.

``Celery.send_task`` is where a dispatch is stored or sent; ``Task.apply_async`` is where eager mode
turns off. Both are wrapped once, on Celery's classes, so that every task of every app is reached,
however it was made, and other libraries' wrappers are called as ever. An app without an Outbox falls
straight through.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from celery import Celery
from celery.app.task import Task

from ..errors import NoOutboxError
from .choice import OPTIONS, Level, choosing, of_canvas, of_task, take
from .eager import EagerSink, EagerTask
from .place import Place
from .registry import of_name
from .results import Later
from .scoped import scoped

__all__ = ["Outlet", "attach", "attached", "is_republishing", "open_doors", "task_levels", "wrap"]

_ATTRIBUTE = "_celery_outbox"

#: Celery's own tasks that run another: what that one says counts.
_MAPS = frozenset({"celery.map", "celery.starmap", "celery.chunks"})

# Task.retry and Task.replace end by raising, which rolls back the transaction around them: what they
# dispatch is told apart by this.
_is_republishing: ContextVar[bool] = ContextVar("celery_outbox_republishing", default=False)


class Outlet(Protocol):
    """What the doors ask of the Outbox of an app.

    ``levels`` is what the call, the canvas around it and the task say, in that order.
    """

    eager_sink: EagerSink

    def send(
        self,
        send_task: Callable[..., Any],
        name: str,
        options: dict[str, Any],
        levels: Sequence[Level],
        *,
        is_republished: bool,
    ) -> Any:
        """Store the dispatch, or send it by calling ``send_task(app, name, **options)``."""

    def apply_eagerly(
        self,
        apply: Callable[..., Any],
        task: Any,
        options: dict[str, Any],
        levels: Sequence[Level],
    ) -> Any:
        """Run ``apply(task, **options)`` when the transaction has committed, or at once."""

    def place_of(
        self, signatures: Iterable[tuple[Any, Level]], *, is_republished: bool
    ) -> Place | None:
        """Where the stored ones of ``signatures`` go; None when none is stored."""

    def described(
        self, signatures: Iterable[tuple[Any, Level]], *, is_republished: bool
    ) -> Sequence[EagerTask]:
        """What would be stored of ``signatures`` in eager mode."""


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
    for option in OPTIONS:
        # What a task says that says nothing; without it, each dispatch would search all its classes.
        if not hasattr(Task, option):
            setattr(Task, option, None)
    wrap(Celery, "send_task", _send_task)
    wrap(Task, "apply_async", _apply_async)
    wrap(Task, "retry", _republish)
    wrap(Task, "replace", _republish)
    wrap(Task, "AsyncResult", _async_result)


def wrap(owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Any]) -> None:
    """Wrap a method or function of Celery's, once, however many wrappers others put around it."""
    function = getattr(owner, name)
    inner = function
    while inner is not None:
        if getattr(inner, "_is_outbox_door", False):
            return
        inner = getattr(inner, "__wrapped__", None)
    door: Any = functools.wraps(function)(wrapper(function))
    # Celery's annotations ("@apply_async") would take a door with __wrapped__ off again.
    del door.__wrapped__
    door.__signature__ = inspect.signature(function)
    door._is_outbox_door = True
    setattr(owner, name, door)


def _send_task(original: Callable[..., Any]) -> Callable[..., Any]:
    names = [name for name in inspect.signature(original).parameters if name != "self"]

    def send_task(self: Celery, name: str, *positional: Any, **options: Any) -> Any:
        if positional:
            options.update(zip(names[1:], positional, strict=False))
        outlet, is_republished = attached(self), is_republishing()
        levels = [take(options), of_canvas()]
        if not is_republished:
            levels += task_levels(self, name, options)
        if outlet is None:
            _refuse_unattached(self, levels)
            return original(self, name, **options)
        # What handlers of Celery's signals dispatch meanwhile is no member of the canvas, and no retry.
        with choosing({}), scoped(_is_republishing, False):
            return outlet.send(original, name, options, levels, is_republished=is_republished)

    return send_task


def task_levels(app: Celery, name: str, options: Mapping[str, Any]) -> list[Level]:
    """What the task says that is sent, or that is mapped over its arguments."""
    task = options.get("task_type")
    if name in _MAPS and (mapped := (options.get("kwargs") or {}).get("task")):
        said = {key: mapped["options"][key] for key in OPTIONS if key in mapped["options"]}
        return [said, of_name(app, mapped["task"])]
    return [of_name(app, name) if task is None else of_task(task)]


def is_republishing() -> bool:
    """Whether this is inside ``Task.retry`` or ``Task.replace``."""
    return _is_republishing.get()


def _refuse_unattached(app: Celery, levels: Sequence[Level]) -> None:
    for level in levels:
        if level.get("via_outbox") is False:
            return
        found = [option for option in OPTIONS if level.get(option)]
        if found:
            raise NoOutboxError(
                f"expected an Outbox on the Celery app {app.main!r}, because this dispatch says "
                f"{', '.join(found)}, found none. Create Outbox(app, databases=...) in this process "
                "(a pickled app brings none along)."
            )


def _apply_async(original: Callable[..., Any]) -> Callable[..., Any]:
    names = [name for name in inspect.signature(original).parameters if name != "self"]

    def apply_async(self: Any, *positional: Any, **options: Any) -> Any:
        app = self._get_app()
        # Only eager mode never reaches send_task, the other door.
        if not app.conf.task_always_eager:
            return original(self, *positional, **options)
        options.update(zip(names, positional, strict=False))
        levels = [take(options), of_canvas(), of_task(self)]
        outlet = attached(app)
        if outlet is None:
            _refuse_unattached(app, levels)
            return original(self, **options)
        with choosing({}):
            return outlet.apply_eagerly(original, self, options, levels)

    return apply_async


def _republish(original: Callable[..., Any]) -> Callable[..., Any]:
    def republish(self: Any, *args: Any, **kwargs: Any) -> Any:
        with scoped(_is_republishing, True):
            return original(self, *args, **kwargs)

    return republish


def _async_result(original: Callable[..., Any]) -> Callable[..., Any]:
    def async_result(self: Any, task_id: str, **kwargs: Any) -> Any:
        app = self._get_app()
        if attached(app) is None:
            return original(self, task_id, **kwargs)
        kwargs.setdefault("backend", Later(lambda: self.backend))
        return app.AsyncResult(task_id, task_name=self.name, **kwargs)

    return async_result
