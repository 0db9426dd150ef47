"""Creating the tables, by one process at a time; what is there already is left alone."""

from __future__ import annotations

from sqlalchemy import insert, select
from sqlalchemy.engine import Connection

from ..errors import SchemaError
from .database import Database
from .schema import SCHEMA_VERSION

__all__ = ["install"]

_VERSION = "schema"


def install(database: Database) -> None:
    """Create the tables and indexes that are missing; a second run changes nothing.

    Raises SchemaError when the table there is of another version, DatabaseError when the database
    cannot be reached or refuses.
    """
    database.run(lambda connection: _install(database, connection))


def _install(database: Database, connection: Connection) -> None:
    tables = database.tables
    with database.dialect.lock_schema(connection, tables.messages.fullname):
        for table in tables.metadata.sorted_tables:
            table.create(connection, checkfirst=True)
            for index in sorted(table.indexes, key=lambda index: str(index.name)):
                index.create(connection, checkfirst=True)
        state = tables.state
        found = connection.execute(select(state.c.value).where(state.c.name == _VERSION)).scalar()
        if found is None:
            connection.execute(
                insert(state).values(
                    name=_VERSION, value=str(SCHEMA_VERSION), seen_at=database.dialect.clock()
                )
            )
        elif found != str(SCHEMA_VERSION):
            raise SchemaError(
                f"database {database.name!r}, table {tables.messages.fullname!r}: expected schema "
                f"version {SCHEMA_VERSION}, found {found}. Install the version of celery-outbox that "
                "wrote it, or migrate the table."
            )
