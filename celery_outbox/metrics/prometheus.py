"""The numbers as Prometheus reads them, through prometheus-client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from ..signals import outbox_stored
from .backlogs import Backlogs, Reading
from .catalogue import (
    BACKLOG,
    BATCH,
    COUNTERS,
    DATABASE_UP,
    OLDEST_AGE,
    STORED,
    WAIT,
    Metric,
)
from .tally import Buckets, Tally

__all__ = ["RelayCollector", "count_stored"]


def count_stored(registry: CollectorRegistry | None = None) -> None:
    """Count what this process stores; a registry that has the counter is left as it is."""
    registry = registry or REGISTRY
    try:
        # prometheus-client's own counter: with PROMETHEUS_MULTIPROC_DIR those of all processes add up.
        counter = Counter(STORED.prometheus, STORED.about, STORED.labels, registry=registry)
    except ValueError:  # the name is taken
        return

    def count(sender: str, task_ids: Sequence[str], **_: Any) -> None:
        counter.labels(sender).inc(len(task_ids))

    outbox_stored.connect(count, weak=False)


class RelayCollector(Collector):
    """What a relay shows."""

    def __init__(self, tally: Tally, backlogs: Backlogs) -> None:
        self._tally = tally
        self._backlogs = backlogs

    def describe(self) -> Iterable[Family]:
        """Nothing: else a registry would read the databases only to learn the names."""
        return []

    def collect(self) -> Iterator[Family]:
        """The numbers as they are now."""
        yield from self._counted()
        yield from _waiting(self._backlogs.read())

    def _counted(self) -> Iterator[Family]:
        all_series = self._tally.series.items()
        for metric in COUNTERS:
            counter = CounterMetricFamily(metric.prometheus, metric.about, labels=metric.labels)
            for labels, series in all_series:
                counter.add_metric(labels, series.counts[metric.name])
            yield counter
        for metric in (BATCH, WAIT):
            histogram = HistogramMetricFamily(metric.prometheus, metric.about, labels=metric.labels)
            for labels, series in all_series:
                buckets = series.histograms[metric.name]
                histogram.add_metric(labels, _cumulated(buckets), buckets.sum)
            yield histogram


def _cumulated(buckets: Buckets) -> list[tuple[str, float]]:
    bounds = [*map(str, buckets.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(buckets.counts)), strict=True))


def _waiting(readings: Sequence[Reading]) -> Iterator[Family]:
    backlog, age, up = _gauge(BACKLOG), _gauge(OLDEST_AGE), _gauge(DATABASE_UP)
    for reading in readings:
        name, found = reading.database, reading.backlog
        up.add_metric([name], found is not None)
        for each in found.brokers if found is not None else ():
            for state, count in each.counts.items():
                backlog.add_metric([name, each.broker, state], count.number)
            duration = each.age.duration
            age.add_metric([name, each.broker], duration.total_seconds() if duration else 0.0)
    yield from (backlog, age, up)


def _gauge(metric: Metric) -> GaugeMetricFamily:
    return GaugeMetricFamily(metric.prometheus, metric.about, labels=metric.labels)
