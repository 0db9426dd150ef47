"""Amazon SQS: batches of ten, several on their way at once, and each entry's own answer read.

Kombu says where a message goes and what is written there; it makes the queues and the clients. Of a
FIFO queue's group one message at a time is on its way, and none after one that was not taken: groups
keep their order.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import math
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from kombu import Connection
from kombu.exceptions import KombuError, OperationalError
from kombu.utils.json import dumps, loads

from ...message import ClaimedMessage, EnvelopeParts
from ...publishing import Outcome
from ...transports import attribute_bytes
from .sqs_errors import NOT_KNOWN, Verdict, said, verdict_of
from .sqs_sending import MAX_ENTRIES, Entry, Sending
from .virtual import RoutedPublisher

__all__ = ["SQSPublisher"]

logger = logging.getLogger(__name__)

#: Requests on their way at once.
THREADS = 8
#: The longest DelaySeconds, seconds.
MAX_DELAY = 900
#: Unless the broker's own ``client-config`` says otherwise. botocore would by itself send again what
#: it may have delivered already; the outbox is the retry.
CLIENT_CONFIG: Mapping[str, Any] = {
    "connect_timeout": 10,
    "read_timeout": 30,
    "retries": {"total_max_attempts": 1},
    "max_pool_connections": THREADS + 1,
}

#: Properties that SQS is told beside the body.
_ASKED = re.compile(
    "message_attributes|MessageGroupId|MessageDeduplicationId|delay_seconds|DelaySeconds"
)


class SQSPublisher(RoutedPublisher):
    """Publishes with ``SendMessageBatch``."""

    def __init__(self, connection: Connection) -> None:
        options = connection.transport_options or {}
        config = {**CLIENT_CONFIG, **(options.get("client-config") or {})}
        connection.transport_options = {**options, "client-config": config}
        super().__init__(connection)
        self._pool: ThreadPoolExecutor | None = None
        self._identity = ""
        self._is_told = False
        self._trouble: str | None = None

    def connect(self) -> None:
        """Connect: new clients, with credentials read anew."""
        try:
            super().connect()
        except Exception as error:
            if hasattr(error, "response"):
                raise OperationalError(said(error)) from None
            raise
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="celery-outbox-sqs")

    def close(self) -> None:
        """Let go of the connection, when what is on its way has ended."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        if self._producer is not None:
            channel = self._channel
            with suppress(Exception):  # closing never raises
                for client in [channel._sqs, *channel._predefined_queue_clients.values()]:
                    if client is not None:
                        client.close()
        super().close()

    def longest(self, count: int) -> float:
        """As many rounds of requests as there are, each with its time limits."""
        config = self._connection.transport_options["client-config"]
        requests = math.ceil(count / MAX_ENTRIES / THREADS)
        return requests * (float(config["connect_timeout"]) + float(config["read_timeout"]))

    def publish(
        self, messages: Sequence[ClaimedMessage], *, deadline: float, read_at: float
    ) -> Outcome:
        """Publish in as few requests as SQS takes."""
        if self._pool is None or not self.is_connected:
            return Outcome(unsent={message.id for message in messages}, is_connection_lost=True)
        sending = Sending(self._channel, self._pool, THREADS, deadline)
        ways: dict[str, Sequence[str]] = {}
        try:
            for message in messages:
                if sending.is_over:
                    sending.leave(message.id)
                else:
                    self._add(sending, message, ways, read_at)
            sending.finish()
        except BaseException:
            self.close()
            raise
        outcome = sending.outcome()
        self._tell(sending.trouble)
        return outcome

    def line_of(self, message: ClaimedMessage) -> str | None:
        """The group of a message for a FIFO queue."""
        if not message.queue.endswith(".fifo"):
            return None
        try:
            properties = EnvelopeParts.of(message.envelope).properties
            asked = loads(properties) if "MessageGroupId" in properties else {}
            return f"{self._at_sqs(message.queue)} {asked.get('MessageGroupId', 'default')}"
        except (ValueError, AttributeError):
            return None  # it cannot be read: it will be refused

    def _at_sqs(self, queue: str) -> str:
        """The FIFO queue that a name means, also without a connection; two names may mean one."""
        from kombu.transport.SQS import CHARS_REPLACE_TABLE  # needs boto3

        options = self._connection.transport_options
        name = f"{options.get('queue_name_prefix', '')}{queue}".removesuffix(".fifo")
        canonical = f"{name.translate(CHARS_REPLACE_TABLE)}.fifo"
        predefined = (options.get("predefined_queues") or {}).get(canonical, {})
        return str(predefined.get("url", canonical))

    @property
    def _channel(self) -> Any:
        return self._producer_of_now.channel

    def _tell(self, trouble: str | None) -> None:
        """Let go of clients that were of no use; say why, once."""
        if trouble is not None:
            self.close()
            if trouble != self._trouble:
                logger.warning("SQS cannot be used: %s", trouble)
        self._trouble = trouble

    def _add(
        self,
        sending: Sending,
        message: ClaimedMessage,
        ways: dict[str, Sequence[str]],
        read_at: float,
    ) -> None:
        """Put a message on its way, or say what is wrong with it."""
        destination = ""
        try:
            parts = EnvelopeParts.of(message.envelope)
            destination = parts.destination
            if sending.is_refused(destination, message.id):
                return
            entries = self._entries(sending, message, parts, ways, read_at)
        except Exception as error:  # noqa: BLE001 - one message's failure never holds the others
            self._refuse(sending, message.id, destination, error)
            return
        if entries is None:
            sending.deferred.add(message.id)
            return
        sending.add(message.id, entries)

    def _entries(
        self,
        sending: Sending,
        message: ClaimedMessage,
        parts: EnvelopeParts,
        ways: dict[str, Sequence[str]],
        read_at: float,
    ) -> list[Entry] | None:
        """What is sent of a message, for each of its queues; None when it is too early."""
        asked = loads(parts.properties) if _ASKED.search(parts.properties) else {}
        seconds = None if message.due_in is None else message.due_in - (time.monotonic() - read_at)
        self._identity, self._is_told = message.identity, False
        entries: list[Entry] = []
        for queue, text in self._routed_again(message, ways, read_at):
            line = sending.line(queue)
            # One second for the clocks: SQS takes no longer delay, and the worker knows the time.
            if seconds is not None and seconds > (0 if line.is_fifo else MAX_DELAY + 1):
                return None
            wire = self._wire(asked, is_fifo=line.is_fifo)
            if line.is_fifo:
                wire.setdefault("MessageGroupId", "default")
                wire.setdefault("MessageDeduplicationId", _deduplication_id(message.identity))
            elif seconds is not None and "DelaySeconds" not in wire:
                wire["DelaySeconds"] = min(max(math.ceil(seconds), 0), MAX_DELAY)
            if self._channel.sqs_base64_encoding:
                text = base64.b64encode(text.encode()).decode("ascii")
            wire["MessageBody"] = text
            size = len(text) + attribute_bytes(wire.get("MessageAttributes"))
            entries.append(Entry(message.id, line, wire, size))
        return entries

    def _routed_again(
        self, message: ClaimedMessage, ways: dict[str, Sequence[str]], read_at: float
    ) -> list[tuple[str, str]]:
        """Route; once more when a queue is missing that Kombu remembers."""
        try:
            return self._routed(message, ways, read_at)
        except Exception as error:
            if verdict_of(error) is not Verdict.MISSING:
                raise
        self._channel._queue_cache.clear()
        return self._routed(message, ways, read_at)

    def _wire(self, asked: Mapping[str, Any], *, is_fifo: bool) -> dict[str, Any]:
        """What the message's own properties ask of SQS, as Kombu passes it on."""
        if not asked:
            return {}
        wire: dict[str, Any] = {}
        if "message_attributes" in asked:
            wire["MessageAttributes"] = asked["message_attributes"]
        if "MessageGroupId" in asked:
            wire["MessageGroupId"] = asked["MessageGroupId"]
        if is_fifo:
            if "MessageDeduplicationId" in asked:
                wire["MessageDeduplicationId"] = asked["MessageDeduplicationId"]
        elif (delay := self._channel._resolve_delay_seconds(asked)) is not None:
            wire["DelaySeconds"] = delay
        return wire

    def _refuse(self, sending: Sending, row: int, destination: str, error: Exception) -> None:
        """After a message could not be routed: nothing of it was put into a queue."""
        # What goes to listeners is sent while it is routed.
        is_begun = self._is_told and getattr(error, "operation_name", "Publish") == "Publish"
        verdict, text = verdict_of(error, is_begun=is_begun), said(error)
        is_unusable = verdict is Verdict.UNUSABLE
        if is_unusable:
            client = None if self._channel.predefined_queues else self._channel._sqs
            sending.not_reached(client, [row], text)
        elif is_begun and verdict in {Verdict.UNKNOWN, Verdict.BROKEN}:
            sending.errors[row] = text + NOT_KNOWN
            if verdict is Verdict.UNKNOWN:
                sending.trouble = text
        else:
            sending.errors[row] = text
        if not is_begun and (
            is_unusable or isinstance(error, KombuError) or hasattr(error, "response")
        ):
            # It would be the same for all that go there.
            sending.refusals[destination] = None if is_unusable else text

    def _text(self, written: dict[str, Any]) -> str:
        # Kombu does not repeat them in the body.
        written["properties"].pop("message_attributes", None)
        return str(dumps(written))

    def _hand_on(self, name: str, hand_on: Any, *args: Any, **options: Any) -> Any:
        self._is_told = name == "_put_fanout"
        if self._is_told and args[0].endswith(".fifo"):
            # Kombu would draw another one for each attempt.
            id_ = _deduplication_id(self._identity)
            args[1]["properties"].setdefault("MessageDeduplicationId", id_)
        return super()._hand_on(name, hand_on, *args, **options)


def _deduplication_id(identity: str) -> str:
    """Of the characters that SQS takes, and no longer than it takes."""
    return hashlib.sha256(identity.encode(errors="replace")).hexdigest()
