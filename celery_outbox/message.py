"""The frozen values that travel from a dispatch to a row and from a row to a broker.

This module alone knows how the envelope of a message (everything but the body) is written as text.
What the envelope holds is Kombu's vocabulary: the arguments of ``Producer.publish``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from kombu import Exchange, Queue
from kombu.entity import binding
from kombu.utils import json as kombu_json

from .policy import RetryPolicy

__all__ = ["ClaimedMessage", "Envelope", "EnvelopeParts", "KombuQueue", "OutboxMessage"]

ENVELOPE_VERSION = 1

#: The markers of Kombu's own JSON types. Others belong to the application, whose decoders the
#: relay does not have: their tagged form is kept as it is and written again unchanged.
_KOMBU_MARKERS = frozenset({"bytes", "base64", "datetime", "date", "time", "decimal", "uuid"})

_ENCODER = kombu_json.JSONEncoder()
# Line breaks are white space between the members of a JSON object, and escaped inside of them.
_HEADERS = '\n"headers": '
_PROPERTIES = '\n"properties": '


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Everything of a finished message but its body, as ``kombu.Producer.publish`` takes it."""

    exchange: str | Exchange
    routing_key: str
    content_type: str
    content_encoding: str
    headers: Mapping[str, Any]
    properties: Mapping[str, Any] = field(default_factory=dict)
    declare: Sequence[Queue | Exchange] = ()

    def to_text(self) -> str:
        """Write the envelope as ASCII JSON, Kombu's tagged types for what JSON lacks.

        The headers and the properties stand in lines of their own, for ``EnvelopeParts``. Raises
        TypeError for a header or property that Kombu could not write either.
        """
        encode = _ENCODER.encode
        destination = encode(
            {
                "v": ENVELOPE_VERSION,
                "exchange": _entity_to_dict(self.exchange),
                "routing_key": self.routing_key,
                "content_type": self.content_type,
                "content_encoding": self.content_encoding,
                "declare": [_entity_to_dict(entity) for entity in self.declare],
            }
        )
        headers, properties = encode(self.headers), encode(self.properties)
        return f"{destination[:-1]},{_HEADERS}{headers},{_PROPERTIES}{properties}}}"

    @classmethod
    def from_text(cls, text: str) -> Envelope:
        """Read what ``to_text`` wrote. Raises ValueError when the text is anything else."""
        try:
            data = json.loads(text, object_hook=_decode_tagged)
            if data.get("v") != ENVELOPE_VERSION:
                raise ValueError(
                    f"expected envelope version {ENVELOPE_VERSION}, found {data.get('v')!r}"
                )
            return cls(
                exchange=_entity_from_dict(data["exchange"]),
                routing_key=data["routing_key"],
                content_type=data["content_type"],
                content_encoding=data["content_encoding"],
                headers=data.get("headers", {}),
                properties=data.get("properties", {}),
                declare=[_entity_from_dict(entity) for entity in data["declare"]],
            )
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"the stored envelope cannot be read: {error!r}") from error


class EnvelopeParts(NamedTuple):
    """The parts of an envelope's text, for publishers that write them on without reading them.

    Attributes:
        destination: JSON of everything but headers and properties; alike for all messages that go the
            same way, and by itself the text of an envelope without headers and properties.
        headers: JSON as Kombu writes it.
        properties: the same.
    """

    destination: str
    headers: str
    properties: str

    @classmethod
    def of(cls, text: str) -> EnvelopeParts:
        """Cut what ``Envelope.to_text`` wrote. Raises ValueError when the text is anything else."""
        destination, first, rest = text.partition(f",{_HEADERS}")
        headers, second, properties = rest.partition(f",{_PROPERTIES}")
        if not (first and second):
            # Somebody has written it anew.
            return cls.of(Envelope.from_text(text).to_text())
        return cls(destination=f"{destination}}}", headers=headers, properties=properties[:-1])

    def read_headers(self) -> dict[str, Any]:
        """The headers as they were at the dispatch. Raises ValueError when they are no JSON object."""
        return _object(self.headers)

    def read_properties(self) -> dict[str, Any]:
        """The properties; like ``read_headers``."""
        return _object(self.properties)


