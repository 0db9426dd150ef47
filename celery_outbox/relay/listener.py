"""Being told of commits: wakes a relay at once where the database can notify it.

Asking every ``--sleep`` stays the net beneath: nothing is lost where nobody listens, a connection is
down, or the storing application has turned notifications off. One thread for each such database, on
a connection of its own.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta

from ..errors import OutboxError
from ..policy import RetryPolicy
from ..storage.database import Database
from .backoff import next_delay
from .heartbeat import without_signals
from .publishers.kombu import text_of

__all__ = ["Listener"]

logger = logging.getLogger(__name__)

#: Before it connects again.
PAUSES = RetryPolicy(base_delay=timedelta(seconds=0.1), max_delay=timedelta(seconds=30))
PATIENCE = timedelta(seconds=1)
#: A wait that nothing ends but a notification, the end or a lost connection.
_LONG = timedelta(hours=1)
_NOW = timedelta(0)


class Listener:
    """Calls ``ring(database)`` when messages are committed there, as long as the ``with`` block lasts.

    ``ring`` is called in threads of the listener's: once for notifications that arrive together, and
    once whenever a connection is made, since something may have been missed before. Databases that
    notify nobody are left out.
    """

    def __init__(self, databases: Sequence[Database], ring: Callable[[Database], None]) -> None:
        self._databases = databases
        self._ring = ring
        self._ears: list[_Ear] = []
        self._ends_at: float | None = None

    def __enter__(self) -> Listener:
        self._ears = [_Ear(each, self._ring) for each in self._databases if each.can_listen]
        with without_signals():
            for ear in self._ears:
                ear.start()
        return self

    def __exit__(self, *_: object) -> None:
        ends_at = self.end(PATIENCE)
        for ear in self._ears:
            ear.join(max(0, ends_at - time.monotonic()))

    def end(self, patience: timedelta) -> float:
        """Let it end, without waiting; until when the end of the block will wait for it."""
        if self._ends_at is None:
            self._ends_at = time.monotonic() + patience.total_seconds()
            for ear in self._ears:
                ear.end()
        return self._ends_at


class _Ear:
    """Listens to one database, in a thread of its own."""

    def __init__(self, database: Database, ring: Callable[[Database], None]) -> None:
        self._database = database
        self._ring = ring
        self._is_said = False
        # The thread closes the bell, however late it ends.
        self._bell, self._rope = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="celery_outbox listener", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Let the thread end: from now on its bell can be read."""
        self._rope.close()

    def join(self, seconds: float) -> None:
        self._thread.join(timeout=seconds)

    def _run(self) -> None:
        failures, pause = 0, _NOW
        with self._bell:
            while not self._ends_within(pause):
                began = time.monotonic()
                try:
                    self._listen()
                except Exception as error:  # noqa: BLE001
                    # The thread's boundary: an engine's events raise what they like, and a relay that
                    # listens no more for the rest of its life would be slow without a reason.
                    if time.monotonic() - began > PAUSES.max_delay.total_seconds():
                        failures = 0
                    failures += 1
                    pause = next_delay(PAUSES, failures) or PAUSES.max_delay
                    self._lost(error)

    def _listen(self) -> None:
        """Listen until the end. Raises DatabaseError when that is impossible, now or any more."""
        with closing(self._database.listen(self._bell.fileno())) as subscription:
            level = logging.INFO if self._is_said else logging.DEBUG
            logger.log(level, "The database %r notifies this relay", self._database.name)
            self._is_said = False
            is_told = True  # of what was committed before
            while not self._ends_within(_NOW):
                if is_told:
                    self._ring(self._database)
                is_told = subscription.wait(_LONG)

    def _lost(self, error: Exception) -> None:
        if self._ends_within(_NOW):
            return
        # Those who ask a database tell when it is down. What else is in the way is said once.
        is_news = error.__cause__ is None and not self._is_said
        self._is_said = self._is_said or is_news
        logger.log(
            logging.INFO if is_news else logging.DEBUG,
            "The database %r does not notify this relay, which asks it every --sleep meanwhile: %s",
            self._database.name,
            error if isinstance(error, OutboxError) else text_of(error),
        )

    def _ends_within(self, duration: timedelta) -> bool:
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        return bool(poll.poll(duration / timedelta(milliseconds=1)))
