"""What an operator does with stored messages, in one database or several; nothing is printed here.

Large amounts go in small batches, each in a short transaction of its own, with a pause after it: the
application waits for none of them. What was done before an error or an interruption stays done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Protocol

from sqlalchemy.engine import Connection

from .errors import OutboxError
from .storage.database import Database
from .storage.desk import FINISHED_STATES, STATES, Desk, Page, StoredMessage
from .storage.inspection import require_current_version

__all__ = [
    "FINISHED_STATES",
    "STATES",
    "Listing",
    "Outcome",
    "Outcomes",
    "StoredMessage",
    "list_messages",
    "prune",
    "retry",
    "retry_all",
]

#: Rows changed by one transaction.
BATCH = 500
#: Rows looked at by one statement.
PAGE = 2000
#: Seconds between two batches at least: SQLite's writers look only now and then for their turn.
PAUSE = 0.01

#: Told after each batch how many rows it has changed.
Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Messages, those whose time comes first in front; ``has_more``: there are others behind them."""

    messages: Sequence[StoredMessage]
    has_more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one row that somebody wanted to act on, or of a task id that is not there.

    Attributes:
        database: where the row is.
        row_id: of the row.
        message: the row as it is now; None when it is gone.
        refusal: why nothing was done; None when it was.
    """

    task_id: str
    database: str | None = None
    row_id: int | None = None
    message: StoredMessage | None = None
    refusal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """What became of each row, in the order of the ids; and of databases that could not be used."""

    each: Sequence[Outcome]
    errors: Sequence[OutboxError] = field(default=())


def list_messages(database: Database, *, limit: int, states: Sequence[str] = STATES) -> Listing:
    """Show up to ``limit`` messages in these states. Raises SchemaError and DatabaseError."""
    desk = _desk(database)
    found = database.read(lambda connection: desk.messages(connection, limit=limit + 1, states=states))
    return Listing(messages=found[:limit], has_more=len(found) > limit)


def retry(databases: Sequence[Database], task_ids: Sequence[str]) -> Outcomes:
    """Make the messages with these ids due now, or at their intended time if that is later.

    Only those that a relay has tried and none has reserved. An id that is in several of the databases
    is refused. A database that cannot be used is an error beside what the others answered.
    """
    wanted = list(dict.fromkeys(task_ids))
    found: list[tuple[Database, Sequence[StoredMessage]]] = []
    errors: list[OutboxError] = []
    for database in databases:
        try:
            found.append((database, _find(database, wanted)))
        except OutboxError as error:
            errors.append(error)
    outcomes: list[Outcome] = []
    for task_id in wanted:
        rows = {
            database: _undelivered([each for each in messages if each.task_id == task_id])
            for database, messages in found
        }
        places = [database for database, ids in rows.items() if ids]
        if len(places) != 1:
            silent = [each for each in databases if each not in rows]
            refusal = _misplaced(places, silent)
            outcomes.append(Outcome(task_id=task_id, refusal=refusal))
            continue
        try:
            outcomes += _revive(places[0], task_id, rows[places[0]])
        except OutboxError as error:
            errors.append(error)
    return Outcomes(each=outcomes, errors=errors)


def retry_all(database: Database, *, progress: Progress) -> int:
    """Retry every message that ``retry`` would; how many there were.

    Raises SchemaError and DatabaseError.
    """
    desk = _desk(database)
    database.run(lambda connection: require_current_version(database, connection))
    return _sweep(
        database,
        partial(desk.attempted, limit=PAGE),
        desk.revive,
        progress,
    )


def prune(database: Database, *, state: str, older_than: timedelta, progress: Progress) -> int:
    """Delete messages that have been delivered (or failed) for longer than that; how many there were.

    Raises SchemaError and DatabaseError.
    """
    desk = _desk(database)
    database.run(lambda connection: require_current_version(database, connection))
    done = 0
    for broker in database.read(desk.brokers):
        done += _sweep(
            database,
            partial(desk.finished, broker=broker, state=state, older_than=older_than, limit=PAGE),
            partial(desk.prune, state=state, older_than=older_than),
            progress,
        )
    return done


def _desk(database: Database) -> Desk:
    return Desk(database.tables, database.dialect)


def _find(database: Database, task_ids: Sequence[str]) -> Sequence[StoredMessage]:
    def find(connection: Connection) -> Sequence[StoredMessage]:
        require_current_version(database, connection)
        return _desk(database).find(connection, task_ids)

    return database.run(find)


def _undelivered(messages: Sequence[StoredMessage]) -> Sequence[int]:
    """Row ids of one task; a delivered message stands back behind a later one with its id."""
    waiting = [each.id for each in messages if each.state != "delivered"]
    return waiting or [each.id for each in messages]


def _misplaced(places: Sequence[Database], silent: Sequence[Database]) -> str:
    if places:
        return f"it is in the databases {_names(places)}: choose one with --database"
    asked = f"; {_names(silent)} could not be asked" if silent else ""
    return f"there is no message with this id{asked}"


def _names(databases: Sequence[Database]) -> str:
    return ", ".join(repr(database.name) for database in databases)


def _revive(database: Database, task_id: str, ids: Sequence[int]) -> Sequence[Outcome]:
    desk = _desk(database)

    def revive(connection: Connection) -> tuple[set[int], Sequence[StoredMessage]]:
        done = {row_id for row_id in ids if desk.revive(connection, [row_id])}
        return done, desk.find(connection, [task_id])

    done, found = database.run(revive)
    now = {message.id: message for message in found}
    return [
        Outcome(
            task_id=task_id,
            database=database.name,
            row_id=row_id,
            message=now.get(row_id),
            refusal=None if row_id in done else _refusal(now.get(row_id)),
        )
        for row_id in ids
    ]


def _refusal(message: StoredMessage | None) -> str:
    if message is None:
        return "it has just been delivered"
    reasons = {
        "reserved": "a relay has reserved it",
        "delivered": "it has been delivered",
    }
    return reasons.get(message.state, "no relay has tried it yet")


class _Pages(Protocol):
    def __call__(self, connection: Connection, *, after: int) -> Page: ...


def _sweep(
    database: Database,
    page: _Pages,
    change: Callable[..., int],
    progress: Progress,
) -> int:
    """Change what fits of each page, batch by batch; how many rows were changed."""
    done = 0
    after: int | None = 0
    while after is not None:
        found = database.read(partial(page, after=after))
        for start in range(0, len(found.ids), BATCH):
            began = time.monotonic()
            changed = database.run(partial(change, ids=found.ids[start : start + BATCH]))
            done += changed
            progress(changed)
            time.sleep(max(PAUSE, time.monotonic() - began))
        after = found.end
    return done