@dataclass(frozen=True, slots=True, kw_only=True)
class KombuQueue:
    """A queue of Kombu's database transport, and the tables that hold it and its messages."""

    name: str
    queue_table: str
    message_table: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxMessage:
    """A finished broker message that is about to be stored.

    Attributes:
        broker: name of the broker that it is for: the app's own, or one of ``outbox_brokers``.
        queue: the destination as people know it; what counts stands in ``envelope``.
        envelope: ``Envelope.to_text()``.
        body: serialized and compressed bytes, never touched again.
        made_at: ``time.monotonic()`` at the dispatch, from which the two next count.
        countdown: seconds from ``made_at`` until it shall run; None when no relative delay was asked.
        expires_in: seconds from ``made_at`` until the broker may drop it; None when never.
        eta: the absolute time at which it shall run, aware; None when none was asked.
        lead: seconds before its time at which the message may leave for its broker.
        retry: the retry policy asked for this message; None for the app's.
        kombu_queue: where it is written instead of the outbox, if it can be, in the same database;
            None: it needs a relay.
    """

    task_id: str
    task_name: str
    broker: str
    queue: str
    envelope: str
    body: bytes
    made_at: float
    countdown: float | None = None
    eta: datetime | None = None
    expires_in: float | None = None
    lead: float = 0.0
    retry: RetryPolicy | None = None
    kombu_queue: KombuQueue | None = None

    @property
    def is_delayed(self) -> bool:
        """Whether a delay was asked for; an explicit zero counts."""
        return self.countdown is not None or self.eta is not None


class ClaimedMessage(NamedTuple):
    """A stored row that one relay has reserved; what a publisher is handed.

    A tuple, for there is one for each message relayed: it is made three times as fast. By name only.

    Attributes:
        id: the row, not the task: what a publisher's answer names.
        identity: names the stored row for ever, in whatever database it is: the same at each attempt,
            another for each dispatch.
        attempts: deliveries tried so far, this one included.
        due_in: seconds from the claim until it shall run, negative when late; None when no delay
            was asked.
        expires_in: seconds from the claim until its deadline, negative when it has passed; None
            when it has none.
        waited: seconds from its intended time, or from its storing where that is later, to the claim;
            negative when the broker takes it before its time.
    """

    id: int
    identity: str
    broker: str
    task_id: str
    task_name: str
    queue: str
    envelope: str
    body: bytes
    attempts: int
    due_in: float | None = None
    expires_in: float | None = None
    retry: RetryPolicy | None = None
    waited: float = 0.0


def _object(text: str) -> dict[str, Any]:
    value = _DECODER.decode(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object in the stored envelope, found {type(value).__name__}")  # noqa: TRY004 - as for every other text that cannot be read
    return value


def _decode_tagged(value: dict[str, Any]) -> Any:
    if value.keys() == {"__type__", "__value__"} and value["__type__"] in _KOMBU_MARKERS:
        return kombu_json.object_hook(value)
    return value


_DECODER = json.JSONDecoder(object_hook=_decode_tagged)


def _entity_to_dict(entity: Any) -> Any:
    """Write of an exchange, queue or binding what is not Kombu's default; names stay as they are."""
    if isinstance(entity, Queue):
        return {
            "queue": {
                **_attributes(entity, _QUEUE),
                "exchange": _entity_to_dict(entity.exchange),
                **(
                    {"bindings": list(map(_entity_to_dict, entity.bindings))} if entity.bindings else {}
                ),
            }
        }
    if isinstance(entity, Exchange):
        return {"exchange": _attributes(entity, _EXCHANGE)}
    if isinstance(entity, binding):
        return {
            "binding": {
                **_attributes(entity, _BINDING),
                "exchange": _entity_to_dict(entity.exchange),
            }
        }
    return entity


def _entity_from_dict(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, attributes),) = value.items()
    known = {"queue": Queue, "exchange": Exchange, "binding": binding}[kind]
    if "exchange" in attributes:
        attributes["exchange"] = _entity_from_dict(attributes["exchange"])
    if "bindings" in attributes:
        attributes["bindings"] = [_entity_from_dict(each) for each in attributes["bindings"]]
    return known(**attributes)


def _attributes(entity: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    # None means the default everywhere.
    return {
        name: value
        for name, default in defaults.items()
        if (value := getattr(entity, name)) is not None and value != default
    }


def _defaults(kind: type[Any]) -> dict[str, Any]:
    """What is written of an entity, also of a subclass: what its Kombu parent can be rebuilt from."""
    return {
        name: getattr(kind, name, None)
        for name, _ in kind.attrs
        if name not in {"exchange", "bindings"}
    }


_QUEUE, _EXCHANGE, _BINDING = _defaults(Queue), _defaults(Exchange), _defaults(binding)
