"""The two tables: their columns, indexes and the predicates that name a row's state.

Invariants: every time is UTC with microseconds; the columns that a claim writes stand in no index
(so that PostgreSQL can update in place); a row that is out of the claim's path (failed or kept) has
``scheduled_at`` = FAR_FUTURE, so that it never stands in front of rows that wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    DDL,
    BigInteger,
    Column,
    ColumnElement,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    and_,
    event,
    or_,
)
from sqlalchemy.dialects.mysql import DATETIME, LONGBLOB, LONGTEXT
from sqlalchemy.dialects.postgresql import TIMESTAMP
from sqlalchemy.engine import Connection
from sqlalchemy.engine import Dialect as SQLAlchemyDialect
from sqlalchemy.types import DateTime, TypeDecorator, TypeEngine

from .names import Names

__all__ = [
    "FAR_FUTURE",
    "MAX_TASK_ID",
    "POSTGRESQL_PARAMETERS",
    "SCHEMA_VERSION",
    "UNCOMPRESSED",
    "Tables",
    "UTCDateTime",
    "storable",
]

SCHEMA_VERSION = 1

#: Later than every delay, and inside what each database's type can hold.
FAR_FUTURE = datetime(9999, 1, 1, tzinfo=UTC)

MAX_TASK_ID = 255
MAX_NAME = 255


def storable(text: str, limit: int) -> str:
    """Cut ``text``, and replace what no text column takes: NUL (PostgreSQL) and lone surrogates."""
    cut = text[:limit].replace("\0", "\N{REPLACEMENT CHARACTER}")
    return cut.encode("utf-8", "replace").decode("utf-8")


class UTCDateTime(TypeDecorator[datetime]):
    """An instant with microseconds: aware UTC in Python, whatever the session's time zone.

    PostgreSQL: ``timestamptz``. MySQL and MariaDB: ``DATETIME(6)`` in UTC (without the 6 they drop
    fractions). SQLite: text in ISO order.
    """

    impl = DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: SQLAlchemyDialect) -> TypeEngine[Any]:
        """Choose the type that keeps microseconds."""
        if dialect.name == "postgresql":
            return dialect.type_descriptor(TIMESTAMP(timezone=True))
        if dialect.name in {"mysql", "mariadb"}:
            return dialect.type_descriptor(DATETIME(fsp=6))
        return dialect.type_descriptor(DateTime())

    def process_bind_param(self, value: datetime | None, dialect: SQLAlchemyDialect) -> Any:
        """Hand the driver UTC; naive where its type has no zone."""
        if value is None:
            return None
        utc = value.astimezone(UTC)
        return utc if dialect.name == "postgresql" else utc.replace(tzinfo=None)

    def process_result_value(
        self, value: datetime | None, dialect: SQLAlchemyDialect
    ) -> datetime | None:
        """Give back aware UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The message table and, beside it, the small table of the schema version and the relays.

    Attributes:
        messages: for statements; its instants are aware UTC in Python.
        state: likewise.
        metadata: the same two tables with their indexes, as they are created and as Alembic sees
            them: of SQLAlchemy's own types alone, which a migration script can write down.
    """

    names: Names
    messages: Table
    state: Table
    metadata: MetaData

    @classmethod
    def build(cls, name: str, backend: str) -> Tables:
        """Describe the tables for ``name`` (optionally ``schema.name``) on a kind of database."""
        names, created, used = Names.of(name, backend), MetaData(), MetaData()
        messages = _messages(names, created, _CREATED_INSTANT)
        Index(names.claim_index, messages.c.broker, messages.c.scheduled_at, messages.c.id)
        Index(names.task_id_index, messages.c.task_id)
        _state(names, created, _CREATED_INSTANT)
        return cls(
            names=names,
            messages=_messages(names, used, UTCDateTime()),
            state=_state(names, used, UTCDateTime()),
            metadata=created,
        )

    @property
    def created(self) -> tuple[Table, Table]:
        """The two tables of ``metadata``: the messages, and the state."""
        tables = {table.name: table for table in self.metadata.tables.values()}
        return tables[self.names.messages], tables[self.names.state]

    def waits(self) -> ColumnElement[bool]:
        """Rows that are still to be delivered."""
        return self.messages.c.finished_at.is_(None)

    def is_free(self, now: ColumnElement[datetime]) -> ColumnElement[bool]:
        """Rows that no lease reserves; a lapsed lease reserves nothing."""
        lease = self.messages.c.lease_until
        return or_(lease.is_(None), lease <= now)

    def is_due(self, now: ColumnElement[datetime]) -> ColumnElement[bool]:
        """Rows whose next attempt may happen."""
        return self.messages.c.scheduled_at <= now

    def is_ready(self, now: ColumnElement[datetime]) -> ColumnElement[bool]:
        """Rows that a relay may claim: due and free."""
        return and_(self.is_due(now), self.is_free(now))

    def states(self, now: ColumnElement[datetime]) -> dict[str, ColumnElement[bool]]:
        """One predicate for each state; each row is in exactly one."""
        c = self.messages.c
        reserved = and_(c.lease_until.is_not(None), c.lease_until > now)
        waiting = and_(self.waits(), self.is_free(now), c.scheduled_at > now)
        return {
            "ready": and_(self.waits(), self.is_ready(now)),
            "delayed": and_(waiting, c.attempts == 0),
            "retrying": and_(waiting, c.attempts > 0),
            "reserved": and_(self.waits(), reserved),
            "failed": and_(c.finished_at.is_not(None), c.error.is_not(None)),
            "delivered": and_(c.finished_at.is_not(None), c.error.is_(None)),
        }


#: InnoDB for transactions and row locks; utf8mb4 for every character, and compared exactly, so that
#: the broker "Shop" is not "shop"; room in each page for PostgreSQL to write a claimed row's new
#: version beside the old one (HOT: a third faster).
_OPTIONS: dict[str, Any] = {
    **{
        f"{name}_{option}": value
        for name in ("mysql", "mariadb")
        for option, value in {
            "engine": "InnoDB",
            "charset": "utf8mb4",
            "collate": "utf8mb4_bin",
        }.items()
    },
    "postgresql_with": {"fillfactor": 50},
    "sqlite_autoincrement": True,
}

#: Every message leaves two dead rows, of its claim and of its DELETE. By PostgreSQL's defaults a fifth
#: of a backlog would be dead before anything is cleaned: so clean by number, and without pauses
#: (100,000 rows waiting, 300,000 passing through: 270 MB instead of 564, claims a third faster).
#: Cutting off the emptied end would lock the table against the application's INSERTs.
#: Rows longer than 2 kB keep message and body aside: a claim writes a row anew, and would copy them.
POSTGRESQL_PARAMETERS: dict[str, Any] = {
    "fillfactor": 50,
    "toast_tuple_target": 1024,
    "autovacuum_vacuum_scale_factor": 0.01,
    "autovacuum_vacuum_threshold": 1000,
    "autovacuum_vacuum_cost_delay": 0,
    "vacuum_truncate": "false",
}

#: PostgreSQL would try to compress these in a row longer than 2 kB, for a third of the cost of its
#: INSERT, and most rows are gone a moment later.
UNCOMPRESSED = ("message", "body")

_CREATED_INSTANT = DateTime(timezone=True).with_variant(DATETIME(fsp=6), "mysql", "mariadb")
_LONG_TEXT = Text().with_variant(LONGTEXT(), "mysql", "mariadb")
_BYTES = LargeBinary().with_variant(LONGBLOB(), "mysql", "mariadb")
# SQLite numbers rows itself only in a column declared INTEGER PRIMARY KEY.
_ID = BigInteger().with_variant(Integer(), "sqlite")


def _messages(names: Names, metadata: MetaData, instant: TypeEngine[datetime]) -> Table:
    return Table(
        names.messages,
        metadata,
        Column("id", _ID, primary_key=True, autoincrement=True),
        Column("broker", String(191), nullable=False),
        # Retries and callers reuse task ids: not unique.
        Column("task_id", String(MAX_TASK_ID), nullable=False),
        Column("task_name", String(MAX_NAME), nullable=False),
        Column("queue", String(MAX_NAME), nullable=False),
        Column("message", _LONG_TEXT, nullable=False),
        Column("body", _BYTES, nullable=False),
        Column("scheduled_at", instant, nullable=False),
        Column("deliver_at", instant),
        Column("expires_at", instant),
        Column("attempts", BigInteger, nullable=False),
        Column("max_attempts", BigInteger),
        Column("base_delay", BigInteger, comment="microseconds"),
        Column("max_delay", BigInteger, comment="microseconds"),
        Column("claim_token", String(32)),
        Column("lease_until", instant),
        Column("error", _LONG_TEXT),
        Column("finished_at", instant),
        Column("created_at", instant, nullable=False),
        schema=names.schema,
        **_OPTIONS | {"postgresql_with": POSTGRESQL_PARAMETERS},
    )


def _state(names: Names, metadata: MetaData, instant: TypeEngine[datetime]) -> Table:
    return Table(
        names.state,
        metadata,
        Column("name", String(191), primary_key=True),
        Column("value", Text, nullable=False),
        Column("seen_at", instant, nullable=False),
        schema=names.schema,
        **_OPTIONS,
    )


def _leave_uncompressed(table: Table, connection: Connection | None, **kwargs: Any) -> None:
    # Alembic creates a table of its own, from a script: so listen to all, and know ours by its
    # columns. Without a connection (alembic upgrade --sql) `schema install` makes up for it.
    is_ours = {*UNCOMPRESSED, "claim_token", "lease_until"} <= set(table.c.keys())
    if is_ours and connection is not None and connection.dialect.name == "postgresql":
        changes = ", ".join(f"ALTER COLUMN {column} SET STORAGE EXTERNAL" for column in UNCOMPRESSED)
        name = connection.dialect.identifier_preparer.format_table(table)
        connection.execute(DDL(f"ALTER TABLE {name} {changes}"))  # type: ignore[no-untyped-call]  # SQLAlchemy has not typed it


event.listen(Table, "after_create", _leave_uncompressed)
