"""Every statement that counts what waits, and says for how long; none reads more rows than its bound.

The claim's index leads to three ranges of each broker's rows: those that are due, those whose time is
still to come, and those that are finished. Each is read from its front until the bound, so that a
backlog of millions costs no more than one of ten thousand. A count that ends at the bound says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Row,
    Select,
    and_,
    case,
    func,
    literal_column,
    null,
    or_,
    select,
)
from sqlalchemy.engine import Connection

from .database import Database
from .desk import STATES, Desk
from .schema import FAR_FUTURE

__all__ = ["Age", "Count", "Failing", "Gauge", "Measured"]

#: How long a message that was given up tells of a destination that fails.
_LATELY = timedelta(hours=1)
#: Characters of an error that are read.
_ERROR = 500
#: Destinations of one broker whose errors are read.
_DESTINATIONS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """A number of rows; not exact: there are at least so many."""

    number: int
    is_exact: bool = True

    def __add__(self, other: Count) -> Count:
        return Count(number=self.number + other.number, is_exact=self.is_exact and other.is_exact)

    def __str__(self) -> str:
        return f"{self.number:,}{'' if self.is_exact else '+'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Age:
    """How long the oldest due message has been due; None: none is. Not exact: at least so long."""

    duration: timedelta | None = None
    is_exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """A queue that deliveries have failed for.

    Attributes:
        count: its messages with an error: those that wait, and those given up within the last hour.
        attempts: those of the newest of them.
        error: of the newest of them, shortened.
    """

    broker: str
    queue: str
    count: Count
    attempts: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One broker's messages: their number in each state, the age of the oldest, and what fails."""

    broker: str
    counts: Mapping[str, Count]
    age: Age
    failing: Sequence[Failing]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Range:
    """A part of one broker's rows: where it is, and the states that are counted there."""

    where: ColumnElement[bool]
    states: frozenset[str]
    is_backwards: bool = False


