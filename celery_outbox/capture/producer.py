"""The stand-in producer: Celery publishes into it, and finished messages come out.

Celery itself routes, builds and signs the message and fires its publish signals; what arrives here is
what it would have handed to Kombu. The body is serialized and compressed at once, by Kombu's own
code, so that an error shows at the call and nothing that changes later changes the message.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from numbers import Number
from typing import Any

from celery import Celery
from kombu import Exchange, Producer, Queue
from kombu.common import Broadcast
from kombu.entity import DELIVERY_MODES

from ..errors import OptionError
from ..message import Envelope, OutboxMessage
from ..policy import RetryPolicy
from ..storage.schema import MAX_TASK_ID, storable
from ..transports import Dispatch, Transport
from .times import read_eta

__all__ = ["NO_CONNECTION", "NoConnection", "OutboxProducer", "Request", "tidied"]

#: Arguments of ``Producer.publish`` that say how to publish and are no part of the message.
_NOT_STORED = ("retry", "retry_policy", "timeout", "confirm_timeout")

_BROADCAST = (
    "expected a queue that a relay can declare, got a Broadcast queue, whose name belongs to one "
    "consumer. Dispatch it with via_outbox=False."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What of a dispatch the finished message no longer tells.

    Attributes:
        broker: the destination's name.
        transport: its transport.
        is_beside: whether its messages are rows of the very database that the outbox is in.
        task_name: as people know it.
        queue: the queue asked for, by name or whole.
        countdown: the relative delay asked for, an explicit zero included.
        retry: the retry policy asked for.
    """

    broker: str
    transport: Transport
    is_beside: bool
    task_name: str
    queue: Any
    countdown: float | None
    retry: RetryPolicy | None


class OutboxProducer(Producer):  # type: ignore[misc]  # Kombu is not typed
    """Collects the messages of one dispatch: the task, and its ``task-sent`` event if there is one."""

    # One is made for each dispatch: of what Kombu's constructor does, only this is needed.
    serializer = compression = None

    def __init__(self, app: Celery, request: Request) -> None:
        self._app = app
        self._request = request
        self.messages: list[OutboxMessage] = []

    @property
    def connection(self) -> NoConnection:
        """There is none; Celery asks it to translate errors."""
        return NO_CONNECTION

    def publish(
        self,
        body: Any,
        routing_key: str | None = None,
        *,
        headers: dict[str, Any] | None = None,
        exchange: Any = None,
        declare: Any = None,
        serializer: str | None = None,
        content_type: str | None = None,
        content_encoding: str | None = None,
        compression: str | None = None,
        expiration: float | None = None,
        **properties: Any,
    ) -> None:
        """Take what Kombu's ``Producer.publish`` would have sent."""
        headers = dict(headers or {})
        data, content_type, content_encoding = self._prepare(
            body, serializer, content_type, content_encoding, compression, headers
        )
        for name in _NOT_STORED:
            properties.pop(name, None)
        properties = tidied(properties)
        if isinstance(mode := properties.get("delivery_mode"), str):
            properties["delivery_mode"] = DELIVERY_MODES[mode]
        if expiration is not None and not isinstance(expiration, Number):
            raise OptionError(f"expiration: expected a number of seconds, got {expiration!r}.")
        if isinstance(properties.get("reply_to"), Queue):
            properties["reply_to"] = properties["reply_to"].name
        self._refuse_destination(exchange, routing_key)
        envelope = Envelope(
            exchange="" if exchange is None else exchange,
            routing_key=routing_key or "",
            content_type=content_type,
            content_encoding=content_encoding,
            headers=headers,
            properties=properties,
            declare=_declared(declare),
        )
        self.messages.append(
            self._message(body, headers, envelope, _to_bytes(data, content_encoding), expiration)
        )

    def _refuse_destination(self, exchange: Any, routing_key: Any) -> None:
        """Raise OptionError for what no relay could deliver to."""
        for what in (exchange, routing_key):
            if what is not None and not isinstance(what, str | Exchange):
                raise OptionError(f"expected a queue, exchange and key of a broker, got {what!r}.")
        name = exchange.name if isinstance(exchange, Exchange) else exchange
        for queue in (self._request.queue, *self._app.amqp.queues.values()):
            if isinstance(queue, Broadcast) and queue.exchange.name == name:
                raise OptionError(_BROADCAST)

    def _message(
        self,
        body: Any,
        headers: dict[str, Any],
        envelope: Envelope,
        data: bytes,
        expiration: float | None,
    ) -> OutboxMessage:
        request = self._request
        # Protocol 1 keeps the id and the time in the body, and so do events.
        about = body if isinstance(body, dict) else headers
        is_event = about is body and "type" in body
        task_name = str(about["type"]) if is_event else request.task_name
        countdown, eta = (None, None) if is_event else self._delay(about.get("eta"))
        dispatch = request.transport.prepare(
            Dispatch(
                task=None if is_event else self._task(task_name),
                task_name=task_name,
                queue=_destination(envelope),
                envelope=envelope,
                body=data,
                countdown=countdown,
                eta=eta,
                expires_in=expiration,
                lead=request.transport.lead,
            )
        )
        return OutboxMessage(
            task_id=_checked_id(about.get("uuid") if is_event else about.get("id")),
            task_name=task_name,
            broker=request.broker,
            queue=dispatch.queue,
            envelope=dispatch.envelope.to_text(),
            body=dispatch.body,
            made_at=time.monotonic(),
            countdown=dispatch.countdown,
            eta=dispatch.eta,
            expires_in=dispatch.expires_in,
            lead=dispatch.lead.total_seconds(),
            retry=request.retry,
            kombu_queue=request.transport.kombu_queue(dispatch) if request.is_beside else None,
        )

    def _task(self, name: str) -> Any:
        # ``tasks`` makes those that nothing has used yet.
        known = self._app.tasks if self._request.transport.sees_tasks else self._app._tasks
        return known.get(name)

    def _delay(self, header: Any) -> tuple[float | None, datetime | None]:
        """The delay as (relative, absolute): what the header says, which a handler may have changed.

        A relative delay stays one, for it does not depend on this machine's clock.
        """
        countdown = self._request.countdown
        if not header:
            return (0.0, None) if countdown is not None else (None, None)
        eta = read_eta(header, self._app.timezone)
        if countdown and eta is not None:
            asked = self._app.now() + timedelta(seconds=countdown)
            if abs((asked - eta).total_seconds()) < 1:
                return countdown, None
        return None, eta


