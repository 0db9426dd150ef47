"""What must be known of a broker's transport when a task is dispatched.

When a message may leave, what of it the broker would refuse, and whether it outlives this process.
How a batch is published is known in ``relay.publishers``. A class for each transport that differs;
``outbox_transports`` names others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from kombu import Connection, Queue
from kombu.transport import TRANSPORT_ALIASES
from kombu.utils.imports import symbol_by_name
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError

from .errors import ConfigurationError, OptionError
from .message import Envelope, EnvelopeParts, KombuQueue
from .publishing import Publisher
from .virtual import Properties, spliced

__all__ = [
    "SQS_BYTES",
    "Dispatch",
    "Transport",
    "attribute_bytes",
    "describe",
    "is_broker_engine",
    "is_in_memory",
    "resolved",
]

#: Kombu's default for Redis; a worker that holds a message longer sees it delivered again.
REDIS_VISIBILITY_SECONDS = 3600
#: RabbitMQ holds what it is given; workers keep it unacknowledged, and 30 minutes is its
#: delivery acknowledgement limit (consumer_timeout). Half of that is safe.
AMQP_LEAD = timedelta(minutes=15)
#: The longest DelaySeconds that SQS takes.
SQS_LEAD = timedelta(seconds=900)
#: Transport options by which Kombu may write elsewhere than the URL says.
_ELSEWHERE = frozenset({"creator", "execution_options"})
#: What SQS takes as one message, and as one request, attributes included (since August 2025; before,
#: 256 KiB).
SQS_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """A finished message that is about to be stored, as a transport may change it.

    Attributes:
        task: the task object; None when this process knows none of that name.
        task_name: as people know it.
        queue: the destination as people know it.
        envelope: where it goes, and with what headers and properties.
        body: the payload, serialized and compressed.
        countdown: seconds from now until it shall run; None when no relative delay was asked.
        eta: the absolute time at which it shall run, aware; None when none was asked.
        expires_in: seconds from now until the broker may drop it; None when never.
        lead: how long before its time it may leave for the broker; without a delay, it leaves at once.
    """

    task: Any
    task_name: str
    queue: str
    envelope: Envelope
    body: bytes
    countdown: float | None = None
    eta: datetime | None = None
    expires_in: float | None = None
    lead: timedelta = timedelta(0)

    @property
    def remaining(self) -> timedelta:
        """How long until it shall run, by this machine's clock; zero when that has passed."""
        if self.eta is not None:
            return max(self.eta - datetime.now(UTC), timedelta(0))
        return timedelta(seconds=max(self.countdown or 0.0, 0.0))


class Transport:
    """One broker's transport. Derive from it for one of your own, and name it in ``outbox_transports``.

    Args:
        connection: not connected, and never to be.
        max_delay: what ``outbox_brokers`` says of how long before its time a message may leave.

    Attributes:
        kind: Kombu's name of it: redis, pyamqp, SQS, sqlalchemy, memory, …
        options: the broker's transport options.
    """

    #: Its messages live in this process only: no other process can relay to it.
    is_in_process: bool = False
    #: Whether ``prepare`` is to be told the task. A task that is dispatched by its name alone is made
    #: for that, which is why it is only done for transports of the user's own.
    sees_tasks: bool = False
    #: Its messages outlive a restart of the broker.
    is_persistent: ClassVar[bool] = True
    #: Its messages are rows of this database.
    database: URL | None = None

    def __init__(self, connection: Connection, max_delay: timedelta | None = None) -> None:
        self.kind = kind_of(connection)
        self.options: Mapping[str, Any] = connection.transport_options or {}
        self.lead = self.default_lead() if max_delay is None else max_delay

    def default_lead(self) -> timedelta:
        """How long before its time a delayed message may leave; zero: when it is due."""
        return timedelta(0)

    def prepare(self, dispatch: Dispatch) -> Dispatch:
        """Change a dispatch, or refuse it, while the caller is at hand; it must contact nobody.

        What comes back is stored as it is, and published as it is stored. Raises OptionError, or what
        the caller would get without the outbox.
        """
        return dispatch

    def kombu_queue(self, dispatch: Dispatch) -> KombuQueue | None:
        """Where it may be written instead, if the outbox is in ``database``; None: by a relay only."""
        return None

    def publisher(self, connection: Connection) -> Publisher | None:
        """A publisher that takes ``connection`` over; None for the one of Kombu's transport."""
        return None


