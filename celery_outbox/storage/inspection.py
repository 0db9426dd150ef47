"""What is in the database, compared with what should be there; nothing is changed here.

Invariant: columns and indexes that are not the outbox's own are never a fault, unless the outbox
could not write its rows because of them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy import Index, Table, inspect
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SAWarning
from sqlalchemy.types import TypeEngine

from ..errors import SchemaError
from .schema import SCHEMA_VERSION
from .state import MigrationMark

if TYPE_CHECKING:
    from .database import Database

__all__ = ["Inspection", "inspect_tables", "refusal", "require_current_version"]

_COMMAND = "celery-outbox -A your_app schema"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The tables as they are.

    Attributes:
        missing: those of the two tables that are not there, in their order.
        version: as the state table says; None when it does not.
        migration: one that has begun and not ended.
        faults: what differs in the columns, one sentence each.
        own_columns: those that a user has added.
        missing_indexes: of the messages.
        differing_indexes: of the messages; under their names there are others.
    """

    missing: Sequence[Table] = field(default=())
    version: int | None = None
    migration: MigrationMark | None = None
    faults: Sequence[str] = field(default=())
    own_columns: Sequence[str] = field(default=())
    missing_indexes: Sequence[Index] = field(default=())
    differing_indexes: Sequence[Index] = field(default=())

    def version_fault(self) -> str | None:
        """What is wrong with the version and what to do; None: nothing is, or there is none."""
        if self.migration is not None:
            found = (
                f"expected schema version {SCHEMA_VERSION}, found a migration from "
                f"{self.migration.source} to {self.migration.target} that was interrupted. Stop what "
                f"uses the table and run `{_COMMAND} migrate` again"
            )
            if self.migration.target > SCHEMA_VERSION:
                return f"{found}, with the version of celery-outbox that began it."
            return f"{found}: it goes on where it was."
        if self.version is None or self.version == SCHEMA_VERSION:
            return None
        if self.version < SCHEMA_VERSION:
            return (
                f"expected schema version {SCHEMA_VERSION}, found {self.version}. "
                f"Stop the relays and run `{_COMMAND} migrate`."
            )
        return (
            f"expected schema version {SCHEMA_VERSION}, found {self.version}, which a newer "
            "celery-outbox has made. Install that version here too: `pip install --upgrade "
            "celery-outbox`."
        )

    def all_faults(self) -> Sequence[str]:
        """What no installation repairs."""
        # Of another version, the columns differ by right.
        return [fault] if (fault := self.version_fault()) else self.faults


def inspect_tables(database: Database, connection: Connection) -> Inspection:
    """Compare both tables with their definition."""
    with warnings.catch_warnings():
        # Of columns and indexes of a user's own that SQLAlchemy cannot describe.
        warnings.simplefilter("ignore", SAWarning)
        return _inspect_tables(database, connection)


def _inspect_tables(database: Database, connection: Connection) -> Inspection:
    tables = database.tables
    inspector: Any = inspect(connection)
    missing = [
        table for table in tables.created if not inspector.has_table(table.name, schema=table.schema)
    ]
    version, migration = None, None
    messages, state = tables.created
    if state not in missing:
        version = database.state.version(connection)
        migration = database.state.migration(connection)
    faults: list[str] = []
    own: list[str] = []
    for table in tables.created:
        if table not in missing:
            found = _columns(inspector, table)
            faults += _column_faults(table, found, connection)
            faults += _foreign_faults(table, found)
            own += [name for name in found if name not in table.c]
    if not missing:
        faults += database.dialect.table_faults(connection, tables)
    absent, differing = (
        ([], []) if messages in missing else _indexes(database, connection, inspector, messages)
    )
    return Inspection(
        missing=missing,
        version=version,
        migration=migration,
        faults=faults,
        own_columns=own,
        missing_indexes=absent,
        differing_indexes=differing,
    )


def require_current_version(database: Database, connection: Connection) -> None:
    """Refuse tables of another version; those without a version are looked at.

    Alembic and DBAs create tables without one: when all is as it should be, it is written down.
    Raises SchemaError.
    """
    state = database.state
    found = Inspection(version=state.version(connection), migration=state.migration(connection))
    if found.version is None:
        found = inspect_tables(database, connection)
        if faults := found.all_faults():
            raise refusal(database, faults)
        state.set_version(connection, SCHEMA_VERSION)
    elif fault := found.version_fault():
        raise refusal(database, [fault])


def refusal(database: Database, faults: Sequence[str]) -> SchemaError:
    """Make the error that names the faults of a database's tables."""
    where = f"database {database.name!r}, table {database.tables.messages.fullname!r}"
    return SchemaError(f"{where}: {' '.join(faults)}")


def _columns(inspector: Any, table: Table) -> Mapping[str, Any]:
    columns = inspector.get_columns(table.name, schema=table.schema)
    return {column["name"]: column for column in columns}


def _column_faults(table: Table, found: Mapping[str, Any], connection: Connection) -> Iterator[str]:
    for column in table.columns:
        expected = _described(column.type, bool(column.nullable), connection)
        there = found.get(column.name)
        actual = "none" if there is None else _described(there["type"], there["nullable"], connection)
        # SQLite keeps an INTEGER PRIMARY KEY not null whatever was declared.
        is_key = column.primary_key and connection.dialect.name == "sqlite"
        if is_key:
            expected, actual = expected.partition(" ")[0], actual.partition(" ")[0]
        if actual != expected:
            yield (
                f"Column {column.name!r} of {table.name!r}: expected {expected}, found {actual}. "
                f"Bring it back with ALTER TABLE (`{_COMMAND} sql` prints what is expected); is it "
                "another program's table, set outbox_table to another name."
            )


def _described(type_: TypeEngine[Any], nullable: bool, connection: Connection) -> str:
    text = type_.compile(dialect=connection.dialect).upper()
    # Neither the display width (MariaDB) nor a collation is a type of its own.
    text = re.sub(r" (CHARACTER SET|CHARSET|COLLATE) \S+", "", text)
    text = re.sub(r"\b(BIGINT|INTEGER|INT)\(\d+\)", r"\1", text)
    return text if nullable else f"{text} NOT NULL"


def _foreign_faults(table: Table, found: Mapping[str, Any]) -> Iterator[str]:
    for name, column in found.items():
        is_filled = (
            column["nullable"]
            or column.get("default") is not None
            or column.get("computed") is not None
            or column.get("identity") is not None
        )
        if name not in table.c and not is_filled:
            yield (
                f"Column {name!r} of {table.name!r}, which is your own: expected one that is nullable "
                "or has a default, since the outbox does not fill it, found NOT NULL without a "
                "default. Give it a default."
            )


def _indexes(
    database: Database, connection: Connection, inspector: Any, messages: Table
) -> tuple[list[Index], list[Index]]:
    # Names of indexes differ by case nowhere but on PostgreSQL, and there ours are in lower case.
    found = {
        str(index["name"]).lower(): index
        for index in inspector.get_indexes(messages.name, schema=messages.schema)
    }
    odd = {name.lower() for name in database.dialect.odd_indexes(connection, database.tables)}
    missing: list[Index] = []
    differing: list[Index] = []
    for index in sorted(messages.indexes, key=lambda index: str(index.name)):
        name = str(index.name).lower()
        there = found.get(name)
        if there is None:
            # An index that SQLAlchemy cannot describe is there all the same.
            (differing if name in odd else missing).append(index)
        elif (
            name in odd
            or there["unique"]
            or there["column_names"] != [column.name for column in index.columns]
        ):
            differing.append(index)
    return missing, differing
