"""What is measured: the name, unit, labels and meaning of each number, for whoever shows them.

A label is the name of a database, of a broker or of a state: nothing that a task brings with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "BACKLOG",
    "BATCH",
    "BATCH_BOUNDS",
    "COUNTERS",
    "DATABASE_UP",
    "DEFERRED",
    "FAILED",
    "LEASE_LOST",
    "METRICS",
    "OLDEST_AGE",
    "PUBLISHED",
    "STORED",
    "WAIT",
    "WAIT_BOUNDS",
    "Metric",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number.

    Attributes:
        name: without prefix and unit.
        unit: messages, seconds, or none.
        about: what it says, as a sentence.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: Literal["messages", "seconds", ""]
    labels: tuple[str, ...] = ("database", "broker")
    about: str

    @property
    def prometheus(self) -> str:
        """Its name in Prometheus."""
        unit = "_seconds" if self.unit == "seconds" else ""
        return f"celery_outbox_{self.name}{unit}{'_total' if self.kind == 'counter' else ''}"

    @property
    def opentelemetry(self) -> str:
        """Its name in OpenTelemetry; a Prometheus that gets it there gives it the name above."""
        return f"celery_outbox.{self.name}"

    @property
    def ucum(self) -> str:
        """Its unit in OpenTelemetry."""
        return {"messages": "{message}", "seconds": "s", "": ""}[self.unit]


STORED = Metric(
    name="stored",
    kind="counter",
    unit="messages",
    labels=("database",),
    about="Messages that this process has written to a database; a rollback may have followed.",
)
PUBLISHED = Metric(
    name="published", kind="counter", unit="messages", about="Messages that a broker has taken."
)
FAILED = Metric(
    name="failed",
    kind="counter",
    unit="messages",
    about="Deliveries that failed, to be tried again or given up.",
)
DEFERRED = Metric(
    name="deferred",
    kind="counter",
    unit="messages",
    about="Messages that were put back until their intended time.",
)
LEASE_LOST = Metric(
    name="lease_lost",
    kind="counter",
    unit="messages",
    about="Messages that another relay had taken over before their end could be written.",
)
BATCH = Metric(
    name="batch",
    kind="histogram",
    unit="seconds",
    about="From the claim of a batch until its end was written.",
)
WAIT = Metric(
    name="wait",
    kind="histogram",
    unit="seconds",
    about="From when a published message was ready, by its intended time, until it was published.",
)
BACKLOG = Metric(
    name="backlog",
    kind="gauge",
    unit="messages",
    labels=("database", "broker", "state"),
    about="Messages in the table; where very many are, at least so many.",
)
OLDEST_AGE = Metric(
    name="oldest_age",
    kind="gauge",
    unit="seconds",
    about="How long the oldest message has been due by its intended time; 0: none is.",
)
DATABASE_UP = Metric(
    name="database_up",
    kind="gauge",
    unit="",
    labels=("database",),
    about="1: the backlog could be read; 0: the database, or its tables, could not be used.",
)

#: Those that are counted of each settled batch, by the attribute of that name.
COUNTERS = (PUBLISHED, FAILED, DEFERRED, LEASE_LOST)
METRICS = (STORED, *COUNTERS, BATCH, WAIT, BACKLOG, OLDEST_AGE, DATABASE_UP)

#: Upper bounds of the buckets, seconds.
BATCH_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
WAIT_BOUNDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    *(300.0, 900.0, 3600.0, 21600.0, 86400.0),
)
