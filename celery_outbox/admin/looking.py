"""What is there: listings, where the messages of a task are, and in which database to act on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sqlalchemy.engine import Connection

from ..errors import OutboxError
from ..storage.database import Database
from ..storage.desk import EVERYTHING, Desk, Filter, StoredMessage
from ..storage.inspection import require_current_version

__all__ = ["Listing", "Placed", "Plan", "Whereabouts", "find", "list_messages", "place"]

_Find = Callable[[Database], Sequence[StoredMessage]]
#: Called with a database before it is asked; raises OutboxError when it shall not be.
_Require = Callable[[Database], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Messages, those whose time comes first in front; ``has_more``: there are others behind them."""

    messages: Sequence[StoredMessage]
    has_more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """The messages of some tasks, in the order of the databases and of their rows.

    Attributes:
        errors: why a database could not be asked, by its name.
    """

    messages: Sequence[StoredMessage]
    errors: Mapping[str, OutboxError]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A task id, and its messages in the one database where they are to be acted on.

    Attributes:
        database: None when nothing can be done.
        refusal: why; None otherwise.
        found_in: the names of all databases that have the id.
    """

    task_id: str
    database: Database | None = None
    messages: Sequence[StoredMessage] = ()
    refusal: str | None = None
    found_in: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be acted on, in the order of the ids; and databases that could not be asked."""

    each: Sequence[Placed]
    errors: Sequence[OutboxError]


def list_messages(database: Database, *, limit: int, chosen: Filter = EVERYTHING) -> Listing:
    """Show up to ``limit`` of the chosen messages. Raises SchemaError and DatabaseError."""
    desk = Desk(database)
    found = database.read(lambda connection: desk.messages(connection, limit=limit + 1, chosen=chosen))
    return Listing(messages=found[:limit], has_more=len(found) > limit)


def find(
    databases: Sequence[Database], task_ids: Sequence[str], *, require: _Require = lambda _: None
) -> Whereabouts:
    """Find every message with one of these ids; a database that cannot be used hides no other."""

    def look(database: Database) -> Sequence[StoredMessage]:
        return database.read(partial(Desk(database).find, task_ids=task_ids))

    found, errors = _ask(databases, require, look)
    return Whereabouts(messages=[each for some in found.values() for each in some], errors=errors)


def place(
    databases: Sequence[Database], task_ids: Sequence[str], *, require: _Require = lambda _: None
) -> Plan:
    """Find out in which database to act on each of these ids: an id in several of them is refused.

    Several messages may have one id. Of those, delivered ones stand back behind the others.
    """
    wanted = list(dict.fromkeys(task_ids))

    def look(database: Database) -> Sequence[StoredMessage]:
        def work(connection: Connection) -> Sequence[StoredMessage]:
            require_current_version(database, connection)
            return Desk(database).find(connection, wanted)

        return database.run(work)

    found, errors = _ask(databases, require, look)
    silent = [database.name for database in databases if database.name in errors]
    each = [_placed(task_id, databases, found, silent) for task_id in wanted]
    return Plan(each=each, errors=list(errors.values()))


def _ask(
    databases: Sequence[Database], require: _Require, look: _Find
) -> tuple[dict[str, Sequence[StoredMessage]], dict[str, OutboxError]]:
    """What each database answers, by its name, and why others did not."""
    found: dict[str, Sequence[StoredMessage]] = {}
    errors: dict[str, OutboxError] = {}
    for database in databases:
        try:
            require(database)
            found[database.name] = look(database)
        except OutboxError as error:
            errors[database.name] = error
    return found, errors


def _placed(
    task_id: str,
    databases: Sequence[Database],
    found: Mapping[str, Sequence[StoredMessage]],
    silent: Sequence[str],
) -> Placed:
    rows = {
        name: _undelivered([each for each in messages if each.task_id == task_id])
        for name, messages in found.items()
    }
    places = [database for database in databases if rows.get(database.name)]
    names = [database.name for database in places]
    if len(places) == 1:
        messages = rows[names[0]]
        return Placed(task_id=task_id, database=places[0], messages=messages, found_in=names)
    if places:
        refusal = f"it is in the databases {_names(names)}: choose one with --database"
    else:
        asked = f"; {_names(silent)} could not be asked" if silent else ""
        refusal = f"there is no message with this id{asked}"
    return Placed(task_id=task_id, refusal=refusal, found_in=names)


def _undelivered(messages: Sequence[StoredMessage]) -> Sequence[StoredMessage]:
    return [each for each in messages if each.state != "delivered"] or messages


def _names(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
