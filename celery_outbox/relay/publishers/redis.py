"""Redis: whole batches in pipelines, and each command's own answer read.

Kombu itself writes and routes the first message of each destination. The others of the batch are put
together from their stored parts, without decoding them, and take the same way: what Kombu would have
written, but for the delivery tag, in a fraction of the time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kombu import Connection

from ...message import ClaimedMessage, Envelope, EnvelopeParts
from ...publishing import Outcome
from ...virtual import Properties, spliced
from .kombu import KombuPublisher, expiration_of, text_of

__all__ = ["RedisPublisher"]

logger = logging.getLogger(__name__)

#: How long to wait for a connection and for an answer, seconds.
TIMEOUT_SECONDS = 10
#: Bytes that one pipeline carries, unless a single message is larger.
PIPELINE_BYTES = 8 * 1024 * 1024

#: Answers that every command would get from this server now: none of them did anything.
_UNUSABLE = frozenset(
    {"ReadOnlyError", "BusyLoadingError", "MasterDownError", "ClusterDownError", "AuthenticationError"}
)

#: What befalls the connection, whatever was to be declared for a message.
_UNREACHABLE = frozenset({"ConnectionError", "TimeoutError"})

#: The name and the first argument of a Redis command that takes a message.
_Target = tuple[str, str]
#: Where a message is to go, and its priority, which tells the list.
_Way = tuple[str, int]


@dataclass(slots=True)
class _Pipeline:
    """Messages on their way; all that go into one list are one command.

    Attributes:
        rows: whose messages they are.
        size: bytes.
        payloads: what each command carries, with the row that it belongs to.
        others: commands that carry nothing, such as the expiry of a queue.
    """

    rows: list[int] = field(default_factory=list)
    size: int = 0
    payloads: dict[_Target, list[tuple[int, str]]] = field(default_factory=dict)
    others: dict[tuple[Any, ...], None] = field(default_factory=dict)

    def add(self, row: int, targets: Sequence[_Target], text: str) -> None:
        """Send ``text`` to each of the targets."""
        self.rows.append(row)
        self.size += len(text) * len(targets)
        for target in targets:
            self.payloads.setdefault(target, []).append((row, text))

    def commands(self) -> list[tuple[list[int], tuple[Any, ...]]]:
        """Each command, and the rows of which it answers."""
        found: list[tuple[list[int], tuple[Any, ...]]] = []
        for (name, key), carried in self.payloads.items():
            if name == "lpush":
                found.append(([row for row, _ in carried], (name, key, *(text for _, text in carried))))
            else:
                found += [([row], (name, key, text)) for row, text in carried]
        return found + [([], command) for command in self.others]


class _Collector:
    """Stands where Kombu keeps a producer's batch: takes the commands that it would send."""

    def __init__(self) -> None:
        self.commands: list[tuple[Any, ...]] = []

    def publish(self, channel: Any, message: Any, **options: Any) -> None:
        """Let the channel route a message."""
        channel.basic_publish(message, _publish_batch=self, **options)

    def add(self, *command: Any) -> None:
        """Take a command."""
        self.commands.append(command)


