"""Whether databases answer at all: one that is stuck shall not hide what the others hold.

All are asked at once, each in a thread of its own, for a connection and no more: what is done after
that may take its time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from ..errors import DatabaseError
from ..storage.database import Database

__all__ = ["PATIENCE", "Reach"]

#: How long a database may take to answer.
PATIENCE = timedelta(seconds=10)


class Reach:
    """Asks databases for an answer; for processes that end soon, since a stuck one keeps its thread."""

    def __init__(self, databases: Sequence[Database]) -> None:
        self._deadline = time.monotonic() + PATIENCE.total_seconds()
        self._errors: dict[str, Exception] = {}
        self._threads = {
            database.name: threading.Thread(target=self._ask, args=(database,), daemon=True)
            for database in databases
            # Of one in memory only this thread has the contents, and it is never stuck.
            if not database.is_for_one_thread
        }
        for thread in self._threads.values():
            thread.start()

    def require(self, database: Database) -> None:
        """Wait for the answer. Raises what it was, and DatabaseError when there is none in time."""
        thread = self._threads.get(database.name)
        if thread is None:
            return
        thread.join(timeout=max(0.0, self._deadline - time.monotonic()))
        if thread.is_alive():
            raise DatabaseError(
                f"database {database.name!r}: expected an answer within "
                f"{PATIENCE.total_seconds():.0f} s, got none. Is the server, or the way to it, "
                "stuck?"
            )
        if database.name in self._errors:
            raise self._errors[database.name]

    def _ask(self, database: Database) -> None:
        try:
            database.read(lambda _: None, any_server=True)
        except Exception as error:  # noqa: BLE001  # raised where the answer is waited for
            self._errors[database.name] = error
