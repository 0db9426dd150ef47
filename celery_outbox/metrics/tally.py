"""What a relay has done since it began, in numbers that cost it next to nothing.

All of a message costs a fifth of a microsecond; a library's histogram alone four times as much.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from ..relay.observing import Observer, Settled
from .catalogue import BATCH, BATCH_BOUNDS, COUNTERS, WAIT, WAIT_BOUNDS

__all__ = ["Buckets", "Series", "Tally"]


@dataclass(slots=True)
class Buckets:
    """How many values lie up to each bound, and behind the last; and their sum."""

    bounds: Sequence[float]
    counts: list[int] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, values: Sequence[float]) -> None:
        """Count values; one below zero as zero."""
        bounds, counts = self.bounds, self.counts
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self.sum += sum(values) if min(values, default=0.0) >= 0 else sum(max(0.0, it) for it in values)


@dataclass(slots=True)
class Series:
    """The numbers of one broker's messages in one database."""

    counts: Counter[str] = field(default_factory=lambda: Counter({each.name: 0 for each in COUNTERS}))
    histograms: Mapping[str, Buckets] = field(
        default_factory=lambda: {BATCH.name: Buckets(BATCH_BOUNDS), WAIT.name: Buckets(WAIT_BOUNDS)}
    )


class Tally(Observer):
    """Counts batches; safe for threads.

    Args:
        databases: those whose numbers are there, and zero, from the beginning.
        brokers: likewise, in each of the databases.
    """

    def __init__(self, databases: Iterable[str], brokers: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._series = defaultdict[tuple[str, str], Series](Series)
        for each in databases:
            for broker in brokers:
                self._series[each, broker] = Series()

    def settled(self, batch: Settled) -> None:
        """Count one."""
        with self._lock:
            series = self._series[batch.database, batch.broker]
            for each in COUNTERS:
                series.counts[each.name] += getattr(batch, each.name)
            series.histograms[BATCH.name].add([batch.seconds])
            # What left before its time, as brokers hold it, has not waited.
            series.histograms[WAIT.name].add(batch.waits)

    @property
    def series(self) -> Mapping[tuple[str, str], Series]:
        """The numbers by database and broker, as they are now."""
        with self._lock:
            return deepcopy(self._series)
