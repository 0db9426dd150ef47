"""How to publish a batch, one module for each transport that differs; ``publisher_for`` chooses.

A publisher gets frozen messages and answers by row id what became of each. What it cannot vouch for
is never called accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kombu import Connection, Queue

from ...publishing import Outcome, Publisher
from ...transports import Transport, describe
from .amqp import AMQPPublisher
from .database import database_publisher
from .kombu import KombuPublisher
from .redis import RedisPublisher
from .sqs import SQSPublisher
from .virtual import VirtualPublisher

__all__ = ["Outcome", "Publisher", "publisher_for"]

_PUBLISHERS: dict[str, Callable[[Connection], Publisher]] = {
    "SQS": SQSPublisher,
    "pyamqp": AMQPPublisher,
    "redis": RedisPublisher,
    "sqlalchemy": database_publisher,
}


def publisher_for(
    connection: Connection,
    transport: Transport | None = None,
    queues: Mapping[str, Queue] | None = None,
) -> Publisher:
    """The publisher for ``connection``, which it takes over; ``transport`` may bring one of its own.

    ``queues`` are those that the relay's app configures, by name.
    """
    transport = transport or describe(connection)
    publisher = transport.publisher(connection) or _PUBLISHERS.get(transport.kind, VirtualPublisher)(
        connection
    )
    if queues is not None and isinstance(publisher, KombuPublisher):
        publisher.queues = queues
    return publisher
