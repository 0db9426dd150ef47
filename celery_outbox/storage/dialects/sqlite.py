"""SQLite 3.35 and later.

One writer at a time. A transaction that reads and then writes fails at once when another process
wrote in between, whatever the busy timeout: the outbox's own transactions therefore begin as
writers. Python's driver begins by itself only before the first INSERT, UPDATE or DELETE, so a
savepoint that comes first would be permanent on its release: the outbox begins before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import (
    ColumnElement,
    Integer,
    Row,
    Table,
    bindparam,
    delete,
    false,
    func,
    literal_column,
    select,
    update,
)
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from ..schema import Tables, UTCDateTime
from ..troubles import Trouble
from .default import ClaimPlan, Dialect, ServerFacts

__all__ = ["SQLite"]

BUSY_TIMEOUT_SECONDS = 30

#: Milliseconds; three zeros behind them make it SQLAlchemy's own text form.
_FORMAT: ColumnElement[str] = literal_column("'%Y-%m-%d %H:%M:%f'")


class SQLite(Dialect):
    """SQLite."""

    oldest_versions: ClassVar[Mapping[str, tuple[int, ...]]] = {"SQLite": (3, 35)}
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
        self, connection: Connection, plan: ClaimPlan, limit: int, parameters: Mapping[str, Any]
    ) -> Sequence[Row[Any]]:
        """Claim in one statement; the transaction holds the only write lock."""
        if plan.statement is None:
            t = plan.tables.messages
            due = select(t.c.id).where(*plan.ready).order_by(t.c.scheduled_at, t.c.id)
            picked = due.limit(bindparam("claim_limit", type_=Integer))
            claiming = update(t).where(t.c.id.in_(picked)).values(**plan.values)
            plan.statement = claiming.returning(*plan.columns)
        rows: Sequence[Row[Any]] = connection.execute(
            plan.statement, {**parameters, "claim_limit": limit}
        ).all()
        return rows

    def own_engine_options(self) -> dict[str, Any]:
        """Wait for other writers instead of failing."""
        return {"connect_args": {"timeout": BUSY_TIMEOUT_SECONDS}}

    def before_savepoint(self, connection: Connection) -> None:
        """Begin before a savepoint that is a transaction's first act."""
        _begin(connection, "BEGIN")

    def lock_for_writing(self, connection: Connection, table: Table) -> None:
        """Write nothing: what has only read fails at once when another process wrote in between."""
        connection.execute(delete(table).where(false()), execution_options={"schema_translate_map": {}})

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

    @contextmanager
    def begin_as_configured(self, engine: Engine) -> Iterator[Connection]:
        """A writer from its start here too."""
        with self.begin(engine) as connection:
            yield connection

    def is_transient(self, error: DBAPIError) -> bool:
        """Another process is writing."""
        return self.code(error).startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))

    def code(self, error: DBAPIError) -> str:
        """The name of SQLite's extended result code."""
        return getattr(error.orig, "sqlite_errorname", "")

    def trouble(self, error: DBAPIError) -> Trouble | None:
        """By its text where SQLite has no code of its own."""
        if self.code(error).startswith("SQLITE_READONLY"):
            return Trouble.READ_ONLY
        found = str(error.orig)
        return next((meaning for words, meaning in _TEXTS.items() if words in found), None)

    def server_facts(self, connection: Connection) -> ServerFacts:
        """Journal mode and busy timeout."""
        journal = str(connection.exec_driver_sql("PRAGMA journal_mode").scalar())
        timeout = int(connection.exec_driver_sql("PRAGMA busy_timeout").scalar() or 0)
        faults, remarks = [], []
        if timeout < 1000:
            faults.append(
                f"expected a busy timeout of at least 1000 ms, found {timeout}: the first writer that "
                'meets another one fails. Give connect_args={"timeout": 30} to create_engine.'
            )
        if journal not in {"wal", "memory"}:
            remarks.append(
                f"the journal mode is {journal!r}: readers and the writer wait for each other. "
                "PRAGMA journal_mode=WAL, once, ends that."
            )
        return ServerFacts(
            values={"journal mode": journal, "busy timeout": f"{timeout} ms"},
            faults=faults,
            remarks=remarks,
        )

    def odd_indexes(self, connection: Connection, tables: Tables) -> set[str]:
        """Partial, descending, of expressions, or in another collation."""
        preparer = connection.dialect.identifier_preparer
        schema = tables.names.schema
        pragma = f"PRAGMA {preparer.quote_schema(schema)}." if schema else "PRAGMA "
        listed = connection.exec_driver_sql(
            f"{pragma}index_list({preparer.quote(tables.names.messages)})"
        ).all()
        return {
            row.name
            for row in listed
            if row.partial
            or any(
                column.key and (column.name is None or column.desc or column.coll != "BINARY")
                for column in connection.exec_driver_sql(
                    f"{pragma}index_xinfo({preparer.quote(row.name)})"
                )
            )
        }


#: SQLite tells these apart by text alone.
_TEXTS = {
    "no such table": Trouble.MISSING_TABLE,
    "unknown database": Trouble.MISSING_SCHEMA,
    "no such column": Trouble.MISSING_COLUMN,
    "has no column named": Trouble.MISSING_COLUMN,
}


def _micros(instant: ColumnElement[Any]) -> ColumnElement[datetime]:
    return instant.op("||", return_type=UTCDateTime())(literal_column("'000'"))


def _begin(connection: Connection, statement: str) -> None:
    driver = connection.connection.driver_connection
    # An engine may begin by an event of its own, or (Python 3.12, autocommit=False) always be in a
    # transaction.
    if driver is not None and not driver.in_transaction:
        connection.exec_driver_sql(statement)
