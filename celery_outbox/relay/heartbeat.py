"""This relay's row in each database's state table: that it runs, where, and when it was last seen.

A thread of its own refreshes the rows, since a batch may take as long as its lease. It also looks at
the version of the tables: after a migration under its feet a relay does nothing more with them. And
at the mark of ``celery-outbox restart``, which ends every relay that has begun before it.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from sqlalchemy.engine import Connection

from ..errors import OutboxError
from ..storage.database import Database
from ..storage.inspection import require_current_version

__all__ = ["Heartbeat"]

logger = logging.getLogger(__name__)

EVERY = timedelta(seconds=10)
#: How often the mark of a restart is looked for.
LOOK = timedelta(seconds=2)
PATIENCE = timedelta(seconds=1)


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
    """Says in each database that a relay runs, as long as the ``with`` block lasts.

    Args:
        app: the outbox_name of the relay's app; None: no restart is meant for it.
        on_restart: called when one is, in a thread of the heartbeat; more than once by several
            databases.
    """

    def __init__(
        self,
        databases: Sequence[Database],
        *,
        app: str | None = None,
        on_restart: Callable[[], object] = lambda: None,
        every: timedelta = EVERY,
    ) -> None:
        self._ends_at = 0.0
        self._every = every
        self._app = app
        self._on_restart = on_restart
        self._marks: dict[str, str | None] = {}
        self._name = secrets.token_hex(8)
        self._about = {"host": socket.gethostname(), "pid": os.getpid(), "since": int(time.time())}
        if app is not None:
            self._about["app"] = app
        self._begun: set[str] = set()
        self._beginning = {database.name: threading.Lock() for database in databases}
        self._end = threading.Event()
        # One for each: a database that hangs keeps no other from being seen and restarted.
        self._threads = [
            threading.Thread(
                target=self._run, args=[each], name=f"celery_outbox heartbeat {each.name}", daemon=True
            )
            for each in databases
            if not each.is_for_one_thread
        ]

    def __enter__(self) -> Heartbeat:
        with without_signals():
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end(PATIENCE)
        for thread in self._threads:
            thread.join(timeout=max(0.0, self._ends_at - time.monotonic()))

    def end(self, patience: timedelta) -> None:
        """Let it end, without waiting; the end of the block will wait for what is left of this time.

        A database may hang, and the row in it is stale soon anyway.
        """
        if not self._end.is_set():
            self._ends_at = time.monotonic() + patience.total_seconds()
            self._end.set()

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
            if self._app is not None and database.name not in self._marks:
                self._marks[database.name] = database.state.restart(connection, self._app)

    def _run(self, database: Database) -> None:
        pause, beaten_at = min(LOOK, self._every).total_seconds(), time.monotonic()
        while not self._end.wait(pause):
            self._look(database)
            is_time = time.monotonic() - beaten_at >= self._every.total_seconds()
            if is_time and database.name in self._begun:
                self._beat(database)
                beaten_at = time.monotonic()
        if database.name in self._begun:
            self._remove(database)

    def _look(self, database: Database) -> None:
        """Look for a restart; also after a migration, which often is the reason for one."""
        app = self._app
        if app is None or database.name not in self._marks:
            return
        try:
            mark = database.read(lambda connection: database.state.restart(connection, app))
        except OutboxError as error:
            logger.debug("No look for a restart in %s: %s", database.name, error)
            return
        if mark not in {None, self._marks[database.name]}:
            self._marks[database.name] = mark
            self._on_restart()

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
