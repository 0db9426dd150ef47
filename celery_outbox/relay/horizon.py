"""From which due time on a relay looks for messages, so that delivered ones cost it nothing.

As long as a transaction is open somewhere, PostgreSQL, MySQL and MariaDB keep every row that was
deleted since it began, and a claim that looks from the very beginning reads them all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TypeVar

__all__ = ["Horizon"]

T = TypeVar("T")

#: Looking at everything takes at most one part in so many of the time.
SHARE = 10


class Horizon:
    """The due time before which one database holds no message of one broker, as far as was seen.

    Messages become ready before it, too: a transaction commits late, a lease lapses, a message is put
    back. So everything is looked at again and again, the more often the less it costs.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Know nothing: begin at the very beginning."""
        self._latest: datetime | None = None
        self._whole_look_at = 0.0
        self._owes_whole_look = False

    @property
    def since(self) -> datetime | None:
        """Where to begin; None: at the very beginning."""
        return None if time.monotonic() >= self._whole_look_at else self._latest

    def is_empty(self, since: datetime | None, look: Callable[[], bool]) -> bool:
        """Ask ``look`` whether nothing that fell due at ``since`` or later is ready."""
        found_nothing = self.take(since, look)
        self._owes_whole_look = found_nothing and since is not None
        return found_nothing

    def take(self, since: datetime | None, work: Callable[[], T]) -> T:
        """Do ``work``, which looks for messages that fell due at ``since`` or later."""
        began = time.monotonic()
        result = work()
        if since is None:
            ended = time.monotonic()
            self._whole_look_at = ended + SHARE * (ended - began)
        return result

    def claimed(self, latest: datetime | None) -> None:
        """Remember when the last message of a claim fell due: those before it were claimed as well."""
        self._latest = latest or self._latest

    @property
    def owed(self) -> timedelta | None:
        """How soon a relay that found nothing must look at everything; None: it has just done so."""
        if not self._owes_whole_look:
            return None
        return timedelta(seconds=max(0.0, self._whole_look_at - time.monotonic()))
