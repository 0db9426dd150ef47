"""How to publish a batch, one module for each transport that differs; ``publisher_for`` chooses.

A publisher gets frozen messages and answers by row id what became of each. What it cannot vouch for
is never called accepted.
"""

from __future__ import annotations

from collections.abc import Callable

from kombu import Connection

from ...publishing import Outcome, Publisher
from ...transports import describe
from .amqp import AMQPPublisher
from .redis import RedisPublisher
from .virtual import VirtualPublisher

__all__ = ["Outcome", "Publisher", "publisher_for"]

_PUBLISHERS: dict[str, Callable[[Connection], Publisher]] = {
    "pyamqp": AMQPPublisher,
    "redis": RedisPublisher,
}


def publisher_for(connection: Connection) -> Publisher:
    """The publisher for the transport of ``connection``, which it takes over."""
    return _PUBLISHERS.get(describe(connection).kind, VirtualPublisher)(connection)
