"""What must be known of a broker's transport when a message is captured.

How early a delayed message may leave for it, whether it outlives this process, and which database
engines are its own. How to publish to it is known in ``relay.publishers``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from kombu import Connection
from kombu.transport import TRANSPORT_ALIASES
from sqlalchemy.engine import Engine

__all__ = ["Transport", "describe", "is_broker_engine"]

#: Kombu's default for Redis; a worker that holds a message longer sees it delivered again.
REDIS_VISIBILITY_SECONDS = 3600
#: RabbitMQ holds what it is given; workers keep it unacknowledged, and 30 minutes is its
#: delivery acknowledgement limit (consumer_timeout). Half of that is safe.
AMQP_LEAD = timedelta(minutes=15)
#: The longest DelaySeconds that SQS takes.
SQS_LEAD = timedelta(seconds=900)

_IN_PROCESS = frozenset({"memory"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """One broker's transport as the capture sees it.

    Attributes:
        kind: Kombu's module name of it: redis, pyamqp, SQS, sqlalchemy, memory, …
        lead: how long before its time a delayed message may leave; zero: when it is due.
        is_in_process: its messages live in this process only.
    """

    kind: str
    lead: timedelta
    is_in_process: bool

    def lead_for(self, queue: str) -> timedelta:
        """How long before its time a message for ``queue`` may leave."""
        # SQS refuses a delay of a single message on a FIFO queue.
        if self.kind == "SQS" and queue.endswith(".fifo"):
            return timedelta(0)
        return self.lead


def describe(connection: Connection, max_delay: timedelta | None = None) -> Transport:
    """Describe the transport of a Kombu connection, without connecting or importing a driver.

    ``max_delay`` overrides how early delayed messages may leave.
    """
    kind = _kind(connection)
    options: Mapping[str, Any] = connection.transport_options or {}
    lead = _lead(kind, options) if max_delay is None else max_delay
    return Transport(kind=kind, lead=lead, is_in_process=kind in _IN_PROCESS)


def _kind(connection: Connection) -> str:
    name = connection.transport_cls
    if not isinstance(name, str):
        return str(name.__module__).rpartition(".")[2]
    target = TRANSPORT_ALIASES.get(name.partition("+")[0], name)
    return str(target).partition(":")[0].rpartition(".")[2]


def _lead(kind: str, options: Mapping[str, Any]) -> timedelta:
    if kind in {"redis", "redis_cluster"}:
        return timedelta(seconds=options.get("visibility_timeout", REDIS_VISIBILITY_SECONDS) / 2)
    if kind in {"pyamqp", "librabbitmq"}:
        return AMQP_LEAD
    if kind == "SQS":
        return SQS_LEAD
    return timedelta(0)


def is_broker_engine(engine: Engine) -> bool:
    """Whether ``engine`` belongs to Kombu's database transport.

    Its channels keep a Session of their own open between calls, in whatever thread publishes or
    consumes: that transaction is never the caller's.
    """
    module = sys.modules.get("kombu.transport.sqlalchemy")
    if module is None:
        return False
    return any(engine is own for own, _ in list(module.Channel._engines.values()))
