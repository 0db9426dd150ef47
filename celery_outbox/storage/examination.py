"""Everything about one database that an operator may want to know, and what is wrong with it.

Each question is asked in a transaction of its own: one that this user may not ask, or that a broken
table cannot answer, leaves the others their answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from sqlalchemy import select
from sqlalchemy.engine import Connection

from ..errors import ConfigurationError, DatabaseError, OutboxError, SchemaError
from .database import Database
from .inspection import Inspection, inspect_tables
from .schema import SCHEMA_VERSION

__all__ = ["Examination", "examine"]

T = TypeVar("T")

#: Seconds; what a machine that keeps its time with NTP never reaches.
_CLOCK_TOLERANCE = 5
#: Seconds; a transaction that old keeps the rows of everything since from being cleaned up.
_OLD_TRANSACTION = 600


@dataclass(slots=True, kw_only=True)
class Examination:
    """What was found in one database.

    Attributes:
        facts: names and values, in the order in which they are shown.
        remarks: what could be better.
        faults: what is wrong, and what to do.
    """

    facts: list[tuple[str, str]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def examine(database: Database, *, concurrency: int = 1) -> Examination:
    """Ask everything; a database that cannot be reached is a fault, not an error.

    Args:
        database: the database.
        concurrency: threads that a relay shall have.
    """
    found = Examination()
    try:
        _read(database, lambda connection: _server(database, connection, found))
    except OutboxError as error:
        found.faults.append(str(error))
        return found
    _tables(database, found)
    _pool(database, concurrency, found)
    _oldest_transaction(database, found)
    return found


def _read(database: Database, work: Callable[[Connection], T]) -> T:
    return database.read(work, any_server=True)


def _server(database: Database, connection: Connection, found: Examination) -> None:
    dialect = database.dialect
    version = ".".join(map(str, dialect.server_version(connection)))
    found.facts.append(("server", f"{dialect.server_name(connection)} {version}"))
    try:
        dialect.check_server(connection)
    except ConfigurationError as error:
        found.faults.append(str(error))
    before = time.time()
    theirs = connection.execute(select(dialect.clock())).scalar_one()
    ahead = theirs.timestamp() - (before + time.time()) / 2
    facts = dialect.server_facts(connection)
    found.facts += facts.values.items()
    found.remarks += facts.remarks
    found.faults += facts.faults
    direction = "ahead of" if ahead >= 0 else "behind"
    found.facts.append(("clock", f"{abs(ahead):.2f} s {direction} this machine's"))
    if abs(ahead) > _CLOCK_TOLERANCE:
        found.remarks.append(
            f"the clocks of database and machine differ by {abs(ahead):.0f} s: an eta= or expires= "
            "given as a datetime is compared with the database's."
        )


def _tables(database: Database, found: Examination) -> None:
    name = database.tables.messages.fullname
    try:
        there = _read(database, lambda connection: inspect_tables(database, connection))
    except OutboxError as error:
        found.faults.append(str(error))
        return
    if len(there.missing) == len(database.tables.created):
        found.facts.append(("table", f"{name}: none"))
        found.faults.append(
            f"expected the table {name!r}, found none. Run `celery-outbox -A your_app schema install`."
        )
        return
    _describe(database, there, found)
    if not there.missing:
        _settings(database, found)
        _relays(database, found)


def _describe(database: Database, there: Inspection, found: Examination) -> None:
    messages = database.tables.created[0]
    version = "none" if there.version is None else str(there.version)
    found.facts.append(("table", f"{messages.fullname}, schema version {version}"))
    if there.faults:
        columns = f"{len(there.faults)} of {_count(database)} differ"
    else:
        columns = f"{_count(database)}, all as expected"
    own = f"; your own: {', '.join(there.own_columns)}" if there.own_columns else ""
    found.facts.append(("columns", columns + own))
    lacking = len(there.missing_indexes) + len(there.differing_indexes)
    found.facts.append(
        ("indexes", f"{len(messages.indexes) - lacking} of {len(messages.indexes)} as expected")
    )
    found.faults += there.all_faults()
    repairs = [
        *(f"the table {table.fullname} is missing" for table in there.missing),
        *(f"the index {index.name} is missing" for index in there.missing_indexes),
        *(f"the index {index.name} differs" for index in there.differing_indexes),
    ]
    if repairs:
        found.faults.append(f"{'; '.join(repairs)}. Run `celery-outbox -A your_app schema install`.")
    if there.version is None and not there.all_faults():
        found.remarks.append(
            f"nobody has written down that the table is of version {SCHEMA_VERSION}. "
            "`celery-outbox -A your_app schema install` does, and the first relay that begins."
        )


def _count(database: Database) -> int:
    return sum(len(table.columns) for table in database.tables.created)


def _settings(database: Database, found: Examination) -> None:
    missing = _read(
        database,
        lambda connection: database.dialect.missing_settings(connection, database.tables),
    )
    if missing:
        found.remarks.append(
            f"the table lacks settings that make claims faster: {', '.join(missing)}. "
            "`celery-outbox -A your_app schema install` sets them."
        )


def _relays(database: Database, found: Examination) -> None:
    try:
        relays = _read(database, database.state.relays)
    except OutboxError as error:
        found.faults.append(str(error))
        return
    running = [relay for relay in relays if relay.is_running]
    text = "; ".join(map(str, running)) or "none running"
    killed = len(relays) - len(running)
    found.facts.append(("relays", text + (f" ({killed} killed)" if killed else "")))


def _pool(database: Database, concurrency: int, found: Examination) -> None:
    limit = database.pool_limit
    wanted = f"for --concurrency {concurrency}"
    if limit is None:
        found.facts.append(("pool", f"any number of connections, {wanted}"))
        return
    found.facts.append(("pool", f"{limit} connections at most, {wanted}"))
    if limit < concurrency:
        found.faults.append(
            f"expected a pool of at least {concurrency} connections {wanted}, found {limit}. Give "
            f"pool_size={concurrency} to create_engine, or the relay fewer threads."
        )


def _oldest_transaction(database: Database, found: Examination) -> None:
    try:
        oldest = _read(database, database.dialect.oldest_transaction)
    except (DatabaseError, SchemaError) as error:
        found.facts.append(("oldest transaction", f"this user may not look ({error})"))
        return
    if oldest is None:
        return
    seconds = oldest.seconds
    text = "none open" if seconds is None else f"open for {seconds:.0f} s"
    if not oldest.is_complete:
        text += " (of this user's own; it may not look at others')"
    found.facts.append(("oldest transaction", text))
    if seconds is not None and seconds > _OLD_TRANSACTION:
        found.remarks.append(
            f"a transaction has been open for {seconds:.0f} s: as long as it is, dead rows pile up and "
            "claims become slower. Find it, and end it."
        )
