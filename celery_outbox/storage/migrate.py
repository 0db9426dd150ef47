"""From an older version of the tables to this one: explicit, resumable, one process at a time.

PostgreSQL and SQLite do a whole migration in one transaction. MySQL and MariaDB commit each change
of a table at once: there every step that is done is written down, and a migration that was
interrupted goes on with the step it was in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Table, func, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.sql.elements import ColumnElement

from ..errors import SchemaError
from .database import Database
from .inspection import Inspection, inspect_tables, refusal
from .install import repair
from .schema import SCHEMA_VERSION
from .state import MigrationMark

__all__ = ["MIGRATIONS", "Migration", "Progress", "Step", "migrate", "rewrite"]

#: Told of every step: its name, how much of it is done, and how much there is to do.
Progress = Callable[[str, int, int], None]

_BATCH = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One change of the tables.

    ``run`` must come out right when it is run again over its own work, whole or half: on MySQL and
    MariaDB it may be interrupted between a change and the note that the change was made.
    """

    name: str
    run: Callable[[Database, Connection, Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """The steps from version ``source`` to the next; missing indexes are created after the last one."""

    source: int
    steps: Sequence[Step]


#: One for each version that was ever released before this one.
MIGRATIONS: Sequence[Migration] = ()


def migrate(
    database: Database,
    *,
    force: bool = False,
    progress: Progress = lambda step, done, total: None,
    migrations: Sequence[Migration] | None = None,
) -> list[str]:
    """Bring the tables to this version; return what was done, in words.

    Missing tables are installed; on current ones nothing is changed.

    Args:
        database: the database.
        force: also while relays run.
        progress: called as each step begins, goes on and ends.
        migrations: instead of the package's own.

    Raises SchemaError when the tables are newer than this version, when there is no way from theirs,
    or when a relay runs; DatabaseError.
    """
    ways = MIGRATIONS if migrations is None else migrations
    return database.run(lambda connection: _migrate(database, connection, ways, progress, force))


def rewrite(
    database: Database,
    connection: Connection,
    progress: Progress,
    *,
    step: str,
    table: Table,
    values: Mapping[str, Any],
    where: ColumnElement[bool],
    batch: int = _BATCH,
) -> None:
    """Write ``values`` into the rows of ``where``, a thousand at a time, by their ``id``.

    On MySQL and MariaDB each thousand is committed.
    """
    done, after = 0, 0
    total = connection.execute(select(func.count()).select_from(table).where(where)).scalar() or 0
    progress(step, done, total)
    while True:
        ids = connection.execute(
            select(table.c.id).where(where, table.c.id > after).order_by(table.c.id).limit(batch)
        ).scalars()
        chosen = list(ids)
        if not chosen:
            return
        connection.execute(update(table).where(table.c.id.in_(chosen)).values(values))
        database.dialect.checkpoint(connection)
        done, after = done + len(chosen), chosen[-1]
        progress(step, done, max(done, total))


def _migrate(
    database: Database,
    connection: Connection,
    migrations: Sequence[Migration],
    progress: Progress,
    force: bool,
) -> list[str]:
    with database.dialect.lock_schema(connection, database.tables.messages.fullname):
        found = inspect_tables(database, connection)
        if found.migration is None:
            if found.missing or found.version is None:
                return ["installed the table", *repair(database, connection)]
            if found.version == SCHEMA_VERSION:
                return []
        mark = _begun(database, found)
        way = _way(database, mark.source, migrations)
        if not force:
            _refuse_relays(database, connection)
        _take_steps(database, connection, way, mark, progress)
        # What the steps have left to do is what install does; it must find the columns right.
        after = inspect_tables(database, connection)
        if after.faults:
            raise refusal(database, after.faults)
        database.state.set_version(connection, SCHEMA_VERSION)
        repair(database, connection)
        return [f"migrated the table from version {mark.source} to {SCHEMA_VERSION}"]


def _begun(database: Database, found: Inspection) -> MigrationMark:
    if found.migration is not None and found.migration.target <= SCHEMA_VERSION:
        # What an earlier version of this package had done of it is done.
        return replace(found.migration, target=SCHEMA_VERSION)
    if found.version is None or found.version > SCHEMA_VERSION or found.migration is not None:
        raise refusal(database, [found.version_fault() or ""])
    return MigrationMark(source=found.version, target=SCHEMA_VERSION)


def _way(database: Database, source: int, migrations: Sequence[Migration]) -> Sequence[Migration]:
    known = {migration.source: migration for migration in migrations}
    versions = range(source, SCHEMA_VERSION)
    if not set(versions) <= set(known):
        fault = (
            f"expected a version from which there is a way to {SCHEMA_VERSION}, found {source}, which "
            "this celery-outbox does not know. Migrate with a version between the two first."
        )
        raise refusal(database, [fault])
    return [known[version] for version in versions]


def _refuse_relays(database: Database, connection: Connection) -> None:
    running = [relay for relay in database.state.relays(connection) if relay.is_running]
    if running:
        raise SchemaError(
            f"database {database.name!r}: expected no running relay, found {len(running)}: "
            f"{'; '.join(map(str, running))}. Stop them and run this again (a killed one counts for "
            "a minute), or add --force."
        )


def _take_steps(
    database: Database,
    connection: Connection,
    way: Sequence[Migration],
    mark: MigrationMark,
    progress: Progress,
) -> None:
    database.state.mark(connection, mark)
    database.dialect.checkpoint(connection)
    for migration in way:
        for step in migration.steps:
            name = f"{migration.source}: {step.name}"
            if name in mark.done:
                continue
            progress(step.name, 0, 1)
            step.run(database, connection, progress)
            progress(step.name, 1, 1)
            mark = replace(mark, done=[*mark.done, name])
            database.state.mark(connection, mark)
            database.dialect.checkpoint(connection)
