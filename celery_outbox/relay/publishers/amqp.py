"""RabbitMQ: whole batches sent, and then every message's own confirmation awaited.

Without confirms RabbitMQ reports success for what it drops. What no queue takes comes back, because it
is sent as mandatory. When the broker closes the channel it does not say for which message: those in
doubt are then sent one by one, so that only the refused one stays. A connection that the broker blocks
is kept, silent, until it is unblocked: what has been written to it will still be read.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

from amqp import PreconditionFailed, spec
from kombu import Connection, Producer, Queue

from ...message import ClaimedMessage, Envelope, EnvelopeParts
from ...publishing import Outcome
from ...virtual import Properties
from .amqp_flight import Answer, Flight
from .delayed import with_delay_left
from .kombu import KombuPublisher, expiration_of, text_of

__all__ = ["AMQPPublisher"]

logger = logging.getLogger(__name__)

#: How long to wait for an answer, for the broker to take a message off the wire, and for the
#: confirmations of a batch, seconds; unless the transport options have a ``read_timeout``.
ANSWER_SECONDS = 30
#: The same, for confirmations that were under way when the broker blocked the connection.
BLOCKED_SECONDS = 1
#: The same, for the answer to a goodbye.
CLOSE_SECONDS = 1

#: Messages between two looks at what the broker has said: it may have blocked the connection.
LISTEN_EVERY = 20

_BLOCKED = "RabbitMQ has blocked the connection, by its alarm for memory or disk space"
_UNKNOWN = "(whether the broker has the message is not known)"


class AMQPPublisher(KombuPublisher):
    """Publishes batches with confirms, and learns of messages that no queue takes."""

    def __init__(self, connection: Connection) -> None:
        options = connection.transport_options or {}
        # py-amqp's own way of confirming waits for each message.
        connection.transport_options = {**options, "confirm_publish": False}
        super().__init__(connection)
        self._seconds: float = options.get("read_timeout") or ANSWER_SECONDS
        self.publish_options = {"mandatory": True, "timeout": self._seconds}
        self._flight = Flight()
        self._declared: set[str] = set()
        self._is_blocked = self._was_blocked = False

    def longest(self, count: int) -> float:
        """One wait for a declaration, and one for the confirmations."""
        return 2 * self._seconds

    def publish(
        self, messages: Sequence[ClaimedMessage], *, deadline: float, read_at: float
    ) -> Outcome:
        """Publish all, and wait for all confirmations."""
        answer = Answer()
        self.keep_alive()
        pending = self._declarable(messages, answer)
        is_alone, has_declared_again = False, False
        while pending:
            if not self._can_send or time.monotonic() >= deadline:
                answer.unsent.update(each.id for each in pending)
                break
            group, pending = (pending[:1], pending[1:]) if is_alone else (pending, [])
            in_doubt, reason = self._publish(group, answer, deadline, read_at)
            if is_alone:
                answer.errors.update((each.id, reason) for each in in_doubt)
            elif in_doubt:
                is_alone, pending = True, in_doubt
            returned = [each for each in group if each.id in answer.returned]
            if returned and self._can_send and not has_declared_again:
                # A queue was deleted under us. Alone, so that there is no doubt which one comes back.
                is_alone = has_declared_again = True
                self._forget_declared()
                for each in returned:
                    del answer.returned[each.id]
                pending = [*self._declarable(returned, answer), *pending]
        answer.errors.update(answer.returned)
        return Outcome(
            accepted=answer.accepted,
            errors=answer.errors,
            unsent=answer.unsent,
            is_connection_lost=not self._can_send,
        )

    def keep_alive(self) -> None:
        """Read what the broker has said meanwhile, and send a heartbeat when one is due."""
        if not self.is_connected:
            return
        try:
            self._listen()
            self._wire.heartbeat_tick()
        except Exception as error:  # noqa: BLE001 - the next connect() will tell
            logger.debug("RabbitMQ has closed an idle connection: %s", text_of(error))
            self.close()
        if self._was_blocked and not self._is_blocked:
            # Its channel still confirms messages whose rows are settled.
            self.close()

    def _listen(self) -> None:
        """Read what the broker has said, without waiting for more."""
        with suppress(socket.timeout):
            while True:
                self._wire.drain_events(timeout=0)

    def close(self) -> None:
        """Let go of the connection, for whose answer we wait but a moment."""
        if self._connection.connected:
            if self._is_blocked:
                self._connection.collect()  # it would answer when it is unblocked
            else:
                self._connection.connection.transport.sock.settimeout(CLOSE_SECONDS)
        super().close()

    @property
    def _wire(self) -> Any:
        """py-amqp's connection; Kombu's would connect anew, behind our back."""
        return self._producer_of_now.channel.connection

    @property
    def _can_send(self) -> bool:
        return self.is_connected and not self._is_blocked

    def _reach(self) -> None:
        super()._reach()
        self._is_blocked = self._was_blocked = False
        connection = self._connection.connection
        connection.on_blocked, connection.on_unblocked = self._block, self._unblock
        # py-amqp waits without end for what the broker shall answer.
        connection.transport.sock.settimeout(self._seconds)

    def _block(self, _: str) -> None:
        self._is_blocked = self._was_blocked = True
        logger.warning("%s; nothing is sent until that is over", _BLOCKED)

    def _unblock(self) -> None:
        self._is_blocked = False
        logger.info("RabbitMQ has unblocked the connection")

    def _open(self, channel: Any) -> Producer:
        """Begin to count what is published on a new channel, as the broker does."""
        self._flight = flight = Flight()
        channel.events["basic_ack"].add(flight.acknowledge)
        channel.events["basic_nack"].add(flight.refuse)
        channel.events["basic_return"].add(flight.take_back)
        channel.confirm_select()
        self._forget_declared()
        return super()._open(channel)

    def _forget_declared(self) -> None:
        self._declared.clear()
        self._connection.declared_entities.clear()

    def _declarable(self, messages: Sequence[ClaimedMessage], answer: Answer) -> list[ClaimedMessage]:
        """Declare what the messages need, while none is on its way; return those that can be sent."""
        refused: dict[str, str] = {}
        sendable: list[ClaimedMessage] = []
        for message in messages:
            try:
                destination = EnvelopeParts.of(message.envelope).destination
                if destination not in refused and self._can_send:
                    self._declare_or_follow(destination)
            except Exception as error:  # noqa: BLE001 - one destination never holds the others
                self._recover(error)
                if not self.is_connected:
                    sendable.append(message)
                    continue
                answer.errors[message.id] = text_of(error)
                if not isinstance(error, ValueError | TypeError | KeyError):
                    refused[destination] = text_of(error)
                continue
            if destination in refused:
                answer.errors[message.id] = refused[destination]
            else:
                sendable.append(message)
        return sendable

    def _declare_or_follow(self, destination: str) -> None:
        """Declare what was stored; where that conflicts with what is there, what is configured now."""
        if destination in self._declared:
            return
        envelope = Envelope.from_text(destination)
        configured = [
            self.queues.get(each.name, each) if isinstance(each, Queue) else each
            for each in envelope.declare
        ]
        try:
            self._declare(envelope, envelope.declare)
        except PreconditionFailed as error:
            if configured == list(envelope.declare):
                raise
            self._recover(error)
            if not self._can_send:
                return
            self._declare(envelope, configured)
        self._declared.add(destination)

    def _declare(self, envelope: Envelope, entities: Sequence[Any]) -> None:
        channel = self._producer_of_now.channel
        for entity in entities:
            # maybe_declare() would take queues of one name for the same, whatever they are bound to.
            entity.bind(channel).declare()
        if exchange := getattr(envelope.exchange, "name", envelope.exchange):
            # For one that is missing the broker closes the channel: better before a batch is sent.
            channel.exchange_declare(exchange, "direct", passive=True)

    def _publish(
        self,
        group: Sequence[ClaimedMessage],
        answer: Answer,
        deadline: float,
        read_at: float,
    ) -> tuple[list[ClaimedMessage], str]:
        """Send a group and wait; return what may be sent again, and why its fate is not known."""
        flight = self._flight
        try:
            for index, message in enumerate(group):
                if self._is_blocked or time.monotonic() >= deadline:
                    answer.unsent.update(each.id for each in group[index:])
                    break
                if index % LISTEN_EVERY == LISTEN_EVERY - 1:
                    self._listen()
                try:
                    self._depart(with_delay_left(message, read_at), flight, read_at)
                except self._errors_of_the_wire:
                    raise
                except Exception as error:  # noqa: BLE001 - it could not be written; nothing was
                    answer.errors[message.id] = text_of(error)
            self._await(flight)
        except self._connection.channel_errors as error:
            flight.land(answer)
            self._recover(error)
            known = answer.known
            return [each for each in group if each.id not in known], text_of(error)
        except Exception as error:  # noqa: BLE001 - of the connection, or what nobody expected
            flight.land(answer)
            self.close()
            reason = f"{text_of(error)} {_UNKNOWN}"
            answer.errors.update((row, reason) for row in flight.rows)
            known = answer.known
            answer.unsent.update(each.id for each in group if each.id not in known)
            return [], reason
        flight.land(answer)
        answer.errors.update((row, f"{_BLOCKED} {_UNKNOWN}") for row in flight.rows)
        return [], ""

    def _depart(self, message: ClaimedMessage, flight: Flight, read_at: float) -> None:
        flight.depart(message)
        try:
            self._send(message, read_at)
        except self._errors_of_the_wire:
            raise
        except Exception:
            flight.turn_back()
            raise

    def _send(self, message: ClaimedMessage, read_at: float) -> None:
        """What Kombu does for a message as Celery makes it, and nothing else."""
        parts = EnvelopeParts.of(message.envelope)
        if not Properties.of(parts).are_plain:
            declared = replace(Envelope.from_text(message.envelope), declare=())
            super()._send(message._replace(envelope=declared.to_text()), read_at)
            return
        properties = parts.read_properties()
        if (expiration := expiration_of(message, read_at)) is not None:
            properties["expiration"] = str(int(expiration * 1000))
        way = _way(parts.destination)
        channel = self._producer_of_now.channel
        content = channel.prepare_message(
            message.body,
            priority=properties.pop("priority", 0),
            content_type=way.content_type,
            content_encoding=way.content_encoding,
            headers=parts.read_headers(),
            properties=properties,
        )
        # basic_publish() reads from the socket before each message.
        arguments = (0, way.exchange, way.routing_key, True, False)
        channel.send_method(spec.Basic.Publish, "Bssbb", arguments, content)

    @property
    def _errors_of_the_wire(self) -> tuple[type[BaseException], ...]:
        errors: tuple[type[BaseException], ...] = (
            *self._connection.connection_errors,
            *self._connection.channel_errors,
        )
        return errors

    def _await(self, flight: Flight) -> None:
        """Read until everything is confirmed, or the broker has blocked the connection.

        Raises TimeoutError when that takes too long.
        """
        began, seconds = time.monotonic(), self._seconds
        while flight.rows:
            if self._is_blocked and seconds > BLOCKED_SECONDS:
                began, seconds = time.monotonic(), BLOCKED_SECONDS
            left = began + seconds - time.monotonic()
            if left <= 0:
                if self._is_blocked:
                    return
                raise TimeoutError(f"no confirmation within {seconds:g} seconds")
            with suppress(socket.timeout):
                self._wire.drain_events(timeout=left)


@lru_cache(maxsize=1024)
def _way(destination: str) -> Envelope:
    """Where messages of one destination go, the exchange by its name."""
    envelope = Envelope.from_text(destination)
    return replace(envelope, exchange=getattr(envelope.exchange, "name", envelope.exchange))
