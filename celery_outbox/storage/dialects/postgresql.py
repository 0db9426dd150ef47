"""PostgreSQL 12 and later.

``statement_timestamp()`` is fixed for the statement, so the claim's index serves (with
``clock_timestamp()`` the planner must scan); ``now()`` would be the transaction's start.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import (
    BigInteger,
    BindParameter,
    ColumnElement,
    Float,
    Integer,
    Row,
    Text,
    any_,
    bindparam,
    cast,
    event,
    extract,
    func,
    literal_column,
    select,
    text,
    type_coerce,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.engine import Connection, Engine, TwoPhaseTransaction
from sqlalchemy.exc import DBAPIError

from ..schema import POSTGRESQL_PARAMETERS, UNCOMPRESSED, Tables, UTCDateTime
from ..troubles import Trouble
from .default import ClaimPlan, Dialect, OldestTransaction, ServerFacts, option
from .listening import Subscription

__all__ = ["PostgreSQL"]

#: The option of statements whose results psycopg is to ask for in PostgreSQL's binary format.
_BINARY = "celery_outbox_binary"
#: deadlock_detected, serialization_failure, lock_not_available
_TRANSIENT = frozenset({"40P01", "40001", "55P03"})


class PostgreSQL(Dialect):
    """PostgreSQL."""

    oldest_versions: ClassVar[Mapping[str, tuple[int, ...]]] = {"PostgreSQL": (12,)}
    troubles: ClassVar[Mapping[object, Trouble]] = {
        "42P01": Trouble.MISSING_TABLE,
        "3F000": Trouble.MISSING_SCHEMA,
        "42703": Trouble.MISSING_COLUMN,
        "25006": Trouble.READ_ONLY,
        "42501": Trouble.NO_RIGHTS,
    }
    #: Not psycopg2, which writes parameters into the statement's text.
    array_drivers: ClassVar[frozenset[str]] = frozenset({"psycopg", "psycopg_async", "asyncpg"})
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
        self, connection: Connection, plan: ClaimPlan, limit: int, parameters: Mapping[str, Any]
    ) -> Sequence[Row[Any]]:
        """Claim in one statement."""
        if plan.statement is None:
            plan.statement = self._claim_statement(plan)
        # Before a table was analyzed, the planner takes the ready rows for few, and would rather read
        # and sort all of them than follow the index to the first ones.
        connection.exec_driver_sql("SET LOCAL enable_sort = off")
        rows: Sequence[Row[Any]] = connection.execute(
            plan.statement, {**parameters, "claim_limit": limit}
        ).all()
        return rows

    def _claim_statement(self, plan: ClaimPlan) -> Any:
        """The rows are picked in a materialized CTE.

        The planner may run a subquery again for each row, and would then update more rows than its
        LIMIT says.
        """
        t = plan.tables.messages
        picked = (
            select(t.c.id)
            .where(*plan.ready)
            .order_by(t.c.scheduled_at, t.c.id)
            .limit(bindparam("claim_limit", type_=Integer))
            .with_for_update(skip_locked=True)
            .cte("picked")
            .prefix_with("MATERIALIZED")
        )
        claiming = update(t).where(t.c.id == picked.c.id).values(**plan.values)
        return claiming.returning(*plan.columns).execution_options(**{_BINARY: True})

    def is_among(self, tables: Tables, ids: Sequence[int] | None) -> ColumnElement[bool]:
        """With one parameter however many ids there are."""
        given: BindParameter[str]
        given = bindparam("rows") if ids is None else bindparam(None, self.rows(ids))
        return tables.messages.c.id == any_(cast(type_coerce(given, Text), ARRAY(BigInteger)))

    def rows(self, ids: Sequence[int]) -> Any:
        """As text: SQLAlchemy and psycopg would look at each element of an array."""
        return f"{{{','.join(map(str, ids))}}}"

    def prepare_own_engine(self, engine: Engine) -> None:
        """Have no statement prepared on the server.

        Behind PgBouncer in transaction mode the next statement may come to another server, where that
        name stands for nothing, or for another client's statement.
        """
        if engine.driver == "psycopg":

            @event.listens_for(engine, "connect")
            def prepare_nothing(connection: Any, record: object) -> None:
                connection.prepare_threshold = None

    def can_notify(self, connection: Connection) -> bool:
        """PREPARE TRANSACTION refuses transactions with a NOTIFY."""
        return not isinstance(connection.get_transaction(), TwoPhaseTransaction)

    def notify(self, tables: Tables, constant: str) -> ColumnElement[Any]:
        """A subquery, which is run once for the whole statement.

        The server drops what is said twice in a transaction, and what was said in a savepoint that is
        rolled back: so each statement may say it, and none needs to remember.
        """
        return literal_column(f"(SELECT {constant} FROM pg_notify('{self.channel(tables)}', ''))")  # noqa: S608 - a hash

    def channel(self, tables: Tables) -> str:
        """One for each table, so that no relay is woken for another's; short, whatever its name."""
        digest = hashlib.sha256(tables.messages.fullname.encode()).hexdigest()
        return f"celery_outbox_{digest[:16]}"

    def can_listen(self, engine: Engine) -> bool:
        """By psycopg."""
        return engine.driver == "psycopg"

    def listen(self, engine: Engine, tables: Tables, bell: int) -> Subscription:
        """LISTEN."""
        return Subscription(engine, self.channel(tables), bell)

    def schemas_for_writing(self, connection: Connection, names: Sequence[str]) -> set[str | None]:
        """Those of the search path; asked, since an error would end the caller's transaction."""
        quote = connection.dialect.identifier_preparer.quote
        found = connection.execute(text(_SCHEMAS), {"names": [quote(name) for name in names]}).all()
        return {row.nspname for row in found} if len(found) == len(names) else set()

    def is_read_only(self, engine: Engine, connection: Connection | None) -> bool:
        """Whether it was opened with ``postgresql_readonly``."""
        subject = engine if connection is None else connection
        return bool(option(subject, "postgresql_readonly"))

    def working_engine(self, engine: Engine) -> Engine:
        """At READ COMMITTED, whatever level the caller's engine chooses.

        At a stricter one an install would not see what was made while it waited for its lock.
        """
        working = engine.execution_options(isolation_level="READ COMMITTED")
        if engine.driver == "psycopg":
            event.listen(working, "before_cursor_execute", _answer_in_binary)
        return working

    @contextmanager
    def lock_schema(self, connection: Connection, table: str) -> Iterator[None]:
        """Hold an advisory lock until the transaction ends."""
        key = zlib.crc32(f"celery_outbox:{table}".encode())
        connection.execute(select(func.pg_advisory_xact_lock(key)))
        # Whoever waits for a lock on the table makes every INSERT wait behind it.
        connection.exec_driver_sql("SET LOCAL lock_timeout = '5s'")
        yield

    def is_transient(self, error: DBAPIError) -> bool:
        """Deadlocks, serialization failures and lock time-outs."""
        return self.code(error) in _TRANSIENT

    def code(self, error: DBAPIError) -> object:
        """The SQLSTATE."""
        return getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)

    def server_facts(self, connection: Connection) -> ServerFacts:
        """Isolation, time zone, and whether it can be written."""
        row = connection.execute(text(_FACTS)).one()
        faults = []
        if row.is_replica:
            faults.append(
                "expected the primary server, found a replica, which takes no writes. "
                "Point the URL at the primary."
            )
        elif row.read_only == "on":
            faults.append(
                "expected default_transaction_read_only = off, found on. "
                "Turn it off for the outbox's user, or use another user."
            )
        return ServerFacts(
            values={
                "isolation": row.isolation,
                "time zone": row.time_zone,
                "read only": "replica" if row.is_replica else row.read_only,
            },
            faults=faults,
        )

    def oldest_transaction(self, connection: Connection) -> OldestTransaction:
        """Of this database, prepared ones included: it keeps dead rows from being cleaned up."""
        row = connection.execute(text(_OLDEST)).one()
        seconds = [float(each) for each in (row.running, row.prepared) if each is not None]
        return OldestTransaction(seconds=max(seconds, default=None), is_complete=row.hidden == 0)

    def odd_indexes(self, connection: Connection, tables: Tables) -> set[str]:
        """Not B-trees in ascending order of all rows, or left behind by a CONCURRENTLY that failed."""
        return set(connection.execute(text(_ODD), {"name": _regclass(connection, tables)}).scalars())

    def missing_settings(self, connection: Connection, tables: Tables) -> Sequence[str]:
        """Storage parameters that nobody has set, and columns that would be compressed."""
        name = {"name": _regclass(connection, tables)}
        options = connection.execute(text(_OPTIONS), name).scalar() or []
        given = {option.partition("=")[0] for option in options}
        missing = [
            f"{key} = {value}" for key, value in POSTGRESQL_PARAMETERS.items() if key not in given
        ]
        compressed = connection.execute(text(_COMPRESSED), name | {"columns": list(UNCOMPRESSED)})
        clauses = [f"SET ({', '.join(missing)})"] if missing else []
        return clauses + [f"ALTER COLUMN {each} SET STORAGE EXTERNAL" for each in compressed.scalars()]


