"""A direct dispatch that is built now and sent later, when everything else of its batch is stored."""

from __future__ import annotations

from typing import Any

from celery import Celery
from kombu import Producer

from .producer import NO_CONNECTION, NoConnection

__all__ = ["HeldProducer"]


class HeldProducer(Producer):  # type: ignore[misc]  # Kombu is not typed
    """Keeps what Celery publishes, serialized at once, until ``release``."""

    def __init__(self) -> None:
        super().__init__(None, auto_declare=False)
        self._held: list[tuple[Any, dict[str, Any]]] = []

    @property
    def connection(self) -> NoConnection:
        """There is none yet."""
        return NO_CONNECTION

    def publish(
        self,
        body: Any,
        *,
        headers: dict[str, Any] | None = None,
        serializer: str | None = None,
        content_type: str | None = None,
        content_encoding: str | None = None,
        compression: str | None = None,
        **details: Any,
    ) -> None:
        """Serialize and compress, as Kombu's ``Producer.publish`` would, and keep."""
        headers = dict(headers or {})
        body, content_type, content_encoding = self._prepare(
            body, serializer, content_type, content_encoding, compression, headers
        )
        details |= {
            "headers": headers,
            "content_type": content_type,
            "content_encoding": content_encoding,
        }
        self._held.append((body, details))

    def release(self, app: Celery, task_id: str | None, connection: Any = None) -> None:
        """Send what was kept, by ``connection`` or one of the app's; a ``task_id`` is waited for."""
        own = connection and app.amqp.Producer(connection, auto_declare=False)
        with app.producer_or_acquire(own) as producer:
            if task_id is not None:
                app.backend.on_task_call(producer, task_id)
            for body, details in self._held:
                producer.publish(body, **details)
