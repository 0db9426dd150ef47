"""This relay's row in each database's state table: that it runs, where, and when it was last seen.

A thread of its own refreshes the rows, since a batch may take as long as its lease. It also looks at
the version of the tables: after a migration under its feet a relay does nothing more with them.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType

from sqlalchemy.engine import Connection

from ..errors import OutboxError
from ..storage.database import Database
from ..storage.inspection import require_current_version

__all__ = ["Heartbeat"]

logger = logging.getLogger(__name__)

EVERY = timedelta(seconds=10)
#: How long the end of a relay waits for a database that hangs; its row is stale soon anyway.
PATIENCE = timedelta(seconds=2)


@contextmanager
def without_signals() -> Iterator[None]:
    """Threads that are started in the block get no signals.

    A signal that the kernel gave to one of them would wait, unseen, until the main thread wakes up.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class Heartbeat:
    """Says in each database that a relay runs, as long as the ``with`` block lasts."""

    def __init__(self, databases: Sequence[Database], *, every: timedelta = EVERY) -> None:
        self._databases = databases
        self._every = every
        self._name = secrets.token_hex(8)
        self._about = {"host": socket.gethostname(), "pid": os.getpid(), "since": int(time.time())}
        self._begun: set[str] = set()
        self._beginning = {database.name: threading.Lock() for database in databases}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="celery_outbox heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        with without_signals():
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join(timeout=PATIENCE.total_seconds())

    def begin(self, database: Database) -> None:
        """Write the row, unless it is there; before that, see that the tables are of this version.

        Raises SchemaError when they are not, DatabaseError and ConfigurationError.
        """
        if database.name in self._begun:
            return
        with self._beginning[database.name]:  # two threads would write the same row
            if database.name not in self._begun:
                database.run(lambda connection: self._begin(database, connection))
                self._begun.add(database.name)

    def _begin(self, database: Database, connection: Connection) -> None:
        require_current_version(database, connection)
        if not database.is_for_one_thread:
            database.state.forget_relays(connection)
            database.state.see_relay(connection, self._name, self._about)

    def _run(self) -> None:
        while not self._end.wait(self._every.total_seconds()):
            for database in self._here():
                self._beat(database)
        for database in self._here():
            self._remove(database)

    def _here(self) -> Sequence[Database]:
        return [
            each for each in self._databases if each.name in self._begun and not each.is_for_one_thread
        ]

    def _beat(self, database: Database) -> None:
        def work(connection: Connection) -> None:
            require_current_version(database, connection)
            database.state.see_relay(connection, self._name, self._about)

        try:
            database.run(work)
        except OutboxError as error:
            # Its next turn begins anew, and tells the reason.
            self._begun.discard(database.name)
            logger.debug("No heartbeat in %s: %s", database.name, error)

    def _remove(self, database: Database) -> None:
        try:
            database.run(lambda connection: database.state.remove_relay(connection, self._name))
        except OutboxError as error:
            logger.debug("The heartbeat in %s was left behind: %s", database.name, error)
