"""MySQL 8.0 and MariaDB 10.6, and later.

Claims run at READ COMMITTED: under REPEATABLE READ their gap locks would block the application's
INSERTs. There is no ``UPDATE … RETURNING`` here (MariaDB answers 1064), so a claim reads candidates
without locking and then locks exactly those it takes, by primary key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import (
    Column,
    ColumnElement,
    Delete,
    Float,
    Index,
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
from sqlalchemy.dialects.mysql import dialect as mysql_dialect
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from ...errors import ConfigurationError, DatabaseError
from ..schema import Tables, UTCDateTime
from ..troubles import STATEMENT_BINLOG, Trouble
from .default import ClaimPlan, D, Dialect, OldestTransaction, ServerFacts

__all__ = ["MySQL"]

#: Lock wait timeout, deadlock, record changed since last read (MariaDB's snapshot isolation).
_TRANSIENT = frozenset({1205, 1213, 1020})

#: Candidates read per page, beyond the rows wanted, in case others are claiming them.
_SPARE_CANDIDATES = 100
#: Pages of candidates that one claim looks through at most.
_PAGES = 20


class MySQL(Dialect):
    """MySQL and MariaDB."""

    oldest_versions: ClassVar[Mapping[str, tuple[int, ...]]] = {"MySQL": (8, 0), "MariaDB": (10, 6)}
    troubles: ClassVar[Mapping[object, Trouble]] = {
        1146: Trouble.MISSING_TABLE,
        1049: Trouble.MISSING_SCHEMA,
        1054: Trouble.MISSING_COLUMN,
        1290: Trouble.READ_ONLY,  # read_only
        1792: Trouble.READ_ONLY,  # transaction_read_only
        1836: Trouble.READ_ONLY,  # innodb_read_only
        1044: Trouble.NO_RIGHTS,
        1142: Trouble.NO_RIGHTS,
        1143: Trouble.NO_RIGHTS,
        1227: Trouble.NO_RIGHTS,
        1665: Trouble.STATEMENT_BINLOG,
    }
    has_transactional_ddl: ClassVar[bool] = False
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
        self, connection: Connection, plan: ClaimPlan, limit: int, parameters: Mapping[str, Any]
    ) -> Sequence[Row[Any]]:
        """Claim by reading candidates unlocked and locking those that are still free."""
        tables = plan.tables
        t, taken, after = tables.messages, list[Any](), None
        values = dict(plan.values)
        written = {name: parameters[name] for name in ("new_token", "claim_lease")}
        asked = {name: value for name, value in parameters.items() if name not in written}
        # The rows are read before they are written: say what will stand in them.
        after_update = [
            values[column.key].label(column.key) if column.key == "attempts" else column
            for column in plan.columns
        ]
        for _ in range(_PAGES):
            candidates = self._candidates(connection, plan, asked, limit, after)
            rest = candidates
            # Only as many at once as are wanted: those that have been due longest.
            while rest and (wanted := limit - len(taken)) > 0:
                taken += self._lock(connection, tables, rest[:wanted], after_update)
                rest = rest[wanted:]
            if len(taken) >= limit or len(candidates) < limit + _SPARE_CANDIDATES:
                break
            after = candidates[-1]
        if taken:
            written_into = self.only(update(t).values(values), tables, [row.id for row in taken])
            connection.execute(written_into, written)
        return taken

    def in_due_order(self, statement: Select[Any], tables: Tables) -> Select[Any]:
        """Force the index: the plan is else "ref" on the broker alone, which reads delayed rows too."""
        hint = f"FORCE INDEX FOR ORDER BY (`{tables.names.claim_index}`)"
        return super().in_due_order(statement, tables).with_hint(tables.messages, hint)

    def only(self, statement: D, tables: Tables, ids: Sequence[int] | None = None) -> D:
        """Restrict to rows by primary key, and have them found by it.

        Where many of a table's rows are named, the plan is else to read all of them: that would wait
        for every INSERT that the application has not committed yet, and for other relays.
        """
        t = tables.messages
        if isinstance(statement, Delete):
            # Only a DELETE in the form for several tables takes a hint: DELETE t FROM t FORCE INDEX ...
            statement = statement.prefix_with(_quoted(tables))
        return super().only(statement.with_hint("FORCE INDEX (PRIMARY)", t), tables, ids)

    def _candidates(
        self,
        connection: Connection,
        plan: ClaimPlan,
        asked: Mapping[str, Any],
        limit: int,
        after: Row[Any] | None,
    ) -> Sequence[Row[Any]]:
        t = plan.tables.messages
        some = select(t.c.id, t.c.scheduled_at).where(*plan.ready)
        statement = self.in_due_order(some, plan.tables).limit(limit + _SPARE_CANDIDATES)
        if after is not None:
            statement = statement.where(
                or_(
                    t.c.scheduled_at > after.scheduled_at,
                    and_(t.c.scheduled_at == after.scheduled_at, t.c.id > after.id),
                )
            )
        rows: Sequence[Any] = connection.execute(statement, asked).all()
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
        # Whoever waits for a lock on the table makes every INSERT wait behind it.
        patience = connection.exec_driver_sql("SELECT @@SESSION.lock_wait_timeout").scalar()
        connection.exec_driver_sql("SET SESSION lock_wait_timeout = 5")
        try:
            yield
            # The next process must see what this one did.
            connection.commit()
        finally:
            if not connection.invalidated:
                connection.exec_driver_sql(f"SET SESSION lock_wait_timeout = {patience}")
                connection.execute(select(func.release_lock(name)))

    def checkpoint(self, connection: Connection) -> None:
        """Commit, as each DDL statement does."""
        connection.commit()

    def schemas_for_writing(self, connection: Connection, names: Sequence[str]) -> set[str | None]:
        """Found out by inserting nothing: a right that is missing fails this statement alone."""
        for name in names[:2]:  # the others are sequences, which MySQL has not
            table = connection.dialect.identifier_preparer.quote(name)
            nothing = f"SELECT * FROM {table} WHERE FALSE"  # noqa: S608 - a quoted name
            connection.exec_driver_sql(f"INSERT INTO {table} {nothing}")
        return {None}

    def longest_text(self, connection: Connection, column: Column[str]) -> int | None:
        """The column's own limit, or a third of a packet: quotes in the text take two bytes there.

        Without a strict ``sql_mode`` what is longer than a column is cut, with a mere warning.
        """
        names = {"table": column.table.name, "column": column.name}
        limit = connection.execute(text(_LONGEST), names).scalar()
        return None if limit is None else int(limit)

    def is_transient(self, error: DBAPIError) -> bool:
        """Deadlocks and lock time-outs."""
        return self.code(error) in _TRANSIENT

    def code(self, error: DBAPIError) -> object:
        """The error's number."""
        arguments: tuple[object, ...] = getattr(error.orig, "args", ())
        return arguments[0] if arguments else None

    def server_name(self, connection: Connection) -> str:
        """Which of the two it is."""
        return "MariaDB" if getattr(connection.dialect, "is_mariadb", False) else "MySQL"

    def check_server(self, connection: Connection) -> None:
        """Refuse also a binary log that takes no writes at READ COMMITTED."""
        super().check_server(connection)
        if _logs_statements(_variables(connection)):
            raise ConfigurationError(STATEMENT_BINLOG)

    def server_facts(self, connection: Connection) -> ServerFacts:
        """Isolation, binary log, time zone, and whether it can be written."""
        found, faults = _variables(connection), []
        if found.get("read_only") in {"ON", "1"}:
            faults.append(
                "expected a server that can be written, found read_only = ON. "
                "Point the URL at the primary."
            )
        return ServerFacts(
            values={
                "isolation": found.get("transaction_isolation") or found.get("tx_isolation") or "?",
                "binlog_format": found.get("binlog_format", "?")
                if found.get("log_bin") == "ON"
                else "no binary log",
                "time zone": found.get("time_zone", "?"),
                "read only": found.get("read_only", "?").lower(),
            },
            faults=faults,
        )

    def oldest_transaction(self, connection: Connection) -> OldestTransaction:
        """Of the whole server; it needs the PROCESS privilege."""
        return OldestTransaction(seconds=connection.execute(text(_OLDEST)).scalar())

    def table_faults(self, connection: Connection, tables: Tables) -> Sequence[str]:
        """Another engine than InnoDB, or text that is not utf8mb4 or not compared exactly."""
        faults = []
        for table in (tables.messages, tables.state):
            where = {"schema": table.schema, "name": table.name}
            engine = connection.execute(text(_ENGINE), where).scalar()
            if engine != "InnoDB":
                faults.append(
                    f"table {table.name!r}: expected the engine InnoDB, found {engine}. "
                    f"Do: ALTER TABLE `{table.name}` ENGINE=InnoDB"
                )
            ours = set(table.c.keys())
            collations = {
                row.collation
                for row in connection.execute(text(_COLLATIONS), where)
                if row.name in ours and row.collation not in {None, "utf8mb4_bin"}
            }
            if collations:
                faults.append(
                    f"table {table.name!r}: expected the collation utf8mb4_bin, found "
                    f"{', '.join(sorted(collations))}. Do: ALTER TABLE `{table.name}` "
                    "CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
                )
        return faults

    def odd_indexes(self, connection: Connection, tables: Tables) -> set[str]:
        """Descending, only of the beginnings of values, not B-trees, or not used by the planner."""
        name = connection.dialect.identifier_preparer.format_table(tables.messages)
        rows = connection.exec_driver_sql(f"SHOW INDEX FROM {name}").mappings()
        return {
            row["Key_name"]
            for row in rows
            if row["Collation"] != "A"
            or row["Sub_part"] is not None
            or row["Index_type"] != "BTREE"
            or row.get("Visible") == "NO"  # MySQL
            or row.get("Ignored") == "YES"  # MariaDB
        }

    def replace_index(self, connection: Connection, index: Index) -> None:
        """In one statement, so that no claim finds the table without it."""
        preparer: Any = connection.dialect.identifier_preparer
        name = preparer.format_index(index)
        columns = ", ".join(preparer.quote(column.name) for column in index.columns)
        table = preparer.format_table(index.table)
        connection.exec_driver_sql(
            f"ALTER TABLE {table} DROP INDEX {name}, ADD INDEX {name} ({columns})"
        )
        # One that is dropped and added alike stays as it was, also when it was switched off.
        switch = "NOT IGNORED" if self.server_name(connection) == "MariaDB" else "VISIBLE"
        connection.exec_driver_sql(f"ALTER TABLE {table} ALTER INDEX {name} {switch}")