class _Redis(Transport):
    """Workers hold what is not due, and see it again when the visibility timeout ends."""

    def default_lead(self) -> timedelta:
        return timedelta(seconds=self.options.get("visibility_timeout", REDIS_VISIBILITY_SECONDS) / 2)


class _AMQP(Transport):
    """RabbitMQ."""

    def default_lead(self) -> timedelta:
        return AMQP_LEAD

    def prepare(self, dispatch: Dispatch) -> Dispatch:
        exchange = getattr(dispatch.envelope.exchange, "name", dispatch.envelope.exchange)
        if exchange.endswith("celery_delayed_27"):
            # Native delayed delivery of quorum queues: it waits in RabbitMQ, however long.
            return replace(dispatch, lead=dispatch.remaining)
        return dispatch


class _SQS(Transport):
    """SQS holds a message for up to 15 minutes, on a FIFO queue not at all; it refuses long ones."""

    def default_lead(self) -> timedelta:
        return SQS_LEAD

    def prepare(self, dispatch: Dispatch) -> Dispatch:
        dispatch = _with_delay_seconds(dispatch)
        self._refuse_too_long(dispatch)
        lead = timedelta(0) if dispatch.queue.endswith(".fifo") else min(self.lead, SQS_LEAD)
        return replace(dispatch, lead=lead)

    def _refuse_too_long(self, dispatch: Dispatch) -> None:
        """Raise OptionError for what SQS would never take, however often it was tried."""
        envelope = dispatch.envelope
        if 2 * (len(envelope.to_text()) + len(dispatch.body)) < SQS_BYTES:
            return  # with both layers of base64 the body does not become twice as long
        properties = dict(envelope.properties)
        attributes = properties.pop("message_attributes", None)
        properties.pop("priority", None)  # what is spliced has one
        parts = EnvelopeParts.of(replace(envelope, properties=properties).to_text())
        size = len(spliced(parts, Properties.of(parts), dispatch.body, dispatch.expires_in))
        if self.options.get("sqs_base64_encoding", True):
            size = -(-size // 3) * 4
        size += attribute_bytes(attributes)
        if size > SQS_BYTES:
            raise OptionError(
                f"expected a message of at most {SQS_BYTES:,} bytes, the limit of SQS, got "
                f"{dispatch.task_name!r} with {size:,} bytes as it is sent (its body alone has "
                f"{len(dispatch.body):,}). Put the data elsewhere and pass where it is, or add "
                'compression="zlib".'
            )


def attribute_bytes(attributes: Any) -> int:
    """What message attributes of SQS add to a message: name, type and value of each."""
    if not isinstance(attributes, Mapping):
        return 0
    return sum(
        _length(name) + sum(map(_length, value.values()))
        for name, value in attributes.items()
        if isinstance(value, Mapping)
    )


def _length(value: Any) -> int:
    return len(value) if isinstance(value, bytes) else len(str(value).encode())


def _with_delay_seconds(dispatch: Dispatch) -> Dispatch:
    """Take the caller's own delay of SQS for what it is: it counts from now, and is not restarted."""
    properties = dict(dispatch.envelope.properties)
    asked = [properties.pop(name, None) for name in ("delay_seconds", "DelaySeconds")]
    try:
        seconds = next((int(each) for each in asked if each is not None), None)
    except (TypeError, ValueError, OverflowError):
        return dispatch  # Kombu warns, and sends it without
    if seconds is None or seconds < 0:
        return dispatch
    envelope = replace(dispatch.envelope, properties=properties)
    is_delayed = dispatch.countdown is not None or dispatch.eta is not None
    if not is_delayed or dispatch.remaining.total_seconds() < seconds:
        return replace(dispatch, envelope=envelope, countdown=float(seconds), eta=None)
    return replace(dispatch, envelope=envelope)


class _Database(Transport):
    """Kombu's database transport writes and reads with the JSON of the standard library."""

    def __init__(self, connection: Connection, max_delay: timedelta | None = None) -> None:
        super().__init__(connection, max_delay)
        with suppress(ArgumentError):
            url = make_url(connection.hostname)
            self.is_in_process = is_in_memory(url) and "creator" not in self.options
            if not (_ELSEWHERE & self.options.keys() or connection.alt[1:]):
                self.database = url

    def prepare(self, dispatch: Dispatch) -> Dispatch:
        # Raises TypeError, as without the outbox: a worker could not read the message.
        json.dumps([dispatch.envelope.headers, dispatch.envelope.properties])
        return dispatch

    def kombu_queue(self, dispatch: Dispatch) -> KombuQueue | None:
        name = _only_queue(dispatch.envelope)
        if dispatch.remaining or not name:
            return None
        return KombuQueue(
            name=name,
            queue_table=self.options.get("queue_tablename", "kombu_queue"),
            message_table=self.options.get("message_tablename", "kombu_message"),
        )


def is_in_memory(url: URL) -> bool:
    """Whether a database is one of SQLite's in the memory of this process."""
    path = (url.database or "").removeprefix("file:")
    in_memory = path in {"", ":memory:"} or "mode=memory" in path or url.query.get("mode") == "memory"
    return url.get_backend_name() == "sqlite" and in_memory


def _only_queue(envelope: Envelope) -> str | None:
    """The only queue that a message can go to, and that it declares; None where that takes asking."""
    exchange, key = envelope.exchange, envelope.routing_key
    name, kind = getattr(exchange, "name", exchange), getattr(exchange, "type", "direct")
    queues = [each for each in envelope.declare if isinstance(each, Queue)]
    if not name:
        return key if key and all(each.name == key for each in queues) else None
    if len(queues) != 1 or kind != "direct":
        return None
    (queue,) = queues
    is_bound = (queue.exchange.name, queue.exchange.type, queue.routing_key) == (name, "direct", key)
    return queue.name if is_bound and not queue.bindings else None


class _Memory(Transport):
    """Messages in this process."""

    is_in_process = True
    is_persistent = False


class _Pyro(Transport):
    """Messages in the memory of a Pyro daemon."""

    is_persistent = False


_KINDS: Mapping[str, type[Transport]] = {
    "SQS": _SQS,
    "librabbitmq": _AMQP,
    "memory": _Memory,
    "pyamqp": _AMQP,
    "pyro": _Pyro,
    "redis": _Redis,
    "redis_cluster": _Redis,
    "sqlalchemy": _Database,
}


def describe(
    connection: Connection,
    max_delay: timedelta | None = None,
    custom: Mapping[str, type[Transport]] | None = None,
) -> Transport:
    """Describe the transport of a Kombu connection, without connecting or importing a driver.

    Args:
        connection: for its transport and options.
        max_delay: overrides how early delayed messages may leave.
        custom: classes by URL scheme that beat those known here.
    """
    own = (custom or {}).get(scheme_of(connection))
    chosen = own or _KINDS.get(kind_of(connection), Transport)
    transport = chosen(connection, max_delay)
    transport.sees_tasks = own is not None
    return transport


def resolved(scheme: str, named: Any) -> type[Transport]:
    """The class that ``outbox_transports`` names. Raises ConfigurationError when it is no Transport."""
    try:
        found = symbol_by_name(named)
    except (ImportError, AttributeError, ValueError) as error:
        found = error
    if isinstance(found, type) and issubclass(found, Transport):
        return found
    raise ConfigurationError(
        f"outbox_transports[{scheme!r}]: expected a class derived from celery_outbox.Transport, or "
        f'its path such as "shop.transports:Mine", found {named!r}'
        f"{f' ({found})' if isinstance(found, Exception) else ''}."
    )


def scheme_of(connection: Connection) -> str:
    """What stands before ``://`` in the URL of a connection, without a ``+`` and what follows."""
    return str(connection.transport_cls).partition("+")[0]


def kind_of(connection: Connection) -> str:
    """The name of the module of Kombu's transport."""
    name = connection.transport_cls
    if not isinstance(name, str):
        return str(name.__module__).rpartition(".")[2]
    target = TRANSPORT_ALIASES.get(name.partition("+")[0], name)
    if not isinstance(target, str):
        return str(target.__module__).rpartition(".")[2]
    return target.partition(":")[0].rpartition(".")[2]


def is_broker_engine(engine: Engine) -> bool:
    """Whether ``engine`` belongs to Kombu's database transport.

    Its channels keep a Session of their own open between calls, in whatever thread publishes or
    consumes: that transaction is never the caller's.
    """
    module = sys.modules.get("kombu.transport.sqlalchemy")
    if module is None:
        return False
    return any(engine is own for own, _ in list(module.Channel._engines.values()))
