"""Creating and repairing the tables, by one process at a time; what is right is left alone."""

from __future__ import annotations

from sqlalchemy.engine import Connection

from .database import Database
from .inspection import inspect_tables, refusal
from .schema import SCHEMA_VERSION

__all__ = ["install", "repair"]


def install(database: Database) -> list[str]:
    """Create the tables and indexes that are missing, and rebuild indexes that differ.

    Returns what had to be repaired, in words; creating the tables is no repair. While an index is
    built, PostgreSQL and SQLite let nobody write to the table.

    Raises SchemaError when the table there is of another version, half migrated, or has other
    columns; DatabaseError when the database cannot be reached or refuses.
    """
    return database.run(lambda connection: _install(database, connection))


def _install(database: Database, connection: Connection) -> list[str]:
    with database.dialect.lock_schema(connection, database.tables.messages.fullname):
        return repair(database, connection)


def repair(database: Database, connection: Connection) -> list[str]:
    """Do the work of ``install``, in the transaction and under the lock of the caller."""
    found = inspect_tables(database, connection)
    if faults := found.all_faults():
        raise refusal(database, faults)
    repaired = []
    for table in found.missing:
        table.create(connection)
    for index in found.missing_indexes:
        index.create(connection)
        repaired.append(f"created the index {index.name}")
    for index in found.differing_indexes:
        database.dialect.replace_index(connection, index)
        repaired.append(f"rebuilt the index {index.name}")
    clauses = database.dialect.missing_settings(connection, database.tables)
    if clauses:
        name = connection.dialect.identifier_preparer.format_table(database.tables.messages)
        connection.exec_driver_sql(f"ALTER TABLE {name} {', '.join(clauses)}")
        repaired.append("set the table's storage parameters")
    if found.version is None:
        database.state.set_version(connection, SCHEMA_VERSION)
    return repaired
