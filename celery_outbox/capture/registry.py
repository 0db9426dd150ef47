"""What a task says that is known by its name alone, also one that nothing has used yet.

``@app.task`` makes the task at its first use, and ``send_task`` is none: Celery sends by the name. What
such a task will say stands in the decorator's arguments. The task is not made here, for that would
change what Celery sends.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from celery import Celery
from celery.app.annotations import resolve_all

from .choice import Level, of_task

__all__ = ["of_name"]


def of_name(app: Celery, name: str) -> Level:
    """What the task of that name says; nothing when this process has none."""
    task = app._tasks.get(name)
    if task is not None or app.finalized:
        return of_task(task)
    for promise in list(app._pending):
        arguments = _arguments_of(promise)
        if arguments is not None and _name_of(app, *arguments) == name:
            return _of_arguments(app, name, arguments[1])
    return {}


def _arguments_of(promise: Any) -> tuple[Any, dict[str, Any]] | None:
    """The function and the options of a task that is not made yet; None when it just was."""
    try:
        (function,) = object.__getattribute__(promise, "_Proxy__args")
        return function, object.__getattribute__(promise, "_Proxy__kwargs")
    except (AttributeError, TypeError, ValueError):
        return None


def _name_of(app: Celery, function: Any, options: dict[str, Any]) -> str:
    name = options.get("name") or app.gen_task_name(function.__name__, function.__module__)
    return str(name)


def _of_arguments(app: Celery, name: str, options: dict[str, Any]) -> Level:
    said = {**of_task(options.get("base") or app.Task), **of_task(SimpleNamespace(**options))}
    for annotation in resolve_all(app.annotations, SimpleNamespace(name=name)):
        said |= of_task(SimpleNamespace(**annotation))
    return said
