"""Rounds of turns, and the ratios that come out of them.

The two sides of a ratio take turns (A B A B …), so that whatever else the machine does falls on
both. A round holds many turns and counts by its median; a ratio is the median of its rounds'.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

Round = Mapping[str, float]


class Stopwatch:
    """Collects the seconds that named pieces of a turn take."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Time what stands in the block."""
        began = time.perf_counter()
        yield
        self._seconds.setdefault(name, []).append(time.perf_counter() - began)

    def time_in_any_order(self, pieces: Mapping[str, Callable[[], object]]) -> None:
        """Time each piece, in an order that changes: what came before weighs on what is timed."""
        for name in random.sample(list(pieces), len(pieces)):
            with self.time(name):
                pieces[name]()

    def medians(self) -> Round:
        """The median of each name, seconds."""
        return {name: statistics.median(seconds) for name, seconds in self._seconds.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured.

    Attributes:
        rounds: rounds of each benchmark.
        turns: turns of each round; benchmarks of long turns take fewer.
        group: tasks of the group.
        few: rows that wait in the small table of each database.
        waiting: rows that wait in PostgreSQL's large table; the other databases get a tenth.
        passing: messages that pass through a table while an old transaction is open.
    """

    rounds: int = 9
    turns: int = 60
    group: int = 1000
    few: int = 1000
    waiting: int = 1_000_000
    passing: int = 30_000

    def shorter(self, times: int) -> "Scale":
        """The same with fewer turns a round."""
        return replace(self, turns=max(1, self.turns // times))


FULL = Scale()
TINY = Scale(rounds=1, turns=1, group=20, few=200, waiting=4000, passing=1000)


def rounds(turn: Callable[[Stopwatch], None], scale: Scale) -> list[Round]:
    """Take the turns of all rounds, after a few that do not count."""
    for _ in range(min(scale.turns, 10)):
        turn(Stopwatch())
    measured = []
    for _ in range(scale.rounds):
        watch = Stopwatch()
        for _ in range(scale.turns):
            turn(watch)
        measured.append(watch.medians())
    return measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Two costs, one value of each for each round, seconds; `target` is what the ratio may be."""

    name: str
    ours: Sequence[float]
    theirs: Sequence[float]
    target: float | None = None

    @property
    def each(self) -> list[float]:
        """The ratio of each round."""
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    @property
    def value(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(self.each)

    @property
    def is_met(self) -> bool | None:
        """Whether the ratio keeps its target; None without one."""
        return None if self.target is None else self.value <= self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one benchmark found: ratios, and facts that are no ratio."""

    title: str
    ratios: Sequence[Ratio]
    notes: Sequence[str] = field(default_factory=list)
