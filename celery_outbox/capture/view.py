"""A view of a Celery app through which one dispatch goes without touching broker or backend.

An instance of a subclass of the app's own type that shares its ``__dict__``: everything is the
app's but the producer and the result backend. Celery's ``send_task`` runs unchanged on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from celery import Celery

from .producer import OutboxProducer

__all__ = ["view_of"]


class _NoBackend:
    """Stands where Celery tells the result backend that a task is about to be sent."""

    def on_task_call(self, producer: Any, task_id: str) -> None:
        """Do nothing: Redis would subscribe and RPC declare a queue, over the network."""


_NO_BACKEND = _NoBackend()


def view_of(app: Celery, producer: OutboxProducer) -> Celery:
    """Return the view of ``app`` in which ``producer`` is every producer."""
    _settle(app)
    app_type: Any = type(app)
    view: Any = object.__new__(_view_type(app_type))
    view.__dict__ = app.__dict__
    view.outbox_producer = producer
    return view


def _settle(app: Celery) -> None:
    """Let the app itself make what it makes at first use and keeps: a view must not be in it."""
    _ = (app.conf.task_serializer, app.amqp.router, app.AsyncResult, app.thread_oid, app.timezone)


@lru_cache(maxsize=64)
def _view_type(app_type: Any) -> Any:
    @contextmanager
    def producer_or_acquire(self: Any, producer: Any = None) -> Iterator[OutboxProducer]:
        # Beat and canvases pass a producer of their own; it is not used.
        yield self.outbox_producer

    return type(
        f"{app_type.__name__}View",
        (app_type,),
        {
            # In a slot: the __dict__ is the app's.
            "__slots__": ("outbox_producer",),
            "backend": _NO_BACKEND,
            "producer_or_acquire": producer_or_acquire,
            "producer_or_acquire_for_write": producer_or_acquire,
        },
    )
