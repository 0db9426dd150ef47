"""Every statement on the tables of Kombu's database transport (``sqla+...``).

The tables are those that Kombu makes, and a row of theirs is what Kombu would have inserted. As with
its own, a row is a message from its commit on: the workers' queries find it. Who commits is said at
each function.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import (
    Boolean,
    Column,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    exists,
    func,
    insert,
    inspect,
    literal_column,
    select,
    true,
)
from sqlalchemy import Sequence as IdSequence
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine import Dialect as SQLAlchemyDialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as NoConnectionFree
from sqlalchemy.pool import Pool

from ..message import EnvelopeParts, OutboxMessage
from ..virtual import Properties, spliced
from . import dialects
from .dialects import Dialect
from .troubles import Trouble

__all__ = ["BrokerDatabase", "BrokerQueues", "BrokerTables", "RowRefusedError"]

#: The numbers of a queue's row, and the text of a message.
BrokerRow = tuple[int, str]

# The caller's connection may move tables to another schema; the workers' do not.
_UNMOVED: Mapping[str, Any] = {"schema_translate_map": {}}

_MARKS = ("OUTBOX_PAYLOAD", "OUTBOX_QUEUE_ID")
_SEQUENCES = ("queue_id_sequence", "message_id_sequence")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Insert:
    """The INSERT of a message, cut at its two parameters: the text, the queue."""

    prefix: str
    parts: Sequence[str]
    style: str

    def fill(self, rows: Sequence[BrokerRow]) -> tuple[str, tuple[Any, ...]]:
        """One statement for all ``rows``, in the driver's own style of parameters."""
        parameters = tuple(value for queue_id, text in rows for value in (text, queue_id))
        if self.style == "numeric_dollar":  # asyncpg
            head, middle, tail = self.parts
            numbers = range(1, 2 * len(rows), 2)
            texts = [f"{head}${number}{middle}${number + 1}{tail}" for number in numbers]
        else:
            texts = [("?" if self.style == "qmark" else "%s").join(self.parts)] * len(rows)
        return f"{self.prefix} VALUES {', '.join(texts)}", parameters


