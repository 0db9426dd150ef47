"""What a relay tells of itself: each batch when it was settled, and at any time that it moves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Thread
from typing import Protocol

__all__ = ["Observer", "Pulse", "Settled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What became of one batch.

    Attributes:
        published: messages that the broker has taken.
        failed: deliveries that failed, given up or not.
        deferred: messages put back until their intended time.
        lease_lost: messages that another relay had taken over before the end could be written.
        seconds: from the claim until the end was written.
        waits: of each published message, the seconds from when it became ready until it was published.
    """

    database: str
    broker: str
    published: int
    failed: int
    deferred: int
    lease_lost: int
    seconds: float
    waits: Sequence[float]


class Observer(Protocol):
    """Who is told of each batch, in the relay's threads; the next batch waits for it."""

    def settled(self, batch: Settled) -> None:
        """A batch was settled. Must not raise."""


@dataclass(slots=True)
class Pulse:
    """How a relay moves: written by its threads, read by whoever asks. Times are monotonic seconds.

    Attributes:
        watched_at: when the main loop moved last; None: it does not go round.
        is_paused: whether it takes nothing for now.
        is_stopping: whether it takes nothing any more.
        threads: those that deliver.
        is_finite: its threads end when nothing is left to do.
        limits: by its thread, when each batch that is under way should have been settled.
        used: the databases that could be used when they were used last.
    """

    watched_at: float | None = None
    is_paused: bool = False
    is_stopping: bool = False
    is_finite: bool = False
    threads: Sequence[Thread] = ()
    limits: dict[int, float] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def watch(self, *, is_paused: bool) -> None:
        """The main loop has gone round once more."""
        self.is_paused = is_paused
        self.watched_at = time.monotonic()
