"""Lines: messages that must leave one after the other, such as those of one SQS FIFO group.

When the first of a line could not be delivered, the others wait behind it until its next attempt. They
keep their order: each waits a little longer than the one before it. This holds for one relay that
works on one batch at a time.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from ..message import ClaimedMessage
from ..publishing import Publisher

__all__ = ["Lines", "Parted"]

#: By which each message of a line waits longer than the one before; longer than a clock's tick.
STEP = 0.002
#: By which the others wait longer than the first, seconds: its own time is written a little later.
SLACK = 1.0

_Line = tuple[str, str]


@dataclass(slots=True)
class _Held:
    """A line whose first message could not be delivered.

    Attributes:
        first: the identity of that message's row.
        until: monotonic time at which it has been offered again for certain, if it is still there.
        last: monotonic time until which the last one behind it was put back.
    """

    first: str
    until: float
    last: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted:
    """A batch, as its lines allow it to go.

    Attributes:
        messages: all, those in front for which others wait.
        free: those that may go now, in order.
        lines: the line of each message that stands in one, by its id.
    """

    messages: Sequence[ClaimedMessage]
    free: Sequence[ClaimedMessage]
    lines: Mapping[int, _Line]


class Lines:
    """The lines of all brokers, for one relay."""

    def __init__(self) -> None:
        self._held: dict[_Line, _Held] = {}

    def part(self, publisher: Publisher, messages: Sequence[ClaimedMessage]) -> Parted:
        """Which messages may go now."""
        lines = {
            message.id: (message.broker, line)
            for message in messages
            if (line := publisher.line_of(message)) is not None
        }
        if not self._held or not lines:
            return Parted(messages=messages, free=messages, lines=lines)
        here = {message.identity for message in messages}
        self._forget_gone(set(lines.values()), here)
        firsts = {held.first for held in self._held.values()}
        ordered = sorted(messages, key=lambda message: message.identity not in firsts)
        free = [each for each in ordered if not self._waits(lines.get(each.id), here)]
        return Parted(messages=ordered, free=free, lines=lines)

    def _forget_gone(self, lines: Iterable[_Line], here: Container[str]) -> None:
        """Let those go whose first is not there any more: it would have fallen due before them."""
        now = time.monotonic()
        for line in lines:
            held = self._held.get(line)
            if held is not None and held.first not in here and now >= held.until:
                del self._held[line]

    def _waits(self, line: _Line | None, here: Container[str]) -> bool:
        held = None if line is None else self._held.get(line)
        return held is not None and held.first not in here

    def settle(
        self, parted: Parted, accepted: Container[int], failures: Mapping[int, timedelta | None]
    ) -> dict[int, timedelta]:
        """How long those wait that stand behind one which was not delivered, by their ids.

        ``failures`` holds how long each failed one would wait by itself; None: it is given up.
        """
        behind: dict[int, timedelta] = {}
        now = time.monotonic()
        for message in parted.messages:
            line = parted.lines.get(message.id)
            if line is None:
                continue
            held = self._held.get(line)
            is_behind = held is not None and held.first != message.identity
            if message.id in accepted:
                if held is not None and not is_behind:
                    del self._held[line]
            elif held is not None and is_behind:
                held.last = max(held.last, now) + STEP
                behind[message.id] = timedelta(seconds=held.last - now)
            elif (delay := failures.get(message.id)) is not None:
                self._hold(line, message, now + delay.total_seconds())
            elif held is not None:
                del self._held[line]  # given up, or put back untried: nobody waits for it
        return behind

    def lapse(self, parted: Parted, accepted: Container[int], expires: float) -> None:
        """A batch could not be settled: what was not accepted is offered again after its lease."""
        for message in reversed(parted.messages):
            line = parted.lines.get(message.id)
            if line is not None and message.id not in accepted:
                self._hold(line, message, expires)

    def _hold(self, line: _Line, message: ClaimedMessage, until: float) -> None:
        until += SLACK
        self._held[line] = _Held(first=message.identity, until=until, last=until)
