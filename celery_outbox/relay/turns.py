"""Whose turn it is: each database and broker in turn, those first that were served longest ago.

What failed rests; what was empty is asked again after ``--sleep``; what has a backlog may be served by
several threads at once, but never by all where there are others: whatever hangs, one is left for them.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

from ..storage.database import Database
from .horizon import Horizon
from .lines import Lines

__all__ = ["PROBE", "Turn", "Turns"]

#: Messages of one claim, while it is not known whether the broker takes any.
PROBE = 10
#: A wait has its limits, and is begun anew; seconds.
_LONGEST = 3600.0
#: A database whose claim takes longer, seconds, gets no other thread meanwhile.
STUCK = 2.0


@dataclass(slots=True, eq=False)
class Turn:
    """One broker of one database.

    Attributes:
        horizon: where claims look from.
        lines: its messages that must keep an order.
        claiming: held while a claim is made: batches are published in the order of their claims.
        is_deep: the last claim found as many as it asked for.
        is_dry: nothing could be done here when it was looked at last.
        limit: messages of a claim at most; None: as many as the options say.
        active: threads that work on it.
    """

    database: Database
    broker: str
    horizon: Horizon = field(default_factory=Horizon)
    lines: Lines = field(default_factory=Lines)
    claiming: threading.Lock = field(default_factory=threading.Lock)
    is_deep: bool = False
    is_dry: bool = False
    limit: int | None = None
    active: int = 0
    _served: int = 0
    _idle_until: float = 0.0
    _resting_until: float = 0.0
    _is_woken: bool = False
    _asking: list[float] = field(default_factory=list)

    @property
    def not_before(self) -> float:
        """The monotonic time at which it may be served again."""
        return max(self._idle_until, self._resting_until)


class Turns:
    """Hands out turns to threads.

    Args:
        databases: each is served with each broker.
        sleep: the rest of what was empty.
        is_finite: end when nothing is left to do, instead of waiting for more.
        done: called when that is so.
        threads: how many take turns; None: nobody knows, and all may be at the same place.
    """

    def __init__(
        self,
        databases: Sequence[Database],
        brokers: Iterable[str],
        *,
        sleep: timedelta,
        is_finite: bool = False,
        done: Callable[[], None] = lambda: None,
        threads: int | None = None,
    ) -> None:
        brokers = list(brokers)
        self.all = [Turn(database=each, broker=broker) for each in databases for broker in brokers]
        self._sleep = sleep.total_seconds()
        self._is_finite = is_finite
        self._done = done
        self._is_open = self._is_paused = self._has_ended = False
        many = float("inf") if threads is None else threads
        # One is spared for other databases, and of the rest one for other brokers.
        self._at_database = self._at_broker = float("inf")
        if len(databases) > 1:
            self._at_database = many = max(1, many - 1)
        if len(brokers) > 1:
            self._at_broker = max(1, many - 1)
        self._brokers_rest: dict[str, float] = {}
        #: Databases that did not answer when they were asked last.
        self._away: set[str] = set()
        self._counter = itertools.count(1)
        self._changed = threading.Condition()

    def open(self) -> None:
        """Begin to hand out."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def close(self) -> None:
        """Hand out no more."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def pause(self, *, is_paused: bool) -> None:
        """Hand out no more for now, or again; what was put back meanwhile is asked for at once."""
        with self._changed:
            if self._is_paused and not is_paused:
                self._wake(self.all)
            self._is_paused = is_paused
            self._changed.notify_all()

    @property
    def is_open(self) -> bool:
        """Whether a claim may be made and a batch be begun."""
        return self._is_open and not self._is_paused

    def is_resting(self, broker: str) -> bool:
        """Whether a broker has failed a moment ago, and is not to be contacted again yet."""
        return self._brokers_rest.get(broker, 0.0) > time.monotonic()

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do, for those that end then; once it is so, it stays so."""
        with self._changed:
            if self._is_finite and not self._is_paused and not any(each.active for each in self.all):
                # What failed may have rested long enough before anybody asks again.
                self._has_ended = self._has_ended or not self._left()
            return self._has_ended

    def _left(self) -> list[Turn]:
        """Those at which there may be something to do, for a relay that ends; not what has failed."""
        now = time.monotonic()
        return [each for each in self.all if not each.is_dry and each._resting_until <= now]

    def take(self) -> Turn | None:
        """Wait for a turn; None when there will be no more."""
        with self._changed:
            while self._is_open and not self._has_ended:
                turn, rest = self._next()
                if turn is not None:
                    turn.active += 1
                    turn._is_woken = False
                    turn._served = next(self._counter)
                    return turn
                self._changed.wait(None if rest is None else min(rest, _LONGEST))
            return None

    def _next(self) -> tuple[Turn | None, float | None]:
        """The next turn, or how long there is none; None: until something changes."""
        if self._is_paused:
            return None, None
        now = time.monotonic()
        stuck = {
            each.database.name for each in self.all if now - min(each._asking, default=now) > STUCK
        }
        free = [each for each in self._served_with_one_more() if each.database.name not in stuck]
        ready = [each for each in free if each.not_before <= now]
        if ready:
            return min(ready, key=lambda each: each._served), None
        rests = [each.not_before - now for each in free]
        if stuck:
            rests.append(STUCK)
        return None, min(rests, default=None)

    def _served_with_one_more(self) -> Iterator[Turn]:
        """Those that another thread may be sent to, with what is known of their brokers."""
        active = [each for each in self.all if each.active]
        probed = {each.broker for each in active if each.limit is not None}
        databases, brokers = Counter[str](), Counter[str]()
        for each in active:
            databases[each.database.name] += each.active
            brokers[each.broker] += each.active
        for each in self._left() if self._is_finite else self.all:
            if (
                (not each.active or each.is_deep)
                and (each.limit is None or each.broker not in probed)
                and (each.database.name not in self._away or not databases[each.database.name])
                and databases[each.database.name] < self._at_database
                and brokers[each.broker] < self._at_broker
            ):
                yield each

    @contextmanager
    def asking(self, turn: Turn) -> Iterator[None]:
        """While the turn's database is asked: when that takes long, no other thread is sent there."""
        began = time.monotonic()
        turn._asking.append(began)
        try:
            yield
        finally:
            turn._asking.remove(began)
            if time.monotonic() - began > STUCK:
                with self._changed:
                    self._changed.notify_all()

    def note_depth(self, turn: Turn, *, is_deep: bool) -> None:
        """A claim has found as many as it asked for, or less."""
        if turn.is_deep != is_deep or turn.database.name in self._away:
            with self._changed:
                turn.is_deep = is_deep
                self._away.discard(turn.database.name)
                self._changed.notify_all()

    def may_go_on(self, turn: Turn) -> bool:
        """Whether a thread may serve a turn again at once: there is more, and no other one waits."""
        if not self.is_open or not turn.is_deep:
            return False
        now = time.monotonic()
        others = [each for each in self.all if each is not turn and not each.active]
        if self._is_finite:
            others = [each for each in others if not each.is_dry]
        return all(each.not_before > now for each in others)

    def give_back(self, turn: Turn, *, has_progressed: bool) -> None:
        """A thread has done with a turn; what made no progress rests."""
        with self._changed:
            turn.active -= 1
            if turn._resting_until <= time.monotonic():  # nothing has failed
                self._away.discard(turn.database.name)
            is_asked_again = turn._is_woken
            turn.is_dry = not has_progressed and not is_asked_again
            if has_progressed:
                # Meanwhile something may have come elsewhere.
                for each in self.all:
                    each.is_dry = False
            else:
                turn.is_deep = False
                owed = turn.horizon.owed
                rest = self._sleep if owed is None else min(self._sleep, owed.total_seconds())
                if not is_asked_again and not self._is_finite:
                    turn._idle_until = time.monotonic() + rest
            self._changed.notify_all()
        if self.is_done:
            self._done()

    def rest(
        self, *, database: str | None = None, broker: str | None = None, took: float = 0.0
    ) -> None:
        """Leave a database or a broker alone for about ``--sleep``, or as long as its failure took.

        A broker is probed then: one small batch at a time, until it takes any; a database is asked by
        one thread, until it answers.
        """
        until = time.monotonic() + max(self._sleep, took) * random.uniform(0.75, 1.25)
        with self._changed:
            if broker is not None:
                self._brokers_rest[broker] = until
            if database is not None:
                self._away.add(database)
            for each in self.all:
                if each.database.name == database or each.broker == broker:
                    each._resting_until = max(each._resting_until, until)
                    each.is_deep = False
                if each.broker == broker:
                    each.limit = PROBE
            self._changed.notify_all()

    def wake(self, database: Database) -> None:
        """There is something new: do not wait for ``--sleep``; what failed rests all the same."""
        with self._changed:
            self._wake(each for each in self.all if each.database is database)
            self._changed.notify_all()

    def _wake(self, turns: Iterable[Turn]) -> None:
        for each in turns:
            each._idle_until, each._is_woken, each.is_dry = 0.0, True, False
