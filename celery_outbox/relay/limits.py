"""When a relay has done enough: messages taken, time, memory."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import psutil

__all__ = ["Budget", "memory_limit", "memory_used"]

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


def memory_limit(amount: float, *, is_share: bool, root: Path = Path("/")) -> int:
    """Bytes: ``amount`` is megabytes, or a percentage of what this process may use at most.

    That is the least of what its control groups (of a container or a service), its own limit
    (``ulimit -v``) and the machine have. ``root`` is where Linux tells of the groups.
    """
    if not is_share:
        return int(amount * _MB)
    limits = [int(psutil.virtual_memory().total)]
    for file in _cgroup_files(root):
        with suppress(OSError, ValueError):  # there is no such limit
            limits.append(int(file.read_text()))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    return int(min(limits) * amount / 100)


def _cgroup_files(root: Path) -> Iterator[Path]:
    """Where the limits of this process's group and of those around it are; cgroups(7)."""
    mounted = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            top, name = mounted, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = mounted / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be that on its host: then only the top is there.
        group = PurePosixPath(path.lstrip("/"))
        for each in (group, *group.parents):
            yield top / each / name
