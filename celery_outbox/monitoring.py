"""What waits in a database, and for how long: for the command, for exporters, for programs.

A look reads the front of each broker's messages and never more than its bound, so it costs the same
however much waits; what ends at the bound is said to be "at least". It writes nothing, takes no lock
and reads neither payloads nor claim tokens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import reduce
from operator import add

from sqlalchemy.engine import Connection

from .errors import DatabaseError, OutboxError
from .signals import outbox_busy
from .storage.database import Database
from .storage.desk import STATES
from .storage.dialects.counters import Counters, read_counters
from .storage.monitoring import Age, Count, Failing, Gauge, Measured
from .storage.state import RelayRow

__all__ = [
    "BOUND",
    "STATES",
    "UNDELIVERED",
    "Age",
    "Backlog",
    "BrokerBacklog",
    "Count",
    "Failing",
    "Looking",
    "Rates",
    "Thresholds",
    "announce",
    "look",
    "rates",
]

#: Rows that are counted of each broker's due, waiting and finished messages at most.
BOUND = 10_000
#: States of messages that are still to be delivered.
UNDELIVERED = ("ready", "delayed", "retrying", "reserved")


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """What makes a database busy: so many undelivered messages, or one that is due for so long."""

    pending: int | None = None
    age: timedelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerBacklog:
    """One broker's messages in one database.

    Attributes:
        is_known: whether anybody relays to it: the app that looks, or a relay that runs here.
        counts: by state, each of ``STATES``.
        age: of the oldest message whose intended time has come, whatever became of its attempts.
        failing: queues that deliveries have failed for, those with most messages first.
    """

    broker: str
    is_known: bool
    counts: Mapping[str, Count]
    age: Age
    failing: Sequence[Failing]

    @property
    def has_due(self) -> bool:
        """Whether a message could leave now, or should have."""
        return self.age.duration is not None or self.counts["ready"].number > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What one look at a database has found.

    Attributes:
        database: its name.
        read_at: the database's clock.
        took: how long the look took, connecting included.
        pending: messages still to be delivered; with a threshold it is exact, or reaches that.
        brokers: those that have rows here, and those that were asked for.
        relays: those that run, and those that were killed within the last hour.
        counters: what the database counts by itself.
        is_busy: whether a threshold was reached.
    """

    database: str
    read_at: datetime
    took: timedelta
    pending: Count
    brokers: Sequence[BrokerBacklog]
    relays: Sequence[RelayRow]
    counters: Counters = field(default_factory=Counters)
    is_busy: bool = False

    @property
    def counts(self) -> Mapping[str, Count]:
        """The messages of all brokers by state."""
        return {
            state: reduce(add, (each.counts[state] for each in self.brokers), Count(number=0))
            for state in STATES
        }

    @property
    def age(self) -> Age:
        """That of the oldest due message of all brokers."""
        return _oldest(self.brokers)

    @property
    def failing(self) -> Sequence[Failing]:
        """The failing queues of all brokers, those with most messages first."""
        found = [failing for each in self.brokers for failing in each.failing]
        return sorted(found, key=lambda it: (-it.count.number, it.broker, it.queue))

    @property
    def unknown(self) -> Sequence[BrokerBacklog]:
        """Brokers with due messages that nobody relays to."""
        return [each for each in self.brokers if each.has_due and not each.is_known]

    @property
    def running(self) -> Sequence[RelayRow]:
        """The relays that were seen lately."""
        return [relay for relay in self.relays if relay.is_running]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Messages a second between two looks; None where the table does not tell.

    Attributes:
        stored: ids handed out, also to transactions that were rolled back or are not committed yet.
        published: what was stored and waits no longer, forgotten messages included.
        failed: given up; not the attempts that are made again.
    """

    stored: float | None = None
    published: float | None = None
    failed: float | None = None


def look(
    database: Database,
    *,
    brokers: Collection[str] | None = None,
    thresholds: Thresholds | None = None,
    bound: int = BOUND,
) -> Backlog:
    """Look at what waits in a database.

    Args:
        brokers: those that the app relays to, such as ``outbox.brokers.names``: they are told of also
            when they have no rows, all others are unknown unless a running relay's app has their
            name. None: every broker counts as known.
        thresholds: when one is reached, the backlog is busy.
        bound: rows read of each part of a broker's messages.

    Raises SchemaError and DatabaseError.
    """
    limits, began = thresholds or Thresholds(), time.perf_counter()

    def read(connection: Connection) -> Backlog:
        gauge = Gauge(database, bound=bound)
        relays = database.state.relays(connection)
        found = _known(gauge.measure(connection), brokers, relays)
        pending = _pending(connection, gauge, found, limits.pending)
        return Backlog(
            database=database.name,
            pending=pending,
            brokers=found,
            relays=relays,
            counters=read_counters(connection, database.tables),
            read_at=gauge.now(connection),
            took=timedelta(seconds=time.perf_counter() - began),
            is_busy=_is_busy(pending, _oldest(found), limits),
        )

    return database.read(read)


def announce(backlog: Backlog) -> None:
    """Send ``outbox_busy`` for a database where a threshold was reached."""
    age = backlog.age.duration
    outbox_busy.send(
        sender=backlog.database,
        pending=backlog.pending.number,
        age=None if age is None else age.total_seconds(),
    )


def rates(before: Backlog, after: Backlog) -> Rates:
    """What moved between two looks at the same database, a second."""
    seconds = (after.read_at - before.read_at).total_seconds()
    if seconds <= 0:
        return Rates()
    stored = _grown(before.counters.last_id, after.counters.last_id)
    failed = _difference(before.counts["failed"], after.counts["failed"])
    waiting = _difference(_undelivered(before), _undelivered(after))
    if stored is None or waiting is None:
        # Where more waits than is counted, only the database itself knows what was deleted.
        published = _grown(before.counters.removed, after.counters.removed)
    else:
        published = max(0, stored - waiting - (failed or 0))
    return Rates(
        stored=_per_second(stored, seconds),
        published=_per_second(published, seconds),
        failed=_per_second(failed if failed is None else max(0, failed), seconds),
    )


class Looking:
    """Looks at one database, each time in a thread of its own: one that hangs holds up no other.

    Args:
        look: raises OutboxError.
        on_end: called in that thread after each look.
    """

    def __init__(
        self,
        database: Database,
        look: Callable[[Database], Backlog],
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.database = database
        self._look = look
        self._on_end = on_end
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self._is_running = False
        self._found: Backlog | OutboxError | None = None

    def begin(self) -> None:
        """Begin to look, unless the last look has not ended yet."""
        if self._is_running:
            return
        self._is_running, self._began = True, time.monotonic()
        if self.database.is_for_one_thread:
            self._run()
            return
        self._thread = threading.Thread(
            target=self._run, name=f"celery_outbox look {self.database.name}", daemon=True
        )
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether a look has begun and not ended."""
        return self._is_running

    @property
    def lasts(self) -> timedelta:
        """How long ago the last look began."""
        return timedelta(seconds=time.monotonic() - self._began)

    @property
    def found(self) -> Backlog | OutboxError | None:
        """What the last look that has ended has found."""
        return self._found

    def result(self, patience: timedelta) -> Backlog | OutboxError:
        """What was found, waited for until ``patience`` after the look began."""
        if self._thread is not None:
            left = (patience - self.lasts).total_seconds()
            self._thread.join(timeout=max(0.0, left))
        found = self._found
        if found is not None and not self._is_running:
            return found
        return self.silence

    @property
    def silence(self) -> DatabaseError:
        """Says that the look that has begun has not ended."""
        return DatabaseError(
            f"database {self.database.name!r}: expected an answer within "
            f"{self.lasts.total_seconds():.0f} s, got none. Is the server, or the way to it, stuck?"
        )

    def _run(self) -> None:
        try:
            self._found = self._look(self.database)
        except OutboxError as error:
            self._found = error
        self._is_running = False
        self._on_end()


