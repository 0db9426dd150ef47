"""Lines: messages that must leave one after the other, such as those of one SQS FIFO group.

When one of a line could not be delivered, those behind it are put back until its next attempt. Who
stands before whom is remembered here, for the rows' times alone do not tell: what is stored later falls
due earlier than what was put back. This holds for one relay that publishes one batch at a time; where
it publishes several, no two of them have messages of the same line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from ..message import ClaimedMessage
from ..publishing import Publisher

__all__ = ["Lines", "Parted"]

#: By which each message of a line waits longer than the one before, seconds: more than a clock's tick.
STEP = 0.002
#: By which the next one waits longer than the one that failed, whose time is written a little later.
SLACK = 0.1
#: The longest that one is put back, for the one before it may be delivered sooner than planned.
LONGEST = 60.0

_AT_ONCE = 100


@dataclass(slots=True)
class _Line:
    """Those who wait.

    Attributes:
        waiting: the ids of their rows, in order.
        last: monotonic time until which the last of them was put back.
    """

    waiting: dict[int, None] = field(default_factory=dict)
    last: float = 0.0

    def put_back(self, row: int, now: float) -> timedelta:
        """Have a row wait behind those before it; how long."""
        self.waiting[row] = None  # one that waits already keeps its place
        self.last = max(self.last, now) + STEP
        return timedelta(seconds=min(self.last - now, LONGEST))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted:
    """A batch, as its lines allow it to go.

    Attributes:
        messages: all, those in front that have waited longest.
        free: those that may go now, in order.
        names: the line of each message that stands in one, by its id.
    """

    messages: Sequence[ClaimedMessage]
    free: Sequence[ClaimedMessage]
    names: Mapping[int, str]


class Lines:
    """The lines of one broker's messages in one database; safe for threads.

    Each batch that was parted is settled, or lapses.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        #: The batch that is under way, of each line.
        self._busy: dict[str, Parted] = {}
        self._changed = threading.Condition()

    def part(
        self,
        publisher: Publisher,
        messages: Sequence[ClaimedMessage],
        undelivered: Callable[[Sequence[int]], Collection[int]],
    ) -> Parted:
        """Which messages may go now; ``undelivered`` says which of some rows are still to be sent.

        Waits as long as another batch with messages of the same lines is under way.
        """
        names = {each.id: name for each in messages if (name := publisher.line_of(each)) is not None}
        with self._changed:
            self._changed.wait_for(lambda: self._busy.keys().isdisjoint(names.values()))
            parted = self._part(messages, names, undelivered)
            self._busy.update(dict.fromkeys(names.values(), parted))
        return parted

    def _part(
        self,
        messages: Sequence[ClaimedMessage],
        names: Mapping[int, str],
        undelivered: Callable[[Sequence[int]], Collection[int]],
    ) -> Parted:
        lines = {name: self._lines[name] for name in set(names.values()) if name in self._lines}
        if not lines:
            return Parted(messages=messages, free=messages, names=names)
        here = {message.id for message in messages}
        places: dict[int, int] = {}
        held: set[int] = set()
        for name, line in lines.items():
            self._forget_gone(name, here, undelivered)
            is_held = False
            newcomers = [row for row, its in names.items() if its == name and row not in line.waiting]
            for place, row in enumerate([*line.waiting, *newcomers]):
                is_held = is_held or row not in here
                places[row] = place
                if is_held:
                    held.add(row)
        ordered = sorted(messages, key=lambda message: places.get(message.id, 0))
        free = [message for message in ordered if message.id not in held]
        return Parted(messages=ordered, free=free, names=names)

    def settle(
        self,
        parted: Parted,
        accepted: Container[int],
        failures: Mapping[int, timedelta | None],
        deferred: Container[int] = (),
    ) -> dict[int, timedelta]:
        """How long those wait that stand behind one which was not delivered, by their ids, in order.

        ``failures`` holds how long each failed one would wait by itself; None: it is given up. Those
        ``deferred`` take their place when their time comes.
        """
        with self._changed:
            behind = self._settle(parted, accepted, failures, deferred)
            self._end(parted)
        return behind

    def _settle(
        self,
        parted: Parted,
        accepted: Container[int],
        failures: Mapping[int, timedelta | None],
        deferred: Container[int],
    ) -> dict[int, timedelta]:
        behind: dict[int, timedelta] = {}
        now = time.monotonic()
        free = {message.id for message in parted.free}
        stuck: set[str] = set()
        for row, name in self._in_order(parted):
            line, delay = self._lines.setdefault(name, _Line()), failures.get(row)
            if row in accepted or row in deferred or (row in failures and delay is None):
                line.waiting.pop(row, None)
            elif name in stuck or row not in free:
                behind[row] = line.put_back(row, now)
            else:
                # Not sent: it is put back as it was, and the next batch may have been claimed already.
                line.waiting[row] = None
                if delay is not None:
                    stuck.add(name)
                    line.last = max(line.last, now + delay.total_seconds() + SLACK)
            self._forget(name, ())
        return behind

    def lapse(self, parted: Parted, accepted: Container[int]) -> None:
        """A batch could not be settled: what was not accepted comes again when its lease is over."""
        with self._changed:
            for row, name in self._in_order(parted):
                if row not in accepted:
                    self._lines.setdefault(name, _Line()).waiting[row] = None
            self._end(parted)

    def _end(self, parted: Parted) -> None:
        for name in parted.names.values():
            if self._busy.get(name) is parted:
                del self._busy[name]
        self._changed.notify_all()

    def _in_order(self, parted: Parted) -> Iterable[tuple[int, str]]:
        for message in parted.messages:
            if (name := parted.names.get(message.id)) is not None:
                yield message.id, name

    def _forget_gone(
        self,
        name: str,
        here: Container[int],
        undelivered: Callable[[Sequence[int]], Collection[int]],
    ) -> None:
        """Let those in front go that were delivered by another relay, given up or forgotten."""
        absent = [row for row in self._lines[name].waiting if row not in here]
        for start in range(0, len(absent), _AT_ONCE):
            asked = absent[start : start + _AT_ONCE]
            still = set(undelivered(asked))
            self._forget(name, set(asked) - still)
            if still:
                break

    def _forget(self, name: str, rows: Iterable[int]) -> None:
        """Some wait no longer; a line without anybody is none."""
        line = self._lines[name]
        for row in rows:
            line.waiting.pop(row, None)
        if not line.waiting:
            del self._lines[name]
