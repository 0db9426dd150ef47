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
        publishing: messages that each side publishes to a broker.
        relaying: messages that a relay process moves.
    """

    rounds: int = 9
    turns: int = 60
    group: int = 1000
    few: int = 1000
    waiting: int = 1_000_000
    passing: int = 30_000
    publishing: int = 20_000
    relaying: int = 20_000

    def shorter(self, times: int) -> "Scale":
        """The same with fewer turns a round."""
        return replace(self, turns=max(1, self.turns // times))


FULL = Scale()
TINY = Scale(
    rounds=1, turns=1, group=20, few=200, waiting=4000, passing=1000, publishing=20, relaying=300
)


def rounds(turn: Callable[[Stopwatch], None], scale: Scale, warming: int = 10) -> list[Round]:
    """Take the turns of all rounds, after a few that do not count."""
    for _ in range(min(scale.turns, warming)):
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
    """Two costs, one value of each for each round, seconds.

    Attributes:
        target: what the ratio, ours to theirs, may be.
        times_faster: how many times theirs must be of ours; then that is the ratio.
    """

    name: str
    ours: Sequence[float]
    theirs: Sequence[float]
    target: float | None = None
    times_faster: float | None = None

    @property
    def each(self) -> list[float]:
        """The ratio of each round."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return [self._ratio(ours, theirs) for ours, theirs in pairs]

    def _ratio(self, ours: float, theirs: float) -> float:
        return ours / theirs if self.times_faster is None else theirs / ours

    @property
    def value(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(self.each)

    @property
    def is_met(self) -> bool | None:
        """Whether the ratio keeps its target; None without one."""
        if self.times_faster:
            return self.value >= self.times_faster
        return None if self.target is None else self.value <= self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one benchmark found: ratios, and facts that are no ratio."""

    title: str
    ratios: Sequence[Ratio]
    notes: Sequence[str] = field(default_factory=list)
