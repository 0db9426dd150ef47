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
from sqlalchemy.engine import Dialect as SQLAlchemyDialect
from sqlalchemy.types import DateTime, TypeDecorator, TypeEngine

__all__ = ["FAR_FUTURE", "MAX_TASK_ID", "SCHEMA_VERSION", "Tables", "UTCDateTime", "storable"]

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
    """The message table and, beside it, the small table of the schema version and the relays."""

    metadata: MetaData
    messages: Table
    state: Table

    @classmethod
    def build(cls, name: str, metadata: MetaData | None = None) -> Tables:
        """Describe the tables for ``name`` (optionally ``schema.name``) in ``metadata``."""
        metadata = MetaData() if metadata is None else metadata
        schema, _, table = name.rpartition(".")
        return cls(
            metadata=metadata,
            messages=_messages(table, schema or None, metadata),
            state=Table(
                f"{table}_state",
                metadata,
                Column("name", String(191), primary_key=True),
                Column("value", Text, nullable=False),
                Column("seen_at", UTCDateTime, nullable=False),
                schema=schema or None,
                **_OPTIONS,
            ),
        )

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


#: InnoDB for transactions and row locks; utf8mb4 for every character; room in each page for
#: PostgreSQL to write a claimed row's new version beside the old one (HOT: a third faster).
_OPTIONS: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mariadb_engine": "InnoDB",
    "mariadb_charset": "utf8mb4",
    "postgresql_with": {"fillfactor": 50},
    "sqlite_autoincrement": True,
}

# PostgreSQL would try to compress what makes a row longer than 2 kB, for a third of the cost of its
# INSERT, and most rows are gone a moment later.
_UNCOMPRESSED = DDL(  # type: ignore[no-untyped-call]  # SQLAlchemy has not typed it
    "ALTER TABLE %(fullname)s"
    " ALTER COLUMN message SET STORAGE EXTERNAL, ALTER COLUMN body SET STORAGE EXTERNAL"
).execute_if(dialect="postgresql")

_LONG_TEXT = Text().with_variant(LONGTEXT(), "mysql", "mariadb")
_BYTES = LargeBinary().with_variant(LONGBLOB(), "mysql", "mariadb")
# SQLite numbers rows itself only in a column declared INTEGER PRIMARY KEY.
_ID = BigInteger().with_variant(Integer(), "sqlite")


def _messages(name: str, schema: str | None, metadata: MetaData) -> Table:
    table = Table(
        name,
        metadata,
        Column("id", _ID, primary_key=True, autoincrement=True),
        Column("broker", String(191), nullable=False),
        # Retries and callers reuse task ids: not unique.
        Column("task_id", String(MAX_TASK_ID), nullable=False),
        Column("task_name", String(MAX_NAME), nullable=False),
        Column("queue", String(MAX_NAME), nullable=False),
        Column("message", _LONG_TEXT, nullable=False),
        Column("body", _BYTES, nullable=False),
        Column("scheduled_at", UTCDateTime, nullable=False),
        Column("deliver_at", UTCDateTime),
        Column("expires_at", UTCDateTime),
        Column("attempts", BigInteger, nullable=False),
        Column("max_attempts", BigInteger),
        Column("base_delay", BigInteger, comment="microseconds"),
        Column("max_delay", BigInteger, comment="microseconds"),
        Column("claim_token", String(32)),
        Column("lease_until", UTCDateTime),
        Column("error", _LONG_TEXT),
        Column("finished_at", UTCDateTime),
        Column("created_at", UTCDateTime, nullable=False),
        schema=schema,
        **_OPTIONS,
    )
    Index(f"ix_{name}_claim", table.c.broker, table.c.scheduled_at, table.c.id)
    Index(f"ix_{name}_task_id", table.c.task_id)
    event.listen(table, "after_create", _UNCOMPRESSED)
    return table
