"""What cannot be used just now, said once when it begins and once when it is over."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

__all__ = ["Outages"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Outage:
    """Since when, and how often it was met."""

    since: float
    count: int = 0


class Outages:
    """The outages of one relay; safe for threads."""

    def __init__(self) -> None:
        self._current: dict[tuple[str, str], _Outage] = {}
        self._lock = threading.Lock()

    def begin(self, kind: str, name: str, reason: str) -> None:
        """A database or a broker could not be used; logged the first time."""
        with self._lock:
            is_new = (kind, name) not in self._current
            outage = self._current.setdefault((kind, name), _Outage(since=time.monotonic()))
            outage.count += 1
        if is_new:
            logger.error(
                "The %s %r cannot be used, trying again: %s", kind, name, reason, extra={kind: name}
            )

    def end(self, kind: str, name: str) -> None:
        """It can be used; logged when it could not before."""
        if (kind, name) not in self._current:
            return
        with self._lock:
            outage = self._current.pop((kind, name), None)
        if outage is not None:
            seconds = time.monotonic() - outage.since
            logger.info(
                "The %s %r can be used again, after %.1f seconds and %d failure(s)",
                kind,
                name,
                seconds,
                outage.count,
                extra={kind: name},
            )
