"""PostgreSQL 12 and later.

``statement_timestamp()`` is fixed for the statement, so the claim's index serves (with
``clock_timestamp()`` the planner must scan); ``now()`` would be the transaction's start.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Float,
    Row,
    any_,
    bindparam,
    cast,
    extract,
    func,
    literal_column,
    select,
    type_coerce,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from ..schema import Tables, UTCDateTime
from .default import Dialect, option

__all__ = ["PostgreSQL"]

#: deadlock_detected, serialization_failure, lock_not_available
_TRANSIENT = frozenset({"40P01", "40001", "55P03"})


class PostgreSQL(Dialect):
    """PostgreSQL."""

    sync_drivers: ClassVar[dict[str, str]] = {
        "asyncpg": "psycopg",
        "psycopg_async": "psycopg",
        "psycopg": "psycopg",
    }

    def now(self) -> ColumnElement[datetime]:
        """The time at which the statement began."""
        return func.statement_timestamp(type_=UTCDateTime)

    def clock(self) -> ColumnElement[datetime]:
        """The time of this very moment, also late in a long transaction."""
        return func.clock_timestamp(type_=UTCDateTime)

    def shifted(
        self, instant: ColumnElement[datetime], seconds: ColumnElement[float]
    ) -> ColumnElement[datetime]:
        """``instant`` moved by ``seconds``."""
        interval = func.make_interval(literal_column("secs => ").op("")(seconds))
        return type_coerce(instant + interval, UTCDateTime)

    def seconds_until(self, instant: ColumnElement[datetime]) -> ColumnElement[float]:
        """The seconds from now to ``instant``."""
        return cast(extract("epoch", instant - self.now()), Float(53))

    def claim(
        self,
        connection: Connection,
        tables: Tables,
        *,
        broker: str,
        values: dict[str, Any],
        limit: int,
        columns: Sequence[ColumnElement[Any]],
    ) -> Sequence[Row[Any]]:
        """Claim in one statement.

        The rows are picked in a materialized CTE: the planner may run a subquery again for each row,
        and would then update more rows than its LIMIT says.
        """
        t = tables.messages
        picked = (
            select(t.c.id)
            .where(t.c.broker == broker, tables.is_ready(self.now()))
            .order_by(t.c.scheduled_at, t.c.id)
            .limit(limit)
            .with_for_update(skip_locked=True)
            .cte("picked")
            .prefix_with("MATERIALIZED")
        )
        return connection.execute(
            update(t).where(t.c.id == picked.c.id).values(values).returning(*columns)
        ).all()

    def rows(self, tables: Tables, ids: Sequence[int]) -> ColumnElement[bool]:
        """Restrict by primary key, with one parameter however many ids there are."""
        return tables.messages.c.id == any_(bindparam(None, list(ids), type_=ARRAY(BigInteger)))

    def is_read_only(self, engine: Engine, connection: Connection | None) -> bool:
        """Whether it was opened with ``postgresql_readonly``."""
        subject = engine if connection is None else connection
        return bool(option(subject, "postgresql_readonly"))

    @contextmanager
    def begin(self, engine: Engine) -> Iterator[Connection]:
        """A transaction at READ COMMITTED, whatever level the caller's engine chooses.

        At a stricter one an install would not see what was made while it waited for its lock.
        """
        with engine.execution_options(isolation_level="READ COMMITTED").begin() as connection:
            yield connection

    @contextmanager
    def lock_schema(self, connection: Connection, table: str) -> Iterator[None]:
        """Hold an advisory lock until the transaction ends."""
        key = zlib.crc32(f"celery_outbox:{table}".encode())
        connection.execute(select(func.pg_advisory_xact_lock(key)))
        yield

    def is_transient(self, error: DBAPIError) -> bool:
        """Deadlocks, serialization failures and lock time-outs."""
        return getattr(error.orig, "sqlstate", None) in _TRANSIENT

    def is_missing_table(self, error: DBAPIError) -> bool:
        """undefined_table, or its schema."""
        return getattr(error.orig, "sqlstate", None) in {"42P01", "3F000"}
