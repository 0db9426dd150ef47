"""RabbitMQ: with publisher confirms, without which it reports success for what it drops."""

from __future__ import annotations

from typing import Any

from kombu import Connection

from .kombu import KombuPublisher

__all__ = ["AMQPPublisher"]

#: How long to wait for the broker's confirmation of one message, seconds.
CONFIRM_SECONDS = 30


class AMQPPublisher(KombuPublisher):
    """Publishes with confirms, and learns of messages that no queue takes."""

    publish_options: dict[str, Any] = {  # noqa: RUF012 - never changed
        "mandatory": True,
        "timeout": CONFIRM_SECONDS,
        "confirm_timeout": CONFIRM_SECONDS,
    }

    def __init__(self, connection: Connection) -> None:
        connection.transport_options = {**connection.transport_options, "confirm_publish": True}
        super().__init__(connection)