class NoConnection:
    """Stands where Celery asks a producer for its connection."""

    connection_errors = channel_errors = ()
    recoverable_connection_errors = recoverable_channel_errors = ()

    @contextmanager
    def _reraise_as_library_errors(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        yield


NO_CONNECTION = NoConnection()


def tidied(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Drop what says nothing, and let the priority come last, as ``virtual`` wants it.

    Celery gives a call that names a queue all options of ``apply_async`` that it knows, mostly None.
    """
    found = {
        name: value
        for name, value in properties.items()
        if value is not None or name not in {"immediate", "mandatory"}
    }
    if "priority" in found:
        found["priority"] = found.pop("priority")
    return found


def _declared(declare: Any) -> list[Any]:
    entities = list(declare or ())
    for entity in entities:
        if isinstance(entity, Broadcast):
            raise OptionError(_BROADCAST)
        if not isinstance(entity, Queue | Exchange):
            raise OptionError(f"declare: expected queues and exchanges of Kombu's, got {entity!r}.")
    return entities


def _destination(envelope: Envelope) -> str:
    for entity in envelope.declare:
        if isinstance(entity, Queue):
            return str(entity.name)
    exchange = envelope.exchange
    name = exchange.name if isinstance(exchange, Exchange) else exchange
    return str(envelope.routing_key or name or "")


def _to_bytes(body: Any, content_encoding: str | None) -> bytes:
    if not isinstance(body, str):
        return bytes(body)
    encoding = content_encoding or "utf-8"
    return body.encode("utf-8" if encoding == "binary" else encoding)


def _checked_id(task_id: Any) -> str:
    text = str(task_id)
    if not text or storable(text, MAX_TASK_ID) != text:
        raise OptionError(
            f"task_id: expected 1 to {MAX_TASK_ID} characters that a text column takes (no NUL, no "
            f"lone surrogate), got {text[:40]!r} of {len(text)} characters."
        )
    return text
