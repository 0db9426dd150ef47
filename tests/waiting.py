"""How a test waits: it asks again and again, until a deadline.

This is the only place that sleeps; everything else names the thing it waits for.
"""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    predicate: Callable[[], T],
    timeout: float = 10,
    message: str = "the awaited condition",
    interval: float = 0.02,
) -> T:
    """Return the predicate's first true value; fail after `timeout` seconds.

    The predicate is asked once more at the deadline, so a slow machine gets a fair last look.
    """
    deadline = _now() + timeout
    while True:
        is_last = _now() >= deadline
        if value := predicate():
            return value
        if is_last:
            raise AssertionError(f"{message}: not seen within {timeout:g} seconds")
        time.sleep(interval)


def _now() -> float:
    # freezegun stops time.monotonic(), not this clock: a frozen test must still time out.
    return time.clock_gettime(time.CLOCK_MONOTONIC)
