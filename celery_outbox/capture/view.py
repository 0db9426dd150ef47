"""Views of a Celery app, in which one dispatch meets another producer or result backend.

A view is an instance of a subclass of the app's own type that shares its ``__dict__``: everything is
the app's but what the view replaces. Celery's own code runs unchanged on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from celery import Celery
from celery.app.amqp import AMQP
from kombu import Producer

from .reprs import represent

__all__ = ["chord_view_of", "view_of"]


class _Amqp:
    """Stands before the app's ``amqp``: writes the arguments' readable form faster than Celery."""

    __slots__ = ("_amqp",)

    def __init__(self, amqp: Any) -> None:
        self._amqp = amqp

    def __getattr__(self, name: str) -> Any:
        return getattr(self._amqp, name)

    def create_task_message(
        self, task_id: str, name: str, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any
    ) -> Any:
        """Build the message."""
        amqp = self._amqp
        create = amqp.create_task_message
        if getattr(create, "__func__", None) is AMQP.as_task_v2:
            levels = amqp.app.conf.task_repr_maxlevels
            if options.get("argsrepr") is None:
                options["argsrepr"] = represent(args or (), amqp.argsrepr_maxsize, levels)
            if options.get("kwargsrepr") is None:
                options["kwargsrepr"] = represent(kwargs or {}, amqp.kwargsrepr_maxsize, levels)
        return create(task_id, name, args, kwargs, *rest, **options)


class _NoBackend:
    """Stands where Celery tells the result backend that a task is about to be sent."""

    def on_task_call(self, producer: Any, task_id: str) -> None:
        """Do nothing: Redis would subscribe and RPC declare a queue, over the network."""


_NO_BACKEND = _NoBackend()


def view_of(app: Celery, producer: Producer) -> Celery:
    """The view of ``app`` in which ``producer`` is every producer, and no backend is told."""
    return _view(app, _storing_type, producer)


def chord_view_of(app: Celery, backend: Any) -> Celery:
    """The view of ``app`` in which ``backend`` is the result backend."""
    return _view(app, _chord_type, backend)


def _view(app: Celery, make_type: Any, replacement: Any) -> Celery:
    if not _is_settled(app):
        _settle(app)
    app_type: Any = type(app)
    view: Any = object.__new__(make_type(app_type))
    view.__dict__ = app.__dict__
    view.outbox_replacement = replacement
    return view


def _is_settled(app: Any) -> bool:
    """Whether ``_settle`` would do nothing; asked instead, for settings are slow to read."""
    amqp = app.__dict__.get("amqp")
    return bool(app.configured and app._conf is not None and amqp and "router" in amqp.__dict__)


def _settle(app: Celery) -> None:
    """Let the app itself make what it makes at first use and keeps: a view must not be in it."""
    _ = (app.conf.task_serializer, app.amqp.router, app.AsyncResult, app.timezone)


@lru_cache(maxsize=64)
def _storing_type(app_type: Any) -> Any:
    @contextmanager
    def producer_or_acquire(self: Any, producer: Any = None) -> Iterator[Producer]:
        # Beat and canvases pass a producer of their own; it is not used.
        yield self.outbox_replacement

    return _subclass(
        app_type,
        amqp=property(lambda self: _Amqp(self.__dict__["amqp"])),
        backend=_NO_BACKEND,
        producer_or_acquire=producer_or_acquire,
    )


@lru_cache(maxsize=64)
def _chord_type(app_type: Any) -> Any:
    return _subclass(app_type, backend=property(lambda self: self.outbox_replacement))


def _subclass(app_type: Any, **replaced: Any) -> Any:
    # In a slot: the __dict__ is the app's.
    return type(
        f"{app_type.__name__}View", (app_type,), {"__slots__": ("outbox_replacement",), **replaced}
    )
