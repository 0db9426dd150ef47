"""How a relay works."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from ..policy import RetryPolicy

__all__ = ["RelayOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOptions:
    """How a relay works.

    Attributes:
        batch: messages of one claim at most.
        concurrency: batches that are published at once, each over a connection of its own.
        sleep: the wait after finding nothing, or after a failure.
        lease: how long a claim holds.
        retry: the policy for messages that have none of their own.
        keep: keep delivered rows instead of deleting them.
        max_jobs: messages taken, failed ones too, after which it ends; zero: no limit.
        max_time: how long it works; None: for ever.
        max_memory: bytes of its resident set at which it ends; None: no limit.
        once: one pass of at most ``batch`` messages for each database, without waiting.
        stop_when_empty: end when no database has a ready message.
    """

    batch: int = 100
    concurrency: int = 1
    sleep: timedelta = timedelta(seconds=1)
    lease: timedelta
    retry: RetryPolicy
    keep: bool = False
    max_jobs: int = 0
    max_time: timedelta | None = None
    max_memory: int | None = None
    once: bool = False
    stop_when_empty: bool = False

    @property
    def is_finite(self) -> bool:
        """Whether it ends by itself when there is nothing left to do."""
        return self.once or self.stop_when_empty