_PREPARER = mysql_dialect().identifier_preparer

_OLDEST = """
SELECT max(timestampdiff(SECOND, trx_started, convert_tz(now(), @@time_zone, 'SYSTEM')))
  FROM information_schema.innodb_trx
 WHERE trx_mysql_thread_id <> connection_id()
"""

_ENGINE = """
SELECT engine FROM information_schema.tables
 WHERE table_schema = coalesce(:schema, database()) AND table_name = :name
"""

_LONGEST = """
SELECT least(character_octet_length, @@max_allowed_packet DIV 3)
  FROM information_schema.columns
 WHERE table_schema = database() AND table_name = :table AND column_name = :column
"""

_COLLATIONS = """
SELECT column_name AS name, collation_name AS collation FROM information_schema.columns
 WHERE table_schema = coalesce(:schema, database()) AND table_name = :name
"""


def _quoted(tables: Tables) -> str:
    return _PREPARER.format_table(tables.messages)


def _variables(connection: Connection) -> Mapping[str, str]:
    # Not @@name: which of them there are depends on the server and its version.
    rows = connection.exec_driver_sql(
        "SHOW SESSION VARIABLES WHERE Variable_name IN ('log_bin', 'binlog_format', 'read_only', "
        "'time_zone', 'transaction_isolation', 'tx_isolation')"
    )
    return {str(row[0]): str(row[1]) for row in rows}


def _logs_statements(variables: Mapping[str, str]) -> bool:
    return variables.get("log_bin") == "ON" and variables.get("binlog_format") == "STATEMENT"
