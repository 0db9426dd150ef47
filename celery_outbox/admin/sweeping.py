"""What is done to many messages: in small batches, with a pause after each.

Each batch is a short transaction of its own: the application waits for none of them. What was done
before an error or an interruption stays done.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Protocol

from sqlalchemy.engine import Connection

from ..storage.database import Database
from ..storage.desk import Desk, Filter, Page
from ..storage.inspection import require_current_version
from .chords import bond_of

__all__ = ["Doomed", "Progress", "doomed", "forget_all", "prune", "retry_all"]

#: Rows changed by one transaction.
BATCH = 500
#: Rows looked at by one statement.
PAGE = 2000
#: Rows of which one statement reads what they carry.
CONTENTS = 100
#: Seconds between two batches at least: SQLite's writers look only now and then for their turn.
PAUSE = 0.01

#: Told after each batch how many rows it has changed.
Progress = Callable[[int], object]
#: Changes rows; called with a connection and ``ids``.
_Change = Callable[..., int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Doomed:
    """Messages of one database that are to be forgotten, and have been counted for that.

    Attributes:
        ids: of their rows.
        bound: how many belong to a chord, or to a group that may be one's, which can then no longer
            finish.
    """

    ids: Sequence[int]
    bound: int


def retry_all(database: Database, chosen: Filter, *, progress: Progress) -> int:
    """Retry each of the chosen messages that ``retry`` would; how many there were.

    Raises SchemaError and DatabaseError.
    """
    desk = Desk(database)
    database.run(partial(require_current_version, database))
    return _sweep(database, partial(desk.attempted, chosen=chosen, limit=PAGE), desk.revive, progress)


def doomed(database: Database, chosen: Filter, *, progress: Progress) -> Doomed:
    """Find the chosen messages that ``forget`` would delete; nothing is deleted here.

    Raises SchemaError and DatabaseError.
    """
    desk = Desk(database)
    database.run(partial(require_current_version, database))
    # A million of them shall not take more than a few megabytes.
    ids, bound = array("q"), 0
    for found in _walk(database, partial(desk.forgettable, chosen=chosen, limit=PAGE)):
        ids.extend(found)
        progress(len(found))
        for some in _batches(found, CONTENTS):
            contents = database.read(partial(desk.contents, ids=some))
            bound += sum(bond_of(each) is not None for each in contents.values())
    return Doomed(ids=ids, bound=bound)


def forget_all(database: Database, messages: Doomed, *, progress: Progress) -> int:
    """Delete those that still wait, and that no relay has reserved; how many there were.

    Raises DatabaseError.
    """
    done = 0
    for ids in _batches(messages.ids, BATCH):
        done += _change(database, Desk(database).forget, ids, progress)
    return done


def prune(database: Database, *, state: str, older_than: timedelta, progress: Progress) -> int:
    """Delete messages that have been delivered (or failed) for longer than that; how many there were.

    Raises SchemaError and DatabaseError.
    """
    desk = Desk(database)
    database.run(partial(require_current_version, database))
    done = 0
    for broker in database.read(desk.brokers):
        done += _sweep(
            database,
            partial(desk.finished, broker=broker, state=state, older_than=older_than, limit=PAGE),
            partial(desk.prune, state=state, older_than=older_than),
            progress,
        )
    return done


class _Pages(Protocol):
    def __call__(self, connection: Connection, *, after: int) -> Page: ...


def _walk(database: Database, page: _Pages) -> Iterator[Sequence[int]]:
    """Those rows of each page that fit."""
    after: int | None = 0
    while after is not None:
        found = database.read(partial(page, after=after))
        yield found.ids
        after = found.end


def _batches(ids: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(ids), size):
        yield list(ids[start : start + size])


def _sweep(database: Database, page: _Pages, change: _Change, progress: Progress) -> int:
    """Change what fits of each page, batch by batch; how many rows were changed."""
    return sum(
        _change(database, change, ids, progress)
        for found in _walk(database, page)
        for ids in _batches(found, BATCH)
    )


def _change(database: Database, change: _Change, ids: Sequence[int], progress: Progress) -> int:
    """Change one batch, and pause as long as that took."""
    began = time.monotonic()
    changed = database.run(partial(change, ids=ids))
    progress(changed)
    time.sleep(max(PAUSE, time.monotonic() - began))
    return changed