def _known(
    measured: Sequence[Measured], brokers: Collection[str] | None, relays: Sequence[RelayRow]
) -> Sequence[BrokerBacklog]:
    elsewhere = {relay.about.get("app") for relay in relays if relay.is_running}
    nothing = {state: Count(number=0) for state in STATES}
    found = {each.broker: each for each in measured}
    idle = [
        Measured(broker=name, counts=nothing, age=Age(), failing=())
        for name in brokers or ()
        if name not in found
    ]
    return [
        BrokerBacklog(
            broker=each.broker,
            is_known=brokers is None or each.broker in brokers or each.broker in elsewhere,
            counts=each.counts,
            age=each.age,
            failing=each.failing,
        )
        for each in [*measured, *idle]
    ]


def _oldest(brokers: Sequence[BrokerBacklog]) -> Age:
    durations = [each.age.duration for each in brokers if each.age.duration is not None]
    return Age(
        duration=max(durations, default=None), is_exact=all(each.age.is_exact for each in brokers)
    )


def _pending(
    connection: Connection, gauge: Gauge, brokers: Sequence[BrokerBacklog], limit: int | None
) -> Count:
    counted = reduce(
        add, (each.counts[state] for each in brokers for state in UNDELIVERED), Count(number=0)
    )
    if counted.is_exact or limit is None:
        return counted
    number = gauge.pending(connection, limit=limit)
    return Count(number=number, is_exact=number < limit)


def _is_busy(pending: Count, age: Age, thresholds: Thresholds) -> bool:
    too_many = thresholds.pending is not None and pending.number >= thresholds.pending
    too_old = thresholds.age is not None and age.duration is not None and age.duration >= thresholds.age
    return too_many or too_old


def _undelivered(backlog: Backlog) -> Count:
    counts = backlog.counts
    return reduce(add, (counts[state] for state in UNDELIVERED))


def _difference(before: Count, after: Count) -> int | None:
    return after.number - before.number if before.is_exact and after.is_exact else None


def _grown(before: int | None, after: int | None) -> int | None:
    # A table that was made anew, or whose statistics were reset, counts from the beginning.
    return None if before is None or after is None or after < before else after - before


def _per_second(number: int | None, seconds: float) -> float | None:
    return None if number is None else number / seconds
