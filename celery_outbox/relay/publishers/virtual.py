"""Kombu's virtual transports, where exchanges are Kombu's own code in this process.

They drop what no queue is bound for, without a word: here that is an error. For transports that can
take many messages at once, Kombu is asked where a message goes and what is written there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kombu import Connection, Producer
from kombu.transport import virtual

from ...message import ClaimedMessage, EnvelopeParts
from ...virtual import Properties, spliced
from .kombu import KombuPublisher, expiration_of

__all__ = ["RoutedPublisher", "VirtualPublisher"]

#: What an exchange calls to hand a message on: to a queue, or to whoever listens.
_HANDING_ON = ("_put", "_put_fanout")


class VirtualPublisher(KombuPublisher):
    """Publishes one by one, and knows whether a queue took the message."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._taken = 0

    def _open(self, channel: Any) -> Producer:
        if isinstance(channel, virtual.Channel):
            for name in _HANDING_ON:
                if (hand_on := getattr(channel, name, None)) is not None:
                    setattr(channel, name, partial(self._hand_on, name, hand_on))
        else:
            self._taken = 1  # it has exchanges of its own
        return super()._open(channel)

    def _hand_on(self, name: str, hand_on: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """What the exchange's call becomes; ``name`` is that of the channel's method."""
        self._taken += 1
        return hand_on(*args, **options)

    def _send(self, message: ClaimedMessage, read_at: float) -> None:
        if not isinstance(self._producer_of_now.channel, virtual.Channel):
            super()._send(message, read_at)
            return
        for is_last in (False, True):
            self._taken = 0
            super()._send(message, read_at)
            if self._taken:
                return
            if not is_last:
                self._forget_declared()
        raise ValueError(
            "expected a queue bound to the message's exchange for its routing key, found none: the "
            "transport would drop the message. Declare the queue at dispatch."
        )

    def _forget_declared(self) -> None:
        """Declare anew what the messages need."""
        self._connection.declared_entities.clear()


class RoutedPublisher(VirtualPublisher):
    """Gathers what would be put into queues, for subclasses that put many at once.

    What a transport sends to listeners instead of queues goes its own way at once.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._gathered: list[tuple[str, dict[str, Any]]] = []

    def _hand_on(self, name: str, hand_on: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if name != "_put":
            return super()._hand_on(name, hand_on, *args, **options)
        self._taken += 1
        queue, message, *_ = args
        self._gathered.append((queue, message))
        return None

    def _routed(
        self, message: ClaimedMessage, ways: dict[str, Sequence[str]], read_at: float
    ) -> list[tuple[str, str]]:
        """The queues that a message goes to, and its text for each; declares what it needs.

        Empty when it has gone to listeners already. ``ways`` remembers, for one batch, where messages
        of one destination go. Raises what Kombu raises, and ValueError when no queue would take it.
        """
        parts = EnvelopeParts.of(message.envelope)
        properties, queues = Properties.of(parts), ways.get(parts.destination)
        can_splice = properties.are_plain
        if queues is not None and can_splice:
            text = spliced(parts, properties, message.body, expiration_of(message, read_at))
            return [(queue, text) for queue in queues]
        self._gathered = []
        self._send(message, read_at)
        found, self._gathered = self._gathered, []
        if can_splice and found and self._producer_of_now.channel.body_encoding == "base64":
            ways[parts.destination] = [queue for queue, _ in found]
        return [(queue, self._text(written)) for queue, written in found]

    @abstractmethod
    def _text(self, written: dict[str, Any]) -> str:
        """A message as the transport writes it."""
