"""The numbers through OpenTelemetry's metrics API; whoever sets a MeterProvider says where they go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from opentelemetry.metrics import (
    CallbackOptions,
    Histogram,
    Meter,
    MeterProvider,
    Observation,
    get_meter_provider,
)

from ..relay.observing import Observer, Settled
from ..signals import outbox_stored
from .backlogs import Backlogs, Reading
from .catalogue import (
    BACKLOG,
    BATCH,
    BATCH_BOUNDS,
    COUNTERS,
    DATABASE_UP,
    OLDEST_AGE,
    STORED,
    WAIT,
    WAIT_BOUNDS,
    Metric,
)

__all__ = ["Telemetry", "configured_provider", "count_stored"]


def configured_provider() -> MeterProvider | None:
    """The MeterProvider that was set; None when there is none, and numbers would go nowhere."""
    provider = get_meter_provider()
    # Those of the API itself stand in for one that nobody has set.
    return None if type(provider).__module__.startswith("opentelemetry.metrics") else provider


def count_stored(meter_provider: MeterProvider | None = None) -> None:
    """Count what this process stores."""
    counter = _meter(meter_provider).create_counter(STORED.opentelemetry, STORED.ucum, STORED.about)

    def count(sender: str, task_ids: Sequence[str], **_: Any) -> None:
        counter.add(len(task_ids), {"database": sender})

    outbox_stored.connect(count, weak=False)


class Telemetry(Observer):
    """Counts batches, and has the backlogs read when they are asked for."""

    def __init__(self, meter_provider: MeterProvider, backlogs: Backlogs) -> None:
        meter = _meter(meter_provider)
        self._counters = [
            (each.name, meter.create_counter(each.opentelemetry, each.ucum, each.about))
            for each in COUNTERS
        ]
        self._batch = _histogram(meter, BATCH, BATCH_BOUNDS)
        self._wait = _histogram(meter, WAIT, WAIT_BOUNDS)
        for metric, values in (
            (BACKLOG, _counts),
            (OLDEST_AGE, _ages),
            (DATABASE_UP, _ups),
        ):
            meter.create_observable_gauge(
                metric.opentelemetry, [_asking(backlogs, values)], metric.ucum, metric.about
            )

    def settled(self, batch: Settled) -> None:
        """Count one. Each published message takes some microseconds."""
        labels = {"database": batch.database, "broker": batch.broker}
        for name, counter in self._counters:
            counter.add(getattr(batch, name), labels)
        self._batch.record(batch.seconds, labels)
        for wait in batch.waits:
            self._wait.record(max(0.0, wait), labels)


_Values = Callable[[Reading], Iterator[Observation]]


def _asking(backlogs: Backlogs, values: _Values) -> Callable[[CallbackOptions], list[Observation]]:
    def ask(_: CallbackOptions) -> list[Observation]:
        return [value for reading in backlogs.read() for value in values(reading)]

    return ask


def _counts(reading: Reading) -> Iterator[Observation]:
    for each in reading.backlog.brokers if reading.backlog else ():
        labels = {"database": reading.database, "broker": each.broker}
        for state, count in each.counts.items():
            yield Observation(count.number, {**labels, "state": state})


def _ages(reading: Reading) -> Iterator[Observation]:
    for each in reading.backlog.brokers if reading.backlog else ():
        age = each.age.duration
        labels = {"database": reading.database, "broker": each.broker}
        yield Observation(age.total_seconds() if age else 0.0, labels)


def _ups(reading: Reading) -> Iterator[Observation]:
    yield Observation(int(reading.backlog is not None), {"database": reading.database})


def _meter(provider: MeterProvider | None) -> Meter:
    return (provider or get_meter_provider()).get_meter("celery_outbox")


def _histogram(meter: Meter, metric: Metric, bounds: Sequence[float]) -> Histogram:
    given = (metric.opentelemetry, metric.ucum, metric.about)
    try:
        return meter.create_histogram(*given, explicit_bucket_boundaries_advisory=bounds)
    except TypeError:  # before opentelemetry-api 1.30; the view of whoever reads says the bounds
        return meter.create_histogram(*given)
