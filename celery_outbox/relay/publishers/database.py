"""Kombu's database transport: a batch in one transaction, its rows in as few statements as possible.

Kombu says which queues a message goes to and what is written there; nothing of its own writing is
used, which commits each message by itself. Until COMMIT is sent, nothing has arrived for certain.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kombu import Connection, Producer
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import sessionmaker

from ...errors import ConfigurationError
from ...message import ClaimedMessage
from ...publishing import Outcome, Publisher
from ...storage import dialects
from ...storage.broker import BrokerDatabase, BrokerTables, RowRefusedError
from .kombu import text_of
from .virtual import RoutedPublisher, VirtualPublisher

__all__ = ["DatabasePublisher", "database_publisher"]

logger = logging.getLogger(__name__)


def database_publisher(connection: Connection) -> Publisher:
    """The publisher for the database of ``connection``: Kombu speaks to more kinds than the outbox."""
    try:
        dialects.of(make_url(connection.hostname).get_backend_name())
    except ConfigurationError:
        return VirtualPublisher(connection)
    except ArgumentError:
        pass  # its connect() will say so
    return DatabasePublisher(connection)


@dataclass(slots=True)
class _Batch:
    """What is to be written, and what has become of it.

    Attributes:
        texts: for each row of the outbox, the queues that its message goes to and the text for each.
        errors: why a message was not taken.
        is_committing: whether COMMIT may have been sent; before, nothing has arrived for good.
    """

    texts: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    is_committing: bool = False

    @property
    def rows(self) -> list[int]:
        """Whose messages may still be taken."""
        return [row for row in self.texts if row not in self.errors]

    @property
    def queues(self) -> set[str]:
        """Where those messages go."""
        return {queue for row in self.rows for queue, _ in self.texts[row]}

    def refuse(self, rows: Collection[int], reason: str) -> None:
        """Note an error for each."""
        self.errors.update(dict.fromkeys(rows, reason))

    def refuse_for(self, queues: Mapping[str, str]) -> None:
        """Note the error of its queue for each message that goes to one of ``queues``."""
        for row in self.rows:
            reasons = [queues[queue] for queue, _ in self.texts[row] if queue in queues]
            if reasons:
                self.errors[row] = reasons[0]


class _TooLateError(Exception):
    """The lease has ended before COMMIT."""


class DatabasePublisher(RoutedPublisher):
    """Publishes batches into the tables of Kombu's database transport."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._database: BrokerDatabase | None = None
        self._declared: set[str] = set()
        self._known: set[str] = set()

    def connect(self) -> None:
        """Reach the database, which Kombu's own connecting does not, and see to the tables."""
        super().connect()
        try:
            self._database = self._reached(self._producer_of_now.channel)
        except BaseException:
            self.close()
            raise

    def _reached(self, channel: Any) -> BrokerDatabase:
        """The database behind a channel, on the engine that Kombu keeps of it for the whole process.

        Kombu itself would create tables of the names that its first channel had, whatever the others'.
        """
        url, engines = self._connection.hostname, channel._engines
        engine = engines[url][0] if url in engines else channel._engine_from_config()
        tables = BrokerTables(channel.queue_tablename, channel.message_tablename)
        database = BrokerDatabase(engine, tables)
        database.prepare()
        engines.setdefault(url, (engine, sessionmaker(bind=engine)))
        return database

    def close(self) -> None:
        """Let go of the connection; the engine is Kombu's, for the whole process."""
        super().close()
        self._database = None
        self._known.clear()

    def _open(self, channel: Any) -> Producer:
        # Declaring is remembered, and done with the batch: Kombu's own way leaves a transaction open,
        # and counts the messages that wait.
        channel._new_queue = self._note_queue
        channel._size = _nothing
        return super()._open(channel)

    def _note_queue(self, queue: str, **options: Any) -> None:
        self._declared.add(queue)

    def publish(
        self, messages: Sequence[ClaimedMessage], *, deadline: float, read_at: float
    ) -> Outcome:
        """Publish all in one transaction; what the database refuses stays, and holds no other."""
        batch = _Batch()
        if self._database is not None:
            self._route(self._database, batch, messages, read_at)
            self._write(self._database, batch, deadline)
        accepted = set(batch.rows) if batch.is_committing else set()
        rows = {message.id for message in messages}
        return Outcome(
            accepted=accepted,
            errors=batch.errors,
            unsent=rows - accepted - batch.errors.keys(),
            is_connection_lost=not self.is_connected,
        )

    def _route(
        self,
        database: BrokerDatabase,
        batch: _Batch,
        messages: Sequence[ClaimedMessage],
        read_at: float,
    ) -> None:
        """Note what goes where."""
        ways: dict[str, Sequence[str]] = {}
        limit = database.longest_text
        for message in messages:
            if not self.is_connected:
                break
            try:
                texts = self._routed(message, ways, read_at)
            except Exception as error:  # noqa: BLE001 - one message's failure never holds the others
                batch.errors[message.id] = text_of(error)
                self._recover(error)
                continue
            longest = max((len(text) for _, text in texts), default=0)
            if limit is not None and longest > limit:
                batch.errors[message.id] = (
                    f"expected a message of at most {limit} bytes, found {longest}: the column "
                    "'payload' of the broker's table holds no more. Make it LONGTEXT, or send less."
                )
            else:
                batch.texts[message.id] = texts

    def _routed(
        self, message: ClaimedMessage, ways: dict[str, Sequence[str]], read_at: float
    ) -> list[tuple[str, str]]:
        # Workers of this transport do not know Kombu's own JSON types: what has some must be written
        # by Kombu, which refuses them.
        return super()._routed(message, {} if '"__type__"' in message.envelope else ways, read_at)

    def _text(self, written: dict[str, Any]) -> str:
        return json.dumps(written)

    def _write(self, database: BrokerDatabase, batch: _Batch, deadline: float) -> None:
        """Write what can be written, and commit."""
        try:
            self._see_to_queues(database, batch, deadline)
            if not batch.rows:
                return
            try:
                self._insert(database, batch, deadline, one_by_one=False)
            except RowRefusedError:
                self._insert(database, batch, deadline, one_by_one=True)
        except _TooLateError:
            pass
        except Exception as error:  # noqa: BLE001 - whatever it was: the outbox is the retry
            self._failed(database, batch, error)

    def _see_to_queues(self, database: BrokerDatabase, batch: _Batch, deadline: float) -> None:
        wanted = (batch.queues | self._declared) - self._known
        if wanted:
            _check_time(deadline)
            refused = database.create_queues(wanted)
            batch.refuse_for(refused)
            self._known |= wanted - refused.keys()
            self._declared.clear()

    def _insert(
        self, database: BrokerDatabase, batch: _Batch, deadline: float, *, one_by_one: bool
    ) -> None:
        """Insert in one transaction. Raises RowRefusedError unless it is to find the row by itself."""
        _check_time(deadline)
        with database.begin() as connection:
            ids = database.tables.queue_ids(connection, batch.queues)
            gone = batch.queues - ids.keys()
            batch.refuse_for(dict.fromkeys(gone, "the queue's row has been deleted meanwhile"))
            self._known -= gone
            for rows in ([row] for row in batch.rows) if one_by_one else [batch.rows]:
                written = [(ids[queue], text) for row in rows for queue, text in batch.texts[row]]
                try:
                    database.add(connection, written, is_alone=one_by_one)
                except RowRefusedError as error:
                    if not one_by_one:
                        raise
                    batch.refuse(rows, str(error))
            _check_time(deadline)
            batch.is_committing = True

    def _failed(self, database: BrokerDatabase, batch: _Batch, error: Exception) -> None:
        """Note what an error means for the messages that it came across."""
        reason = database.explain(error)
        if batch.is_committing:
            self.close()
            batch.refuse(batch.rows, f"{reason} (whether the database has the message is not known)")
        elif database.is_transient(error):
            batch.refuse(batch.rows, reason)
        else:
            # Also where the tables are gone: connecting sees to them.
            self.close()
            if not database.is_lost(error):
                batch.refuse(batch.rows, reason)
            else:
                logger.debug("The broker's database cannot be reached: %s", reason)


def _nothing(queue: str) -> int:
    return 0


def _check_time(deadline: float) -> None:
    if time.monotonic() >= deadline:
        raise _TooLateError
