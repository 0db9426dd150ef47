"""MySQL 8.0 and MariaDB 10.6, and later.

Claims run at READ COMMITTED: under REPEATABLE READ their gap locks would block the application's
INSERTs. There is no ``UPDATE … RETURNING`` here (MariaDB answers 1064), so a claim reads candidates
without locking and then locks exactly those it takes, by primary key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import (
    ColumnElement,
    Float,
    Numeric,
    Row,
    Select,
    and_,
    cast,
    func,
    literal_column,
    or_,
    select,
    text,
    type_coerce,
    update,
)
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from ...errors import DatabaseError
from ..schema import Tables, UTCDateTime
from .default import Dialect

__all__ = ["MySQL"]

#: Lock wait timeout, deadlock, record changed since last read (MariaDB's snapshot isolation).
_TRANSIENT = frozenset({1205, 1213, 1020})

#: Candidates read per page, beyond the rows wanted, in case others are claiming them.
_SPARE_CANDIDATES = 100
#: Pages of candidates that one claim looks through at most.
_PAGES = 20


class MySQL(Dialect):
    """MySQL and MariaDB."""

    sync_drivers: ClassVar[dict[str, str]] = {"aiomysql": "pymysql", "asyncmy": "pymysql"}

    def now(self) -> ColumnElement[datetime]:
        """The time at which the statement began, UTC whatever the session's time zone."""
        return func.utc_timestamp(literal_column("6"), type_=UTCDateTime)

    def shifted(
        self, instant: ColumnElement[datetime], seconds: ColumnElement[float]
    ) -> ColumnElement[datetime]:
        """``instant`` moved by ``seconds``."""
        micros = func.round(seconds * literal_column("1000000"))
        return func.timestampadd(text("MICROSECOND"), micros, instant, type_=UTCDateTime)

    def seconds_until(self, instant: ColumnElement[datetime]) -> ColumnElement[float]:
        """The seconds from now to ``instant``."""
        micros = func.timestampdiff(text("MICROSECOND"), self.now(), instant)
        return type_coerce(cast(micros, Numeric(24, 6)) / literal_column("1000000"), Float(53))

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
        """Claim by reading candidates unlocked and locking those that are still free."""
        t, taken, after = tables.messages, list[Any](), None
        # The rows are read before they are written: say what will stand in them.
        after_update = [
            values[column.key].label(column.key) if column.key == "attempts" else column
            for column in columns
        ]
        for _ in range(_PAGES):
            candidates = self._candidates(connection, tables, broker, limit, after)
            rest = candidates
            # Only as many at once as are wanted: those that have been due longest.
            while rest and (wanted := limit - len(taken)) > 0:
                taken += self._lock(connection, tables, rest[:wanted], after_update)
                rest = rest[wanted:]
            if len(taken) >= limit or len(candidates) < limit + _SPARE_CANDIDATES:
                break
            after = candidates[-1]
        if taken:
            connection.execute(update(t).where(t.c.id.in_([row.id for row in taken])).values(values))
        return taken

    def in_due_order(self, statement: Select[Any], tables: Tables) -> Select[Any]:
        """Force the index: the plan is else "ref" on the broker alone, which reads delayed rows too."""
        t = tables.messages
        hint = f"FORCE INDEX FOR ORDER BY (`ix_{t.name}_claim`)"
        return super().in_due_order(statement, tables).with_hint(t, hint)

    def _candidates(
        self,
        connection: Connection,
        tables: Tables,
        broker: str,
        limit: int,
        after: Row[Any] | None,
    ) -> Sequence[Row[Any]]:
        t, now = tables.messages, self.now()
        ready = select(t.c.id, t.c.scheduled_at).where(t.c.broker == broker, tables.is_ready(now))
        statement = self.in_due_order(ready, tables).limit(limit + _SPARE_CANDIDATES)
        if after is not None:
            statement = statement.where(
                or_(
                    t.c.scheduled_at > after.scheduled_at,
                    and_(t.c.scheduled_at == after.scheduled_at, t.c.id > after.id),
                )
            )
        rows: Sequence[Any] = connection.execute(statement).all()
        return rows

    def _lock(
        self,
        connection: Connection,
        tables: Tables,
        candidates: Sequence[Row[Any]],
        columns: Sequence[ColumnElement[Any]],
    ) -> Sequence[Row[Any]]:
        t = tables.messages
        rows: Sequence[Any] = connection.execute(
            select(*columns)
            # Any other index would lock rows on the way.
            .with_hint(t, "FORCE INDEX (PRIMARY)")
            .where(t.c.id.in_([row.id for row in candidates]), tables.is_ready(self.now()))
            .with_for_update(skip_locked=True)
        ).all()
        return rows

    def is_driver_autocommit(self, driver: Any) -> bool:
        """Whether the server's last answer said so; a method in most drivers, a property in some."""
        ask = getattr(driver, "get_autocommit", None)
        return super().is_driver_autocommit(driver) if ask is None else bool(ask())

    @contextmanager
    def begin(self, engine: Engine) -> Iterator[Connection]:
        """A transaction at READ COMMITTED, that one only; the session keeps its own level."""
        with engine.connect() as connection:
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            yield connection
            connection.commit()

    @contextmanager
    def lock_schema(self, connection: Connection, table: str) -> Iterator[None]:
        """Hold a named lock; DDL commits by itself, so a transaction could not."""
        name = f"celery_outbox:{table}"[:64]
        if connection.execute(select(func.get_lock(name, 30))).scalar() != 1:
            raise DatabaseError(
                f"expected to be the only one to change the table {table!r}, but another process "
                "has held its lock for 30 seconds. Try again when that is done."
            )
        try:
            yield
            # The next process must see what this one did.
            connection.commit()
        finally:
            connection.execute(select(func.release_lock(name)))

    def is_transient(self, error: DBAPIError) -> bool:
        """Deadlocks and lock time-outs."""
        return _code(error) in _TRANSIENT

    def is_missing_table(self, error: DBAPIError) -> bool:
        """ER_NO_SUCH_TABLE."""
        return _code(error) == 1146


def _code(error: DBAPIError) -> object:
    arguments: tuple[object, ...] = getattr(error.orig, "args", ())
    return arguments[0] if arguments else None