def _answer_in_binary(
    connection: Connection, cursor: Any, statement: str, parameters: Any, context: Any, *_: Any
) -> None:
    """As text, bodies would be twice as long, and take twice as long to read."""
    if context.execution_options.get(_BINARY):
        cursor.format = 1


def _regclass(connection: Connection, tables: Tables) -> str:
    return connection.dialect.identifier_preparer.format_table(tables.messages)


_FACTS = """
SELECT current_setting('default_transaction_isolation') AS isolation,
       current_setting('TimeZone') AS time_zone,
       current_setting('default_transaction_read_only') AS read_only,
       pg_is_in_recovery() AS is_replica
"""

# Without pg_read_all_stats, other users' sessions show neither their transaction nor their kind.
_OLDEST = """
SELECT extract(epoch FROM max(clock_timestamp() - xact_start)
               FILTER (WHERE backend_type = 'client backend')) AS running,
       (SELECT extract(epoch FROM max(clock_timestamp() - prepared))
          FROM pg_prepared_xacts WHERE database = current_database()) AS prepared,
       count(*) FILTER (WHERE query = '<insufficient privilege>') AS hidden
  FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid()
"""

_ODD = """
SELECT i.relname
  FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid JOIN pg_am a ON a.oid = i.relam
 WHERE x.indrelid = to_regclass(:name)
   AND (NOT x.indisvalid OR x.indpred IS NOT NULL OR x.indexprs IS NOT NULL
        OR a.amname <> 'btree' OR x.indnatts <> x.indnkeyatts
        OR EXISTS (SELECT FROM unnest(CAST(x.indoption AS int2[])) o WHERE o <> 0))
"""

_SCHEMAS = """
SELECT nspname
  FROM unnest(CAST(:names AS text[])) name
  JOIN pg_class c ON c.oid = to_regclass(name)
  JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE has_schema_privilege(n.oid, 'USAGE')
   AND CASE c.relkind WHEN 'S' THEN has_sequence_privilege(c.oid, 'USAGE')
                      ELSE has_table_privilege(c.oid, 'SELECT')
                           AND has_table_privilege(c.oid, 'INSERT') END
"""

_OPTIONS = "SELECT reloptions FROM pg_class WHERE oid = to_regclass(:name)"

_COMPRESSED = """
SELECT attname FROM pg_attribute
 WHERE attrelid = to_regclass(:name) AND attname = ANY (:columns) AND attstorage = 'x'
 ORDER BY attnum
"""