class BrokerTables:
    """Queues and messages, under the names that the transport's options give them.

    Works on the connection that it is handed and commits nothing. ``schema`` None is the
    connection's own.
    """

    def __init__(self, queue_table: str, message_table: str, schema: str | None = None) -> None:
        self._metadata = MetaData(schema=schema)
        self._queues = _queue_table(queue_table, self._metadata)
        self._messages = _message_table(message_table, self._metadata, self._queues)
        self._inserts: dict[tuple[str, str, bool], _Insert] = {}

    def exist(self, connection: Connection) -> bool:
        """Whether all is there; asks the catalog, so that nothing fails."""
        inspector: Any = inspect(connection)
        sequences = _SEQUENCES if connection.dialect.supports_sequences else ()
        return all(map(inspector.has_table, (self._queues.name, self._messages.name))) and all(
            map(inspector.has_sequence, sequences)
        )

    def located(self, connection: Connection) -> BrokerTables | None:
        """The same tables by their schema; None: they are not there, or it may not write into them.

        The next connection of the same pool may look for tables in another schema.
        """
        names = (self._queues.name, self._messages.name)
        dialect = dialects.of(connection.dialect.name)
        try:
            if not self.exist(connection):
                return None
            schemas = dialect.schemas_for_writing(connection, (*names, *_SEQUENCES))
        except DBAPIError as error:
            # Where asking is an error of its own (MySQL), it harms no transaction.
            if dialect.trouble(error) is Trouble.NO_RIGHTS:
                return None
            raise
        return BrokerTables(*names, schemas.pop()) if len(schemas) == 1 else None

    def lock_for_writing(self, connection: Connection) -> None:
        """Take what lock it needs to ask for queues and then to add messages."""
        dialects.of(connection.dialect.name).lock_for_writing(connection, self._queues)

    def create(self, connection: Connection) -> None:
        """Create what is not there, as Kombu does."""
        self._metadata.create_all(connection)

    def queue_ids(self, connection: Connection, names: Collection[str]) -> dict[str, int]:
        """The rows of those queues that have one."""
        q = self._queues.c
        statement = select(q.name, q.id).where(q.name.in_(sorted(names)))
        rows = connection.execute(statement, execution_options=_UNMOVED)
        found = {row.name: row.id for row in rows if row.name in names}
        for name in set(names) - found.keys():
            # Where a database takes two names for one, Kombu does, too.
            one = select(q.id).where(q.name == name).limit(1)
            queue_id = connection.execute(one, execution_options=_UNMOVED).scalar()
            if queue_id is not None:
                found[name] = queue_id
        return found

    def add_queue(self, connection: Connection, name: str) -> None:
        """Add the row of a queue. Raises IntegrityError when there is one."""
        connection.execute(insert(self._queues).values(name=name).inline())

    def add(self, connection: Connection, rows: Sequence[BrokerRow]) -> None:
        """Add messages, in order and in as few statements as the database allows."""
        dialect = dialects.of(connection.dialect.name)
        statement = self._insert(connection.dialect)
        for chunk in _chunks(rows, dialect):
            connection.exec_driver_sql(*statement.fill(chunk))

    def has(self, connection: Connection, beginning: str) -> bool:
        """Whether there is a message, waiting or taken, whose text begins so."""
        begins = func.substr(self._messages.c.payload, 1, len(beginning)) == beginning
        return bool(connection.scalar(select(exists().where(begins)), execution_options=_UNMOVED))

    def longest_text(self, connection: Connection) -> int | None:
        """Bytes of text that a message holds; more might be cut. None: no limit to think of."""
        dialect = dialects.of(connection.dialect.name)
        return dialect.longest_text(connection, self._messages.c.payload)

    def _insert(self, dialect: SQLAlchemyDialect) -> _Insert:
        # MariaDB is told from MySQL only by asking the server.
        key = (dialect.driver, dialect.paramstyle, dialect.supports_sequences)
        if key not in self._inserts:
            text_mark, queue_mark = _MARKS
            statement = insert(self._messages).values(
                visible=true(),
                payload=literal_column(text_mark),
                version=literal_column("1"),
                queue_id=literal_column(queue_mark),
            )
            prefix, _, row = str(statement.inline().compile(dialect=dialect)).rpartition(" VALUES ")
            self._inserts[key] = _Insert(
                prefix=prefix, parts=re.split("|".join(_MARKS), row), style=dialect.paramstyle
            )
        return self._inserts[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Located:
    """Tables that were found, and how much text a message of theirs holds."""

    tables: BrokerTables
    longest_text: int | None


class BrokerQueues:
    """The transport's tables where the outbox is, for the transactions in which messages are stored."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[Pool, dict[tuple[str, str], _Located]] = WeakKeyDictionary()

    def add(self, connection: Connection, messages: Sequence[OutboxMessage]) -> Sequence[OutboxMessage]:
        """Write what can be written, for workers to see from the commit on; return the others.

        Those need a relay: it makes queues and tables, or has an error to show. Commits nothing.
        """
        by_tables: dict[tuple[str, str], list[tuple[OutboxMessage, str]]] = {}
        for message in messages:
            if (queue := message.kombu_queue) is not None:
                names = (queue.queue_table, queue.message_table)
                by_tables.setdefault(names, []).append((message, queue.name))
        written: set[int] = set()
        for names, addressed in by_tables.items():
            located = self._located(connection, names)
            if located is not None:
                written |= _add_to(connection, located, addressed)
        return [message for message in messages if id(message) not in written] if written else messages

    def has(self, connection: Connection, message: OutboxMessage) -> bool:
        """Whether ``add`` wrote a message, as far as ``connection`` sees; reads the whole table."""
        queue, text = message.kombu_queue, _text_of(message) or ""
        located = queue and self._located(connection, (queue.queue_table, queue.message_table))
        beginning = text.rpartition('"delivery_tag": ')[0]  # drawn anew each time
        return bool(located and beginning and located.tables.has(connection, beginning))

    def _located(self, connection: Connection, names: tuple[str, str]) -> _Located | None:
        found = self._found.setdefault(connection.engine.pool, {})
        if names not in found:
            tables = BrokerTables(*names).located(connection)
            if tables is None:
                return None  # they may be made at any moment
            found[names] = _Located(tables=tables, longest_text=tables.longest_text(connection))
        return found[names]


def _add_to(
    connection: Connection, located: _Located, addressed: Sequence[tuple[OutboxMessage, str]]
) -> set[int]:
    """Write what the tables take; return the ``id()`` of those messages."""
    located.tables.lock_for_writing(connection)
    ids = located.tables.queue_ids(connection, {queue for _, queue in addressed})
    rows: list[BrokerRow] = []
    written: set[int] = set()
    for message, queue in addressed:
        text = _text_of(message)
        if text is None or queue not in ids or len(text) > (located.longest_text or len(text)):
            continue
        rows.append((ids[queue], text))
        written.add(id(message))
    if rows:
        located.tables.add(connection, rows)
    return written


def _text_of(message: OutboxMessage) -> str | None:
    """What Kombu would write; None where it must be asked."""
    parts = EnvelopeParts.of(message.envelope)
    properties = Properties.of(parts)
    if not properties.are_plain:
        return None
    return spliced(parts, properties, message.body, message.expires_in)


class RowRefusedError(Exception):
    """A database refuses a row for what is in it."""


class BrokerDatabase:
    """The transport's tables on an engine of Kombu's, for transactions of the outbox's own."""

    def __init__(self, engine: Engine, tables: BrokerTables) -> None:
        self.tables = tables
        self.longest_text: int | None = None
        self._engine = engine
        self._dialect = dialects.of(engine.dialect.name)

    def prepare(self) -> None:
        """Reach the database, create the tables where they are missing, and commit."""
        with self._engine.begin() as connection:
            if not self.tables.exist(connection):
                self.tables.create(connection)
            self.longest_text = self.tables.longest_text(connection)

    def begin(self) -> AbstractContextManager[Connection]:
        """A transaction for writing, committed at the end."""
        return self._dialect.begin_as_configured(self._engine)

    def create_queues(self, names: Collection[str]) -> dict[str, str]:
        """Create the rows of queues that have none, each committed by itself.

        At once, since others who need the same queue wait for that commit. Returns why it could not
        be done, for each name that the database refuses.
        """
        with self._engine.connect() as connection:
            missing = set(names) - self.tables.queue_ids(connection, names).keys()
        refused: dict[str, str] = {}
        for name in sorted(missing):
            try:
                with self.begin() as connection:
                    self.tables.add_queue(connection, name)
            except DBAPIError as error:
                if not self._may_be_of_a_row(error):
                    raise
                refused[name] = self.explain(error)
        if refused:
            with self._engine.connect() as connection:
                made_by_others = self.tables.queue_ids(connection, refused)
            refused = {name: text for name, text in refused.items() if name not in made_by_others}
        return refused

    def add(self, connection: Connection, rows: Sequence[BrokerRow], *, is_alone: bool) -> None:
        """Add messages in the transaction that ``connection`` is in.

        Raises RowRefusedError when that was a row's fault; the transaction can go on when they were
        to be alone, in a savepoint.
        """
        try:
            with connection.begin_nested() if is_alone else nullcontext():
                self.tables.add(connection, rows)
        except DBAPIError as error:
            if not self._may_be_of_a_row(error):
                raise
            raise RowRefusedError(self.explain(error)) from error

    def is_lost(self, error: Exception) -> bool:
        """Whether the connection broke, or none could be had."""
        if isinstance(error, DBAPIError):
            # Connecting is no statement.
            return error.connection_invalidated or error.statement is None
        return isinstance(error, NoConnectionFree)

    def is_transient(self, error: Exception) -> bool:
        """Whether another transaction was in the way."""
        return isinstance(error, DBAPIError) and self._dialect.is_transient(error)

    def _may_be_of_a_row(self, error: DBAPIError) -> bool:
        # Drivers do not agree on the classes: a CHECK is an OperationalError with PyMySQL.
        others_fault = self.is_lost(error) or self.is_transient(error)
        return not others_fault and self._dialect.trouble(error) is None

    def explain(self, error: Exception) -> str:
        """Say what went wrong, without statement and parameters."""
        if not isinstance(error, DBAPIError):
            return f"{type(error).__name__}: {error}"
        # Further lines may quote the row, and the first its text.
        first = next(iter(str(error.orig).splitlines()), "").partition('{"body"')[0]
        return f"{type(error).__name__}: {first}"


def _queue_table(name: str, metadata: MetaData) -> Table:
    return Table(
        name,
        metadata,
        Column(
            "id",
            Integer,
            IdSequence("queue_id_sequence", schema=metadata.schema),
            primary_key=True,
            autoincrement=True,
        ),
        Column("name", String(200), unique=True),
        sqlite_autoincrement=True,
        mysql_engine="InnoDB",
    )


def _message_table(name: str, metadata: MetaData, queues: Table) -> Table:
    return Table(
        name,
        metadata,
        Column(
            "id",
            Integer,
            IdSequence("message_id_sequence", schema=metadata.schema),
            primary_key=True,
            autoincrement=True,
        ),
        Column("visible", Boolean, index=True),
        Column("timestamp", DateTime, index=True),
        Column("payload", Text, nullable=False),
        Column("version", SmallInteger, nullable=False),
        Column("queue_id", Integer, ForeignKey(queues.c.id, name="FK_kombu_message_queue")),
        Index("ix_kombu_message_timestamp_id", "timestamp", "id"),
        sqlite_autoincrement=True,
        mysql_engine="InnoDB",
    )


def _chunks(rows: Sequence[BrokerRow], dialect: Dialect) -> Iterator[Sequence[BrokerRow]]:
    start, size = 0, 0
    for index, (_, text) in enumerate(rows):
        is_full = index - start >= dialect.insert_rows or size + len(text) > dialect.insert_bytes
        if index > start and is_full:
            yield rows[start:index]
            start, size = index, 0
        size += len(text)
    if start < len(rows):
        yield rows[start:]
