"""The retry policy: a frozen value that settings, messages and the relay share."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

__all__ = ["LONGEST_DELAY", "MOST_ATTEMPTS", "RetryPolicy"]

#: Far inside what each database's times can hold.
LONGEST_DELAY = timedelta(days=3650)
#: What a 64-bit column holds.
MOST_ATTEMPTS = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and how far apart a failed delivery is tried again.

    ``max_attempts`` None means endlessly. Delays double from ``base_delay`` up to ``max_delay``.
    """

    max_attempts: int | None = None
    base_delay: timedelta = timedelta(seconds=1)
    max_delay: timedelta = timedelta(seconds=600)

    @property
    def is_sound(self) -> bool:
        """Whether a message can be delivered by it."""
        attempts = 1 if self.max_attempts is None else self.max_attempts
        return (
            1 <= attempts <= MOST_ATTEMPTS
            and timedelta(0) < self.base_delay <= self.max_delay <= LONGEST_DELAY
        )
