"""Every statement by which people look at messages and act on them.

No statement reads a claim token, and what a message carries is read for two purposes only: to warn
that it belongs to a chord, and to move its time. What changes a row names the states that the row may
be in, so that a relay that was faster wins, and a row that a relay has reserved is never touched. No
statement reads or locks more rows than one page: nobody has to wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Select,
    and_,
    case,
    delete,
    func,
    literal,
    null,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.engine import Connection

from .database import Database
from .schema import FAR_FUTURE

__all__ = [
    "EVERYTHING",
    "FINISHED_STATES",
    "FORGETTABLE_STATES",
    "MOVABLE_STATES",
    "STATES",
    "Contents",
    "Desk",
    "Filter",
    "Page",
    "StoredMessage",
]

#: The names of ``Tables.states``.
STATES = ("ready", "delayed", "retrying", "reserved", "failed", "delivered")
#: Those that nothing is delivered from any more.
FINISHED_STATES = frozenset({"failed", "delivered"})
#: Those that wait, with no relay at them: their time may be moved.
MOVABLE_STATES = ("ready", "delayed", "retrying")
#: Those that may be deleted before their delivery: no relay is at them.
FORGETTABLE_STATES = (*MOVABLE_STATES, "failed")

#: Longer bodies are not read to find out what a message belongs to.
CONTENTS_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which messages are meant; each attribute names alternatives, and nothing when all will do.

    Attributes:
        states: some of ``STATES``.
        tasks: names of tasks; with a ``*`` at its end, all names that begin so.
    """

    states: Sequence[str] = STATES
    tasks: Sequence[str] = ()
    brokers: Sequence[str] = ()
    queues: Sequence[str] = ()


EVERYTHING = Filter()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMessage:
    """A row as people may see it: neither what it carries nor who has reserved it.

    Attributes:
        database: the name of the one that it is in.
        id: of the row, not of the task.
        state: one of ``STATES``.
        base_delay: of its own retry policy; like the other two None where it has none.
        next_attempt_at: None once it has failed or was delivered.
        deliver_at: the intended time; None when no delay was asked for.
        reserved_until: the end of the lease of the relay that has it.
        finished_at: when it was given up, or delivered and kept.
        read_at: the database's clock when the row was read.
    """

    database: str
    id: int
    task_id: str
    task_name: str
    broker: str
    queue: str
    state: str
    attempts: int
    max_attempts: int | None
    base_delay: timedelta | None
    max_delay: timedelta | None
    next_attempt_at: datetime | None
    deliver_at: datetime | None
    expires_at: datetime | None
    reserved_until: datetime | None
    finished_at: datetime | None
    created_at: datetime
    error: str | None
    read_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a message carries, for nobody to see: its envelope as text; no body when that is long."""

    envelope: str
    body: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some rows on the way through a table.

    Attributes:
        ids: those of its rows that fit.
        end: the id to go on after; None when there are no more rows.
    """

    ids: Sequence[int]
    end: int | None


