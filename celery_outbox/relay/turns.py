"""Whose turn it is: each database and broker in turn, those first that were served longest ago.

What failed rests; what was empty is asked again after ``--sleep``; what has a backlog may be served by
several threads at once. A database that does not answer holds up one thread, not all.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
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
    """

    def __init__(
        self,
        databases: Sequence[Database],
        brokers: Iterable[str],
        *,
        sleep: timedelta,
        is_finite: bool = False,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        brokers = list(brokers)
        self.all = [Turn(database=each, broker=broker) for each in databases for broker in brokers]
        self._sleep = sleep.total_seconds()
        self._is_finite = is_finite
        self._done = done
        self._is_open = self._is_paused = False
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
        """Hand out no more for now, or again."""
        with self._changed:
            self._is_paused = is_paused
            self._changed.notify_all()

    @property
    def is_open(self) -> bool:
        """Whether a claim may be made and a batch be begun."""
        return self._is_open and not self._is_paused

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do, for those that end then."""
        with self._changed:
            return self._is_finite and not any(each.active for each in self.all) and not self._left()

    def _left(self) -> list[Turn]:
        """Those at which there may be something to do, for a relay that ends; not what has failed."""
        now = time.monotonic()
        return [each for each in self.all if not each.is_dry and each._resting_until <= now]

    def take(self) -> Turn | None:
        """Wait for a turn; None when there will be no more."""
        with self._changed:
            while self._is_open:
                turn, rest = self._next()
                if turn is not None:
                    turn.active += 1
                    turn._is_woken = False
                    turn._served = next(self._counter)
                    return turn
                self._changed.wait(rest)
            return None

    def _next(self) -> tuple[Turn | None, float | None]:
        """The next turn, or how long there is none; None: until something changes."""
        if self._is_paused:
            return None, None
        now = time.monotonic()
        stuck = {
            each.database.name for each in self.all if now - min(each._asking, default=now) > STUCK
        }
        free = [
            each
            for each in (self._left() if self._is_finite else self.all)
            if each.database.name not in stuck and (not each.active or each.is_deep)
        ]
        ready = [each for each in free if each.not_before <= now]
        if ready:
            return min(ready, key=lambda each: each._served), None
        rests = [each.not_before - now for each in free]
        if stuck:
            rests.append(STUCK)
        return None, min(rests, default=None)

    @contextmanager
    def asking(self, turn: Turn) -> Iterator[None]:
        """While the turn's database is asked: when that takes long, no other thread is sent there."""
        began = time.monotonic()
        turn._asking.append(began)
        try:
            yield
        finally:
            turn._asking.remove(began)

    def note_depth(self, turn: Turn, *, is_deep: bool) -> None:
        """A claim has found as many as it asked for, or less."""
        if turn.is_deep != is_deep:
            with self._changed:
                turn.is_deep = is_deep
                self._changed.notify_all()

    def give_back(self, turn: Turn, *, has_progressed: bool) -> None:
        """A thread has done with a turn; what made no progress rests."""
        with self._changed:
            turn.active -= 1
            turn.is_dry = not has_progressed
            if has_progressed:
                # Meanwhile something may have come elsewhere.
                for each in self.all:
                    each.is_dry = False
            else:
                turn.is_deep = False
                owed = turn.horizon.owed
                rest = self._sleep if owed is None else min(self._sleep, owed.total_seconds())
                is_asked_again = turn._is_woken or self._is_finite
                turn._idle_until = 0.0 if is_asked_again else time.monotonic() + rest
            self._changed.notify_all()
        if self.is_done:
            self._done()

    def rest(
        self, *, database: str | None = None, broker: str | None = None, took: float = 0.0
    ) -> None:
        """Leave a database or a broker alone for about ``--sleep``, or as long as its failure took."""
        until = time.monotonic() + max(self._sleep, took) * random.uniform(0.75, 1.25)
        with self._changed:
            for each in self.all:
                if each.database.name == database or each.broker == broker:
                    each._resting_until = max(each._resting_until, until)
                    each.is_deep = False
            self._changed.notify_all()

    def wake(self, database: Database) -> None:
        """There is something new: do not wait for ``--sleep``; what failed rests all the same."""
        with self._changed:
            for each in self.all:
                if each.database is database:
                    each._idle_until, each._is_woken = 0.0, True
            self._changed.notify_all()
