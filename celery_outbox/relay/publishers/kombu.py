"""The default publisher: any Kombu transport, one message after the other.

It declares what Celery would have declared, and sends the stored bytes untouched.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kombu import Connection, Producer, Queue

from ...message import ClaimedMessage, Envelope
from ...publishing import Outcome, Publisher

__all__ = ["KombuPublisher", "expiration_of", "text_of"]

logger = logging.getLogger(__name__)

#: Characters that are stored of an error.
TEXT_CHARACTERS = 1000
#: What stands between the user's name and the host in a URL, and what redis-py may say of a connection.
_PASSWORD = re.compile(r"(?P<before>://[^\s:/@]*:)\S*(?=@)|(?P<name>\bpassword=)[^\s,)]*")
#: Where the texts of SQLAlchemy, PostgreSQL, MySQL, Redis, py-amqp, botocore and PyMongo begin to
#: repeat what they were given (a message begins with its body); redis-py does so before it says what
#: went wrong.
_PAYLOAD = re.compile(
    r"\[SQL:|\[parameters:|\b(DETAIL|CONTEXT|LINE \d+):|, with args beginning with:|\bvalue: |"
    r', full error: |\{"body"'
)
_COMMAND = re.compile(r"Command # \d+ \(.*\) of pipeline caused error: ", re.DOTALL)


class KombuPublisher(Publisher):
    """Publishes through ``kombu.Producer``."""

    #: Arguments that this transport wants with each publish.
    publish_options: dict[str, Any] = {}  # noqa: RUF012 - overridden by subclasses, never changed
    #: Queues as the relay's app configures them, by name: a message was stored with those of its time.
    queues: Mapping[str, Queue] = {}

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._producer: Producer | None = None

    @property
    def is_connected(self) -> bool:
        """Whether a connection was made and has not failed since."""
        return self._producer is not None

    def connect(self) -> None:
        """Connect, trying each alternate of the URL once."""
        self._reach()
        self._producer = self._open(self._connection.default_channel)

    def _reach(self) -> None:
        """Make the connection itself."""
        # Kombu does not count the first try.
        others = max(len(self._connection.alt) - 1, 0)
        self._connection.ensure_connection(max_retries=others, interval_start=0, interval_step=0)

    def _open(self, channel: Any) -> Producer:
        """A producer on a channel that nothing has used yet."""
        return Producer(channel, auto_declare=False)

    def publish(
        self, messages: Sequence[ClaimedMessage], *, deadline: float, read_at: float
    ) -> Outcome:
        """Publish one by one; the first failure of the connection ends the batch."""
        accepted: set[int] = set()
        errors: dict[int, str] = {}
        for index, message in enumerate(messages):
            if time.monotonic() >= deadline:
                return self._stopped(accepted, errors, messages[index:], is_lost=False)
            if not self.is_connected:
                return self._stopped(accepted, errors, messages[index:], is_lost=True)
            try:
                self._send(message, read_at)
            except Exception as error:  # noqa: BLE001 - one message's failure never holds the others
                errors[message.id] = text_of(error)
                self._recover(error)
            else:
                accepted.add(message.id)
        return Outcome(accepted=accepted, errors=errors, is_connection_lost=not self.is_connected)

    def keep_alive(self) -> None:
        """Do what an idle connection needs, without waiting; called about once a second."""

    def close(self) -> None:
        """Let go of the connection."""
        self._producer = None
        try:
            self._connection.release()
        except Exception as error:  # noqa: BLE001 - it is let go of all the same
            logger.debug("Closing a broker connection failed: %s", text_of(error))

    @property
    def _producer_of_now(self) -> Any:
        assert self._producer is not None  # noqa: S101 - publish() has looked
        return self._producer

    def _send(self, message: ClaimedMessage, read_at: float) -> None:
        envelope = Envelope.from_text(message.envelope)
        self._producer_of_now.publish(
            message.body,
            exchange=envelope.exchange,
            routing_key=envelope.routing_key,
            content_type=envelope.content_type,
            content_encoding=envelope.content_encoding,
            headers=dict(envelope.headers),
            declare=list(envelope.declare),
            expiration=expiration_of(message, read_at),
            # The outbox is the retry; Kombu's would also write into the transport's options.
            retry=False,
            **{**envelope.properties, **self.publish_options},
        )

    def _recover(self, error: Exception) -> None:
        """After a failure: a new channel, since the old one may be closed, or no connection."""
        if isinstance(error, ValueError | TypeError | KeyError):
            # The message could not be written; nothing reached the transport. (Redis's transport
            # counts KeyError among the connection errors, for its consumers' sake.)
            return
        producer, self._producer = self._producer, None
        if isinstance(error, self._connection.connection_errors):
            self.close()
            return
        try:
            if producer is not None:
                producer.channel.close()
            # What was declared may be gone, which may be why it failed.
            self._connection.declared_entities.clear()
            self._producer = self._open(self._connection.channel())
        except Exception:  # noqa: BLE001 - whatever it was, the next connect() will tell
            self.close()

    def _stopped(
        self,
        accepted: set[int],
        errors: dict[int, str],
        rest: Sequence[ClaimedMessage],
        *,
        is_lost: bool,
    ) -> Outcome:
        return Outcome(
            accepted=accepted,
            errors=errors,
            unsent={message.id for message in rest},
            is_connection_lost=is_lost,
        )


def expiration_of(message: ClaimedMessage, read_at: float) -> float | None:
    """Seconds left until the deadline; None without one, or when it has passed.

    An expired message is published all the same: the worker revokes it, as it always does.
    """
    if message.expires_in is None:
        return None
    left = message.expires_in - (time.monotonic() - read_at)
    return left if left > 0 else None


def text_of(error: BaseException) -> str:
    """What is stored and logged of an error: no password, no payload, and not too much."""
    text = _PASSWORD.sub(r"\g<before>\g<name>***", _COMMAND.sub("", str(error)))
    if repeated := _PAYLOAD.search(text):
        text = text[: repeated.start()].rstrip()
    if len(text) > TEXT_CHARACTERS:
        text = f"{text[:TEXT_CHARACTERS]}…"
    return f"{type(error).__name__}: {text}"
