"""Tasks as a test sees them, whatever they were stored as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..capture.eager import EagerTask
    from ..message import OutboxMessage

__all__ = ["RecordedTask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTask:
    """One task dispatched through the outbox, as a worker gets it.

    Attributes:
        args: positional arguments; what was a tuple is a list after JSON.
        countdown, eta: the delay asked for, in seconds or as an aware time; None when none was.
        properties: those of the message, such as its priority.
        next: what a worker does afterwards: callbacks, errbacks, chain, chord.
        about: the rest, such as retries and group: the headers or, in protocol 1, the body.
        message: what is stored; None in eager mode, where nothing is.
    """

    id: str
    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    queue: str
    broker: str
    database: str
    countdown: float | None
    eta: datetime | None
    headers: Mapping[str, Any]
    properties: Mapping[str, Any]
    next: Mapping[str, Any]
    about: Mapping[str, Any]
    content_type: str
    message: OutboxMessage | None

    @classmethod
    def of(cls, message: OutboxMessage, database: str) -> RecordedTask | None:
        """Read the message of a task; None for the ``task-sent`` event that is stored beside it."""
        from kombu import compression, serialization

        from ..message import Envelope

        envelope, body = Envelope.from_text(message.envelope), message.body
        if (compressed := envelope.headers.get("compression")) is not None:
            body = compression.decompress(body, compressed)
        kind = envelope.content_type
        data = serialization.loads(body, kind, envelope.content_encoding, accept=[kind])
        # Protocol 1 and events have everything in one mapping.
        about = data if isinstance(data, Mapping) else envelope.headers
        if "task" not in about:
            return None
        args, kwargs, after = (data["args"], data["kwargs"], data) if about is data else data
        return cls(
            id=message.task_id,
            name=message.task_name,
            args=list(args),
            kwargs=dict(kwargs),
            database=database,
            headers=envelope.headers,
            properties=envelope.properties,
            next=after,
            about=about,
            content_type=kind,
            message=message,
            **{each: getattr(message, each) for each in ("queue", "broker", "countdown", "eta")},
        )

    @classmethod
    def of_eager(cls, task: EagerTask, database: str) -> RecordedTask:
        """Take over what was dispatched in eager mode."""
        same = ("id", "name", "queue", "broker", "countdown", "eta", "headers", "properties", "next")
        return cls(
            args=list(task.args),
            kwargs=dict(task.kwargs),
            database=database,
            about=task.headers,
            content_type=task.content_type,
            message=None,
            **{each: getattr(task, each) for each in same},
        )

    def has(self, args: list[Any] | None, kwargs: dict[str, Any] | None) -> bool:
        """Whether it has these arguments, or what they become on their way; None stands for any."""
        return all(
            want is None or want == got or _received(want, self.content_type) == got
            for got, want in ((self.args, args), (self.kwargs, kwargs))
        )

    def __str__(self) -> str:
        from celery.utils.saferepr import saferepr

        arguments = [saferepr(each, maxlen=200) for each in self.args]
        arguments += [f"{key}={saferepr(each, maxlen=200)}" for key, each in self.kwargs.items()]
        return f"{self.name}({', '.join(arguments)})"


def _received(value: Any, content_type: str) -> Any:
    from kombu import serialization
    from kombu.exceptions import EncodeError

    try:
        _, encoding, data = serialization.dumps(
            value, serialization.registry.type_to_name[content_type]
        )
    except EncodeError:
        return value  # such as mock.ANY
    return serialization.loads(data, content_type, encoding, accept=[content_type])