class Desk:
    """The message table of one database, as people work with it; it never commits."""

    def __init__(self, database: Database) -> None:
        self._name = database.name
        self._tables = database.tables
        self._dialect = database.dialect

    def messages(
        self, connection: Connection, *, limit: int, chosen: Filter = EVERYTHING
    ) -> Sequence[StoredMessage]:
        """Up to ``limit`` of these messages, those whose time comes first in front."""
        c = self._tables.messages.c
        found: list[Any] = []
        for broker in chosen.brokers or self.brokers(connection):
            # One broker after the other: only so the claim's index serves the order.
            some = self._select().where(c.broker == broker, self._is_chosen(chosen))
            found += connection.execute(self._in_order(some, chosen.states).limit(limit))
        found.sort(key=lambda row: (row.scheduled_at, row.id))
        return [self._stored(row) for row in found[:limit]]

    def find(self, connection: Connection, task_ids: Sequence[str]) -> Sequence[StoredMessage]:
        """Every message with one of these task ids, in the order of their rows."""
        t = self._tables.messages
        statement = self._select().where(t.c.task_id.in_(task_ids)).order_by(t.c.id)
        return [self._stored(row) for row in connection.execute(statement)]

    def contents(self, connection: Connection, ids: Sequence[int]) -> Mapping[int, Contents]:
        """What these rows carry, by their ids."""
        c = self._tables.messages.c
        body = case((func.length(c.body) <= CONTENTS_BYTES, c.body), else_=null()).label("body")
        found = connection.execute(select(c.id, c.message, body).where(c.id.in_(ids)))
        return {row.id: Contents(envelope=row.message, body=row.body) for row in found}

    def brokers(self, connection: Connection) -> Sequence[str]:
        """The brokers that any row is for."""
        # Each by the index, not by reading every row.
        name = self._tables.messages.c.broker
        found: list[str] = []
        first = connection.execute(select(func.min(name))).scalar()
        while first is not None:
            found.append(first)
            first = connection.execute(select(func.min(name)).where(name > first)).scalar()
        return found

    def attempted(
        self, connection: Connection, chosen: Filter = EVERYTHING, *, after: int, limit: int
    ) -> Page:
        """The next page of rows, and which of the chosen ones ``revive`` would take."""
        fits = and_(self._is_attempted(), self._is_chosen(chosen))
        return self._walk(connection, fits, after, limit)

    def forgettable(
        self, connection: Connection, chosen: Filter = EVERYTHING, *, after: int, limit: int
    ) -> Page:
        """The next page of rows, and which of the chosen ones ``forget`` would take."""
        fits = and_(self._is_in(FORGETTABLE_STATES), self._is_chosen(chosen))
        return self._walk(connection, fits, after, limit)

    def forget(self, connection: Connection, ids: Sequence[int]) -> int:
        """Delete messages before their delivery, neither reserved nor delivered ones; count them."""
        undelivered = delete(self._tables.messages).where(self._is_in(FORGETTABLE_STATES))
        return connection.execute(self._dialect.only(undelivered, self._tables, ids)).rowcount

    def reschedule(self, connection: Connection, id_: int, eta: datetime, envelope: str) -> bool:
        """Move a waiting message to ``eta``, with the envelope that says so; whether that was possible.

        Neither reserved nor finished ones are touched. The attempts and the error stay.
        """
        t = self._tables.messages
        intended = literal(eta, t.c.deliver_at.type)
        values = {
            "message": envelope,
            "deliver_at": intended,
            "scheduled_at": self._dialect.later(intended, self._dialect.clock()),
            "claim_token": null(),
            "lease_until": null(),
        }
        waiting = update(t).where(self._is_in(MOVABLE_STATES)).values(values)
        done = connection.execute(self._dialect.only(waiting, self._tables, [id_]))
        return bool(done.rowcount)

    def revive(self, connection: Connection, ids: Sequence[int]) -> int:
        """Make attempted messages due now, or at their intended time if that is later; count them.

        Neither reserved nor delivered ones are touched, nor those that no relay has tried yet. The
        attempts stay, the error goes.
        """
        t, clock = self._tables.messages, self._dialect.clock()
        intended = func.coalesce(t.c.deliver_at, clock)
        values = {
            "scheduled_at": self._dialect.later(intended, clock),
            "finished_at": null(),
            "error": null(),
            "claim_token": null(),
            "lease_until": null(),
        }
        attempted = update(t).where(self._is_attempted()).values(values)
        return connection.execute(self._dialect.only(attempted, self._tables, ids)).rowcount

    def finished(
        self,
        connection: Connection,
        broker: str,
        state: str,
        older_than: timedelta,
        *,
        after: int,
        limit: int,
    ) -> Page:
        """The next page of a broker's failed and delivered messages; which of them ``prune`` takes."""
        t = self._tables.messages
        fits = case((self._is_old(state, older_than), 1), else_=0).label("fits")
        some = select(t.c.id, fits).where(*self._is_out_of_the_way(broker), t.c.id > after)
        page = self._dialect.in_due_order(some, self._tables).limit(limit)
        return _page(connection.execute(page).all(), limit)

    def prune(
        self, connection: Connection, ids: Sequence[int], state: str, older_than: timedelta
    ) -> int:
        """Delete messages that have been in this state, failed or delivered, for longer; count them."""
        old = delete(self._tables.messages).where(self._is_old(state, older_than))
        return connection.execute(self._dialect.only(old, self._tables, ids)).rowcount

    def _select(self) -> Select[Any]:
        c, now = self._tables.messages.c, self._dialect.now()
        states = self._tables.states(now)
        state = case(*((where, name) for name, where in states.items()), else_="?")
        return select(
            *(c[name] for name in _COLUMNS),
            state.label("state"),
            now.label("read_at"),
        )

    def _walk(self, connection: Connection, fits: ColumnElement[bool], after: int, limit: int) -> Page:
        c = self._tables.messages.c
        marked = case((fits, 1), else_=0).label("fits")
        page = select(c.id, marked).where(c.id > after).order_by(c.id).limit(limit)
        return _page(connection.execute(page).all(), limit)

    def _is_chosen(self, chosen: Filter) -> ColumnElement[bool]:
        c = self._tables.messages.c
        where = [true() if set(STATES) <= set(chosen.states) else self._is_in(chosen.states)]
        if chosen.tasks:
            where.append(or_(*(_is_named(c.task_name, task) for task in chosen.tasks)))
        if chosen.brokers:
            where.append(c.broker.in_(chosen.brokers))
        if chosen.queues:
            where.append(c.queue.in_(chosen.queues))
        return and_(*where)

    def _is_in(self, states: Sequence[str]) -> ColumnElement[bool]:
        known = self._tables.states(self._dialect.now())
        return or_(*(known[state] for state in states))

    def _in_order(self, statement: Select[Any], states: Sequence[str]) -> Select[Any]:
        scheduled = self._tables.messages.c.scheduled_at
        if set(states) <= FINISHED_STATES:
            statement = statement.where(scheduled == FAR_FUTURE)
        return self._dialect.in_due_order(statement, self._tables)

    def _is_attempted(self) -> ColumnElement[bool]:
        states = self._tables.states(self._dialect.now())
        tried = self._tables.messages.c.attempts > 0
        return or_(states["failed"], states["retrying"], and_(states["ready"], tried))

    def _is_out_of_the_way(self, broker: str) -> Sequence[ColumnElement[bool]]:
        c = self._tables.messages.c
        return [c.broker == broker, c.scheduled_at == FAR_FUTURE]

    def _is_old(self, state: str, older_than: timedelta) -> ColumnElement[bool]:
        now = self._dialect.now()
        before = self._dialect.shifted(now, self._dialect.seconds(-older_than))
        return and_(self._tables.states(now)[state], self._tables.messages.c.finished_at < before)

    def _stored(self, row: Any) -> StoredMessage:
        is_waiting = row.state not in FINISHED_STATES | {"reserved"}
        return StoredMessage(
            database=self._name,
            id=row.id,
            task_id=row.task_id,
            task_name=row.task_name,
            broker=row.broker,
            queue=row.queue,
            state=row.state,
            attempts=row.attempts,
            max_attempts=row.max_attempts,
            base_delay=_delay(row.base_delay),
            max_delay=_delay(row.max_delay),
            next_attempt_at=row.scheduled_at if is_waiting else None,
            deliver_at=row.deliver_at,
            expires_at=row.expires_at,
            reserved_until=row.lease_until if row.state == "reserved" else None,
            finished_at=row.finished_at,
            created_at=row.created_at,
            error=row.error,
            read_at=row.read_at,
        )


_COLUMNS = (
    "id",
    "task_id",
    "task_name",
    "broker",
    "queue",
    "attempts",
    "max_attempts",
    "base_delay",
    "max_delay",
    "scheduled_at",
    "deliver_at",
    "expires_at",
    "lease_until",
    "finished_at",
    "created_at",
    "error",
)


def _delay(microseconds: int | None) -> timedelta | None:
    return None if microseconds is None else timedelta(microseconds=microseconds)


def _is_named(column: ColumnElement[str], name: str) -> ColumnElement[bool]:
    """Whether the names are alike; LIKE would not tell large letters from small ones on SQLite."""
    if not name.endswith("*"):
        return column == name
    beginning = name.removesuffix("*")
    return func.substr(column, 1, len(beginning)) == beginning


def _page(rows: Sequence[Any], limit: int) -> Page:
    ids = [row.id for row in rows if row.fits]
    return Page(ids=ids, end=rows[-1].id if len(rows) == limit else None)
