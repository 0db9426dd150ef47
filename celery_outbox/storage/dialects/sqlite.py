"""SQLite 3.35 and later.

One writer at a time. A transaction that reads and then writes fails at once when another process
wrote in between, whatever the busy timeout: the outbox's own transactions therefore begin as
writers. Python's driver begins by itself only before the first INSERT, UPDATE or DELETE, so a
savepoint that comes first would be permanent on its release: the outbox begins before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import ColumnElement, Row, func, literal_column, select, update
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from ..schema import Tables, UTCDateTime
from .default import Dialect

__all__ = ["SQLite"]

BUSY_TIMEOUT_SECONDS = 30

#: Milliseconds; three zeros behind them make it SQLAlchemy's own text form.
_FORMAT: ColumnElement[str] = literal_column("'%Y-%m-%d %H:%M:%f'")


class SQLite(Dialect):
    """SQLite."""

    sync_drivers: ClassVar[dict[str, str]] = {"aiosqlite": "pysqlite"}

    def now(self) -> ColumnElement[datetime]:
        """The time of the statement, in SQLAlchemy's text form."""
        return _micros(func.strftime(_FORMAT, literal_column("'now'")))

    def shifted(
        self, instant: ColumnElement[datetime], seconds: ColumnElement[float]
    ) -> ColumnElement[datetime]:
        """``instant`` moved by ``seconds``."""
        # Text of a rounded number, not of 1e-05, which would be no modifier; NULL stays NULL.
        modifier = func.round(seconds, literal_column("3")).op("||")(literal_column("' seconds'"))
        return _micros(func.strftime(_FORMAT, instant, modifier))

    def seconds_until(self, instant: ColumnElement[datetime]) -> ColumnElement[float]:
        """The seconds from now to ``instant``."""
        days = func.julianday(instant) - func.julianday(self.now())
        # Instants have milliseconds here; what is finer is the error of counting in days.
        return func.round(days * 86400.0, literal_column("3"))

    def later(
        self, one: ColumnElement[datetime], other: ColumnElement[datetime]
    ) -> ColumnElement[datetime]:
        """The later of two instants."""
        return func.max(one, other, type_=UTCDateTime)

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
        """Claim in one statement; the transaction holds the only write lock."""
        t = tables.messages
        ready = (
            select(t.c.id)
            .where(t.c.broker == broker, tables.is_ready(self.now()))
            .order_by(t.c.scheduled_at, t.c.id)
            .limit(limit)
        )
        return connection.execute(
            update(t).where(t.c.id.in_(ready)).values(values).returning(*columns)
        ).all()

    def own_engine_options(self) -> dict[str, Any]:
        """Wait for other writers instead of failing."""
        return {"connect_args": {"timeout": BUSY_TIMEOUT_SECONDS}}

    def before_savepoint(self, connection: Connection) -> None:
        """Begin before a savepoint that is a transaction's first act."""
        _begin(connection, "BEGIN")

    def is_driver_autocommit(self, driver: Any) -> bool:
        """Whether nothing has begun and the driver will not begin by itself."""
        # Since Python 3.12; -1 there stands for the isolation_level of before.
        if getattr(driver, "autocommit", None) is True:
            return True
        return driver is not None and driver.isolation_level is None and not driver.in_transaction

    @contextmanager
    def begin(self, engine: Engine) -> Iterator[Connection]:
        """A transaction that is a writer from its start, so that it waits instead of failing."""
        with engine.begin() as connection:
            _begin(connection, "BEGIN IMMEDIATE")
            yield connection

    def is_transient(self, error: DBAPIError) -> bool:
        """Another process is writing."""
        return getattr(error.orig, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))

    def is_missing_table(self, error: DBAPIError) -> bool:
        """SQLite has no code of its own for it."""
        return "no such table" in str(error.orig)


def _micros(instant: ColumnElement[Any]) -> ColumnElement[datetime]:
    return instant.op("||", return_type=UTCDateTime())(literal_column("'000'"))


def _begin(connection: Connection, statement: str) -> None:
    driver = connection.connection.driver_connection
    # An engine may begin by an event of its own, or (Python 3.12, autocommit=False) always be in a
    # transaction.
    if driver is not None and not driver.in_transaction:
        connection.exec_driver_sql(statement)