#: Each range with what was found in it.
_Ranges = Sequence[tuple[_Range, Sequence[Row[Any]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Front:
    """The rows with the lowest ids.

    Attributes:
        ages: of the oldest due message of each broker among them.
        rest: what no message behind them is older than; None: there are none.
    """

    ages: Mapping[str, timedelta]
    rest: timedelta | None

    def improve(self, broker: str, age: Age) -> Age:
        """Correct an age that is "at least" by what stands here."""
        known = [each for each in (age.duration, self.ages.get(broker)) if each is not None]
        oldest = max(known, default=None)
        is_exact = self.rest is None or (oldest is not None and oldest >= self.rest)
        return Age(duration=oldest, is_exact=is_exact)


class Gauge:
    """The message table of one database, as one measures it; it only reads.

    Args:
        bound: rows that one statement reads at most.
    """

    def __init__(self, database: Database, *, bound: int) -> None:
        self._tables = database.tables
        self._dialect = database.dialect
        self._desk = Desk(database)
        self._bound = bound

    def now(self, connection: Connection) -> datetime:
        """The database's clock."""
        # With the column's type, since what SQLite gives is text.
        now = self._dialect.now()
        return connection.execute(select(now.label("now"))).scalar_one()

    def measure(self, connection: Connection) -> Sequence[Measured]:
        """Every broker that has rows."""
        found = {broker: self._ranges(connection, broker) for broker in self._desk.brokers(connection)}
        ages = self._ages(connection, found)
        return [
            Measured(
                broker=broker,
                counts=self._counts(ranges),
                age=ages[broker],
                failing=self._failing(connection, broker, ranges),
            )
            for broker, ranges in found.items()
        ]

    def pending(self, connection: Connection, *, limit: int) -> int:
        """How many messages are still to be delivered, in whatever state; no more than ``limit``."""
        c, left = self._tables.messages.c, limit
        for broker in self._desk.brokers(connection):
            # Of the claim's index alone: no row is read.
            some: Select[Any] = select(literal_column("1").label("one")).where(
                c.broker == broker, c.scheduled_at < FAR_FUTURE
            )
            first = self._dialect.in_due_order(some, self._tables).limit(left).subquery()
            left -= connection.execute(select(func.count()).select_from(first)).scalar_one()
            if left <= 0:
                break
        return limit - left

    def _ranges(self, connection: Connection, broker: str) -> _Ranges:
        c, now = self._tables.messages.c, self._dialect.now()
        far, scheduled = FAR_FUTURE, c.scheduled_at
        ranges = [
            _Range(where=scheduled <= now, states=frozenset({"ready", "reserved"})),
            _Range(
                where=and_(scheduled > now, scheduled < far),
                states=frozenset({"delayed", "retrying"}),
            ),
            # Those that ended last are in front.
            _Range(
                where=scheduled >= far,
                states=frozenset({"failed", "delivered"}),
                is_backwards=True,
            ),
        ]
        return [(each, connection.execute(self._grouped(broker, each)).all()) for each in ranges]

    def _grouped(self, broker: str, part: _Range) -> Select[Any]:
        """The front of a range, counted by state, and by queue where there is an error."""
        c = self._tables.messages.c
        states = self._tables.states(self._dialect.now())
        rows = select(
            c.id,
            case(*((where, name) for name, where in states.items()), else_="?").label("state"),
            case((self._has_failed_lately(), c.queue), else_=null()).label("queue"),
            self._due_since().label("since"),
        ).where(c.broker == broker, part.where)
        rows = self._dialect.in_due_order(rows, self._tables)
        if part.is_backwards:
            rows = rows.order_by(None).order_by(c.scheduled_at.desc(), c.id.desc())
        front = rows.limit(self._bound).subquery()
        return select(
            front.c.state,
            front.c.queue,
            func.count().label("number"),
            func.max(front.c.id).label("newest"),
            self._ago(func.min(front.c.since)).label("age"),
        ).group_by(front.c.state, front.c.queue)

    def _ages(self, connection: Connection, found: Mapping[str, _Ranges]) -> Mapping[str, Age]:
        """Of each broker, from what was found; where that was cut, from the lowest ids, too."""
        ages = {
            broker: Age(
                duration=max(
                    (_seconds(row.age) for row in _all_rows(ranges) if row.age is not None),
                    default=None,
                ),
                is_exact=not any(
                    _is_cut(rows, self._bound) for part, rows in ranges if part.states & _WAITING
                ),
            )
            for broker, ranges in found.items()
        }
        # Mostly a few of them are enough.
        for bound in (self._bound // 10, self._bound):
            if bound and not all(age.is_exact for age in ages.values()):
                front = self._front(connection, bound)
                ages = {
                    broker: age if age.is_exact else front.improve(broker, age)
                    for broker, age in ages.items()
                }
        return ages

    def _front(self, connection: Connection, bound: int) -> _Front:
        """Rows of all brokers in the order of their ids: the oldest, whatever became of their attempts.

        In an outage every row waits for some next attempt, in an order that says nothing of its age.
        """
        c = self._tables.messages.c
        some = select(c.broker, c.created_at, self._due_since().label("since"))
        first = some.order_by(c.id).limit(bound).subquery()
        rows = connection.execute(
            select(
                first.c.broker,
                func.count().label("number"),
                self._ago(func.min(first.c.since)).label("age"),
                self._ago(func.max(first.c.created_at)).label("youngest"),
            ).group_by(first.c.broker)
        ).all()
        # Ids are handed out in the order in which rows are stored.
        is_all = sum(row.number for row in rows) < bound
        return _Front(
            ages={row.broker: _seconds(row.age) for row in rows if row.age is not None},
            rest=None if is_all else min(_seconds(row.youngest) for row in rows),
        )

    def _counts(self, ranges: _Ranges) -> Mapping[str, Count]:
        cut = {state for part, rows in ranges if _is_cut(rows, self._bound) for state in part.states}
        numbers = dict.fromkeys(STATES, 0)
        for row in _all_rows(ranges):
            if row.state in numbers:
                numbers[row.state] += row.number
        return {
            state: Count(number=number, is_exact=state not in cut) for state, number in numbers.items()
        }

    def _failing(
        self,
        connection: Connection,
        broker: str,
        ranges: _Ranges,
    ) -> Sequence[Failing]:
        """Queues with errors, those with most of them first."""
        is_cut = any(_is_cut(rows, self._bound) for _, rows in ranges)
        numbers: dict[str, int] = {}
        newest: dict[str, int] = {}
        for row in _all_rows(ranges):
            if row.queue is not None:
                numbers[row.queue] = numbers.get(row.queue, 0) + row.number
                newest[row.queue] = max(newest.get(row.queue, 0), row.newest)
        most = sorted(numbers, key=lambda queue: (-numbers[queue], queue))[:_DESTINATIONS]
        errors = self._errors(connection, [newest[queue] for queue in most])
        return [
            Failing(
                broker=broker,
                queue=queue,
                count=Count(number=numbers[queue], is_exact=not is_cut),
                attempts=errors[newest[queue]].attempts,
                error=errors[newest[queue]].error or "",
            )
            for queue in most
            if newest[queue] in errors  # delivered meanwhile
        ]

    def _errors(self, connection: Connection, ids: Sequence[int]) -> Mapping[int, Row[Any]]:
        if not ids:
            return {}
        c = self._tables.messages.c
        text = func.substr(c.error, 1, _ERROR).label("error")
        some: Select[Any] = select(c.id, c.attempts, text).where(c.id.in_(ids))
        return {row.id: row for row in connection.execute(some)}

    def _has_failed_lately(self) -> ColumnElement[bool]:
        c, now = self._tables.messages.c, self._dialect.now()
        since = self._dialect.shifted(now, self._dialect.seconds(-_LATELY))
        is_new = or_(c.finished_at.is_(None), c.finished_at > since)
        return and_(c.error.is_not(None), is_new)

    def _due_since(self) -> ColumnElement[datetime]:
        """Since when a message is due by its intended time; NULL when it is not, or is finished.

        ``scheduled_at`` would not say so: each failed attempt moves it.
        """
        c = self._tables.messages.c
        since = self._dialect.later(c.created_at, func.coalesce(c.deliver_at, c.created_at))
        return case((and_(self._tables.waits(), since <= self._dialect.now()), since), else_=null())

    def _ago(self, instant: ColumnElement[datetime]) -> ColumnElement[float]:
        return -self._dialect.seconds_until(instant)


_WAITING = frozenset({"ready", "delayed"})


def _all_rows(ranges: _Ranges) -> Iterator[Row[Any]]:
    for _, rows in ranges:
        yield from rows


def _is_cut(rows: Sequence[Row[Any]], bound: int) -> bool:
    return bool(sum(row.number for row in rows) >= bound)


def _seconds(number: Any) -> timedelta:
    # A clock may have been set back since a row was stored.
    return timedelta(seconds=max(0.0, float(number)))
