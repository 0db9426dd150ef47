"""The retry policy: a frozen value that settings, messages and the relay share."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

__all__ = ["RetryPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and how far apart a failed delivery is tried again.

    ``max_attempts`` None means endlessly. Delays double from ``base_delay`` up to ``max_delay``.
    """

    max_attempts: int | None = None
    base_delay: timedelta = timedelta(seconds=1)
    max_delay: timedelta = timedelta(seconds=600)