class RedisPublisher(KombuPublisher):
    """Publishes in pipelines, with a limit to each wait; a limit in the broker's own options stays."""

    def __init__(self, connection: Connection) -> None:
        limits = {"socket_timeout": TIMEOUT_SECONDS, "socket_connect_timeout": TIMEOUT_SECONDS}
        # redis-py would send a pipeline again when it missed the answer.
        connection.transport_options = {
            **limits,
            **(connection.transport_options or {}),
            "retry_on_timeout": False,
        }
        super().__init__(connection)
        # Those of the default exchange, which leads to the list of that name whatever is bound.
        self._ways: dict[_Way, Sequence[_Target]] = {}

    def longest(self, count: int) -> float:
        """One wait for a connection, and one for the answers of a pipeline."""
        options = self._connection.transport_options
        return float(options["socket_connect_timeout"]) + float(options["socket_timeout"])

    def publish(
        self, messages: Sequence[ClaimedMessage], *, deadline: float, read_at: float
    ) -> Outcome:
        """Publish in as few round trips as the messages' size allows."""
        errors: dict[int, str] = {}
        unsent: set[int] = set()
        ways = dict(self._ways)
        pipeline = _Pipeline()
        for index, message in enumerate(messages):
            if not self.is_connected or time.monotonic() >= deadline:
                unsent.update(each.id for each in messages[index:])
                break
            try:
                self._add(pipeline, message, ways, read_at)
            except Exception as error:  # noqa: BLE001 - one message's failure never holds the others
                if type(error).__name__ in _UNUSABLE:
                    self._leave()
                    unsent.add(message.id)
                elif type(error).__name__ in _UNREACHABLE:
                    self.close()
                    unsent.add(message.id)
                else:
                    errors[message.id] = text_of(error)
                    self._recover(error)
            if pipeline.size >= PIPELINE_BYTES:
                self._flush(pipeline, errors, unsent, deadline)
                pipeline = _Pipeline()
        self._flush(pipeline, errors, unsent, deadline)
        return Outcome(
            accepted={message.id for message in messages} - errors.keys() - unsent,
            errors=errors,
            unsent=unsent,
            is_connection_lost=not self.is_connected,
        )

    def _add(
        self,
        pipeline: _Pipeline,
        message: ClaimedMessage,
        ways: dict[_Way, Sequence[_Target]],
        read_at: float,
    ) -> None:
        parts = EnvelopeParts.of(message.envelope)
        properties = Properties.of(parts)
        way, can_splice = (parts.destination, properties.priority), properties.are_plain
        targets = ways.get(way)
        if targets is not None and can_splice:
            expiration = expiration_of(message, read_at)
            pipeline.add(message.id, targets, spliced(parts, properties, message.body, expiration))
            return
        payloads: list[tuple[_Target, str]] = []
        for name, key, *arguments in self._written_by_kombu(message, read_at):
            if name in {"lpush", "publish"}:
                payloads.append(((name, key), *arguments))
            else:
                pipeline.others[name, key, *arguments] = None
        # One and the same text to all; Kombu makes it once for each.
        pipeline.add(message.id, [target for target, _ in payloads], payloads[0][1])
        if can_splice and self._producer_channel.body_encoding == "base64":
            ways[way] = [target for target, _ in payloads]
            if not (Envelope.from_text(parts.destination).exchange or pipeline.others):
                self._ways[way] = ways[way]

    def _written_by_kombu(self, message: ClaimedMessage, read_at: float) -> list[tuple[Any, ...]]:
        """The commands that Kombu would send; declares anew where Redis has lost its bindings."""
        for is_last in (False, True):
            collector = _Collector()
            batches = self._producer_of_now._batch_local
            batches.current = collector
            try:
                self._send(message, read_at)
            finally:
                del batches.current
            if collector.commands:
                return collector.commands
            if not is_last:
                # Kombu remembers in both places what it need not declare again.
                self._connection.declared_entities.clear()
                self._producer_channel.state.clear()
        raise ValueError(
            "expected a queue bound to the message's exchange for its routing key, found none: Redis "
            "would drop the message. Start a worker that consumes it, or declare the queue at dispatch."
        )

    def _flush(
        self, pipeline: _Pipeline, errors: dict[int, str], unsent: set[int], deadline: float
    ) -> None:
        if not pipeline.rows:
            return
        if not self.is_connected or time.monotonic() >= deadline:
            unsent.update(pipeline.rows)
            return
        commands = pipeline.commands()
        is_begun = False
        try:
            with self._client.pipeline(transaction=False) as sent:
                for _, (name, *arguments) in commands:
                    sent.execute_command(name.upper(), *arguments)
                # Before that, nothing has been sent for certain.
                sent.connection = sent.connection_pool.get_connection()
                sent.connection.check_health()
                is_begun = True
                answers = self._answers(sent)
        except Exception as error:  # noqa: BLE001 - whatever it was: the outbox is the retry
            self.close()
            if is_begun and type(error).__name__ not in _UNUSABLE:
                text = f"{text_of(error)} (whether Redis has the message is not known)"
                errors.update((row, text) for row in pipeline.rows)
            else:
                logger.debug("Redis cannot be reached: %s", text_of(error))
                unsent.update(pipeline.rows)
            return
        for (rows, _), answer in zip(commands, answers, strict=True):
            if not isinstance(answer, Exception):
                continue
            if type(answer).__name__ in _UNUSABLE:
                self._leave()
                unsent.update(rows)
            else:
                errors.update((row, text_of(answer)) for row in rows)

    def _answers(self, sent: Any) -> list[Any]:
        """Send what a pipeline has gathered, once; what Redis says to each command.

        In one write: redis-py's own would wake the server up for every 6 kB.
        """
        connection, commands = sent.connection, [arguments for arguments, _ in sent.command_stack]
        refused = self._producer_channel.ResponseError
        try:
            packed = b"".join(connection.pack_commands(commands))
            connection.send_packed_command([packed], check_health=False)
            answers = []
            for name, *_ in commands:
                try:
                    answers.append(sent.parse_response(connection, name))
                except refused as error:
                    answers.append(error)
        except BaseException:
            connection.disconnect()  # an answer that is still to come belongs to nobody
            raise
        return answers

    def _open(self, channel: Any) -> Any:
        self._ways.clear()
        with channel.conn_or_acquire() as self._client:  # to make one takes as long as 20 messages
            pass
        return super()._open(channel)

    def _leave(self) -> None:
        """Let go of a server that takes nothing now; where it has alternates, it is their turn.

        Kombu itself would stay with what it can reach.
        """
        if self.is_connected:
            self.close()
            self._connection.maybe_switch_next()

    @property
    def _producer_channel(self) -> Any:
        return self._producer_of_now.channel
