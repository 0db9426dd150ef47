"""What each database counts by itself of the message table, beyond what stands in it.

A row that was stored and delivered between two looks has left nothing in the table but a gap in the
ids: only the counter that hands them out has seen it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.engine import Connection

from ..schema import Tables

__all__ = ["Counters", "read_counters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Numbers that only grow, unless the table is made anew; None where nobody tells.

    Attributes:
        last_id: the last id that was handed out, also to a transaction that was rolled back.
        removed: rows deleted since some time, also by transactions that were rolled back.
    """

    last_id: int | None = None
    removed: int | None = None


def read_counters(connection: Connection, tables: Tables) -> Counters:
    """The counters of the message table."""
    return _READERS[connection.dialect.name](connection, tables)


def _postgresql(connection: Connection, tables: Tables) -> Counters:
    name = connection.dialect.identifier_preparer.format_table(tables.messages)
    row = connection.execute(text(_POSTGRESQL), {"name": name}).one()
    return Counters(last_id=row.last_id, removed=row.removed)


def _mysql(connection: Connection, tables: Tables) -> Counters:
    # MySQL 8 would answer from a cache that is a day old; MariaDB passes over the comment.
    connection.exec_driver_sql(
        "SET @outbox_look = 1 /*!80000 , SESSION information_schema_stats_expiry = 0 */"
    )
    names = {"schema": tables.names.schema, "name": tables.names.messages}
    following = connection.execute(text(_MYSQL), names).scalar()
    return Counters(last_id=None if following is None else int(following) - 1)


def _sqlite(connection: Connection, tables: Tables) -> Counters:
    schema = connection.dialect.identifier_preparer.quote(tables.names.schema or "main")
    there = f"SELECT 1 FROM {schema}.sqlite_master WHERE name = 'sqlite_sequence'"  # noqa: S608 - quoted
    if connection.exec_driver_sql(there).scalar() is None:
        return Counters()  # somebody's own table, without AUTOINCREMENT
    last = f"SELECT seq FROM {schema}.sqlite_sequence WHERE name = :name"  # noqa: S608 - quoted
    found = connection.execute(text(last), {"name": tables.names.messages}).scalar()
    return Counters(last_id=int(found or 0))


_READERS: Mapping[str, Callable[[Connection, Tables], Counters]] = {
    "postgresql": _postgresql,
    "mysql": _mysql,
    "mariadb": _mysql,
    "sqlite": _sqlite,
}

# The sequence says nothing to those who may not use it, and NULL before its first number.
_POSTGRESQL = """
SELECT CASE WHEN has_sequence_privilege(sequence, 'USAGE, SELECT')
            THEN coalesce(pg_sequence_last_value(sequence), 0) END AS last_id,
       pg_stat_get_tuples_deleted(to_regclass(:name)) AS removed
  FROM (SELECT CAST(pg_get_serial_sequence(:name, 'id') AS regclass) AS sequence) AS found
"""

_MYSQL = """
SELECT auto_increment AS following FROM information_schema.tables
 WHERE table_schema = coalesce(:schema, database()) AND table_name = :name
"""
