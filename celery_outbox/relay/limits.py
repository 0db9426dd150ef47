"""When a relay has done enough: messages taken, time, memory."""

from __future__ import annotations

import resource
import threading
from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["Budget", "memory_limit", "memory_used"]

#: Where Linux says how much memory this process's container may use: cgroups of version 2, and 1.
_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_MB = 1024 * 1024


class Budget:
    """How many messages may still be taken; safe for threads.

    Args:
        count: messages; zero: as many as there are.
    """

    def __init__(self, count: int) -> None:
        self._left: float = count or float("inf")
        self._asked_for = 0
        self._changed = threading.Condition()

    def take(self, wanted: int) -> int:
        """How many of ``wanted`` messages may be claimed now; ``claimed`` must follow.

        Waits as long as claims that are under way may leave some over.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._left or not self._asked_for)
            given = int(min(wanted, self._left))
            self._left -= given
            self._asked_for += given
            return given

    def claimed(self, given: int, count: int) -> None:
        """Of ``given`` messages so many were claimed, and count as taken."""
        with self._changed:
            self._asked_for -= given
            self._left += given - count
            self._changed.notify_all()

    def give_back(self, count: int) -> None:
        """Messages were not taken after all."""
        with self._changed:
            self._left += count
            self._changed.notify_all()

    @property
    def is_spent(self) -> bool:
        """Whether nothing more may be taken."""
        with self._changed:
            return self._left <= 0 and not self._asked_for


def memory_used() -> int:
    """Bytes of memory that this process holds (its resident set)."""
    return int(psutil.Process().memory_info().rss)


def memory_limit(amount: float, *, is_share: bool) -> int:
    """Bytes: ``amount`` is megabytes, or a percentage of what this process may use at most.

    That is the least of what its container, its own limit (``ulimit -v``) and the machine have.
    """
    if not is_share:
        return int(amount * _MB)
    limits = [int(psutil.virtual_memory().total)]
    for file in _CGROUPS:
        with suppress(OSError, ValueError):  # there is no such limit
            limits.append(int(Path(file).read_text()))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    return int(min(limits) * amount / 100)
