"""How long to wait before a failed delivery is tried again."""

from __future__ import annotations

import random
from datetime import timedelta

from ..policy import RetryPolicy

__all__ = ["next_delay"]

#: Beyond this the doubling has passed every sensible ``max_delay``; it keeps the power small.
_MAX_DOUBLINGS = 64


def next_delay(policy: RetryPolicy, attempts: int) -> timedelta | None:
    """The delay after ``attempts`` failed attempts, at least half of it random; None: give up.

    ``random(½, 1) × min(max_delay, base_delay × 2^(attempts−1))``.
    """
    if policy.max_attempts is not None and attempts >= policy.max_attempts:
        return None
    doublings = min(max(attempts - 1, 0), _MAX_DOUBLINGS)
    longest = policy.max_delay.total_seconds()
    full = min(longest, policy.base_delay.total_seconds() * 2.0**doublings)
    return timedelta(seconds=random.uniform(0.5, 1) * full)
