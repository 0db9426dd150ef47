"""What was published to RabbitMQ and is not confirmed yet, and what is known of the rest of a batch."""

from __future__ import annotations

from typing import Any

from ...message import ClaimedMessage, Envelope
from .kombu import text_of

__all__ = ["Answer", "Flight"]


class Answer:
    """What is known of each row so far."""

    def __init__(self) -> None:
        self.accepted: set[int] = set()
        self.errors: dict[int, str] = {}
        self.returned: dict[int, str] = {}
        self.unsent: set[int] = set()

    @property
    def known(self) -> set[int]:
        """The rows of which something is known."""
        return {*self.accepted, *self.errors, *self.returned, *self.unsent}


class Flight:
    """What was published on one channel and is not confirmed yet.

    The broker numbers the messages of a channel from 1 on, and confirms them in any order.
    """

    def __init__(self) -> None:
        self._last_tag = 0
        self._messages: dict[int, ClaimedMessage] = {}
        self._accepted: set[int] = set()
        self._refused: dict[int, str] = {}
        self._returned: dict[int, str] = {}

    @property
    def rows(self) -> list[int]:
        """Whose messages are on their way."""
        return [message.id for message in self._messages.values()]

    def depart(self, message: ClaimedMessage) -> None:
        """A message goes on its way; its confirmation may come while it is being sent."""
        self._last_tag += 1
        self._messages[self._last_tag] = message

    def turn_back(self) -> None:
        """The last one never left."""
        del self._messages[self._last_tag]
        self._last_tag -= 1

    def acknowledge(self, tag: int, multiple: bool) -> None:
        """The broker has taken one message, or all up to one."""
        self._accepted.update(self._landed(tag, multiple=multiple))

    def refuse(self, tag: int, multiple: bool) -> None:
        """The broker could not take them."""
        for row in self._landed(tag, multiple=multiple):
            self._refused[row] = "the broker refused the message (basic.nack)"

    def take_back(self, error: Exception, exchange: str, routing_key: str, message: Any) -> None:
        """No queue took a message; its confirmation follows.

        It does not tell its number: all that look like it count as returned, and go again.
        """
        mark = (exchange, routing_key, message.properties.get("correlation_id"))
        flying = self._messages.values()
        alike = [each.id for each in flying if _mark_of(each) == mark]
        self._returned.update(dict.fromkeys(alike or self.rows, text_of(error)))

    def land(self, answer: Answer) -> None:
        """Tell what is known by now."""
        answer.returned.update(self._returned)
        answer.accepted.update(self._accepted - self._returned.keys())
        answer.errors.update(
            {row: text for row, text in self._refused.items() if row not in self._returned}
        )
        self._accepted, self._refused, self._returned = set(), {}, {}

    def _landed(self, tag: int, *, multiple: bool) -> list[int]:
        tags = [each for each in self._messages if each <= tag] if multiple else [tag]
        return [self._messages.pop(each).id for each in tags if each in self._messages]


def _mark_of(message: ClaimedMessage) -> tuple[Any, ...]:
    """What a message that comes back still tells of itself."""
    envelope = Envelope.from_text(message.envelope)
    exchange = getattr(envelope.exchange, "name", envelope.exchange)
    return (exchange, envelope.routing_key, envelope.properties.get("correlation_id"))
