"""Redis: with time limits, without which a server that never answers holds the relay for ever."""

from __future__ import annotations

from kombu import Connection

from .kombu import KombuPublisher

__all__ = ["RedisPublisher"]

#: How long to wait for a connection and for an answer, seconds.
TIMEOUT_SECONDS = 10


class RedisPublisher(KombuPublisher):
    """Publishes with a limit to each wait; a limit in the broker's own options stays."""

    def __init__(self, connection: Connection) -> None:
        limits = {"socket_timeout": TIMEOUT_SECONDS, "socket_connect_timeout": TIMEOUT_SECONDS}
        connection.transport_options = {**limits, **(connection.transport_options or {})}
        super().__init__(connection)
