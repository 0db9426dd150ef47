"""A connection of its own that PostgreSQL tells of commits, by psycopg.

It comes from no pool, whose connections may all be needed, and is in no transaction between two
calls: an open one would hold back the notifications of everybody. Beneath psycopg's ``notifies()``,
which in 3.1 waits without end.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

from sqlalchemy.engine import Engine

from ...errors import DatabaseError

__all__ = ["Subscription"]

#: How long a notification may take that we send ourselves.
_PROOF = timedelta(seconds=1)
#: Seconds; of Linux. A firewall that forgets idle connections tells nobody.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}

# The second setting came with PostgreSQL 14.
_SET_UP = """
SELECT set_config(name, CASE name WHEN 'application_name' THEN 'celery_outbox listener' ELSE '0' END,
                  false)
  FROM pg_settings WHERE name IN ('application_name', 'idle_session_timeout')
"""


class Subscription:
    """Listens to ``channel`` from its making until it is closed.

    A file descriptor ``bell`` that can be read ends every wait. Raises DatabaseError when the database
    cannot be reached, or its notifications do not arrive.
    """

    def __init__(self, engine: Engine, channel: str, bell: int) -> None:
        self._engine = engine
        self._channel = channel
        self._bell = bell
        self._connection = self._connect()
        try:
            with self._explained():
                self._set_up()
        except BaseException:
            self.close()
            raise

    def wait(self, duration: timedelta) -> bool:
        """Wait until told of a commit, at most ``duration``; whether it was.

        Raises DatabaseError when the connection is lost.
        """
        if self._take():
            return True
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLIN)
        poll.register(self._bell, select.POLLIN)
        poll.poll(duration / timedelta(milliseconds=1))
        with self._explained():
            self._connection.pgconn.consume_input()
        return self._take()

    def close(self) -> None:
        """Listen no more."""
        self._connection.close()

    def _take(self) -> bool:
        """Take every notification that has arrived; whether there was one."""
        is_told = False
        while self._connection.pgconn.notifies() is not None:
            is_told = True
        return is_told

    def _connect(self) -> Any:
        with self._explained():
            # Made as the engine makes them, with its arguments and events, but not taken from its pool.
            pooled = self._engine.pool.recreate().connect()
            connection: Any = pooled.driver_connection
            pooled.detach()
            # What an event has set shall last; autocommit cannot be chosen inside a transaction.
            connection.commit()
            connection.autocommit = True
            return connection

    def _set_up(self) -> None:
        _keep_alive(self._connection.fileno())
        (server,) = self._connection.execute("SELECT pg_backend_pid()").fetchone()
        self._connection.execute(f"LISTEN {self._channel}")
        if server != self._connection.info.backend_pid:
            self._prove()
        self._connection.execute(_SET_UP)

    def _prove(self) -> None:
        """A pooler is in between; one that changes servers with each transaction brings nothing."""
        with closing(self._connect()) as other:
            other.execute(f"NOTIFY {self._channel}")
        if not self.wait(_PROOF):
            self._connection.execute(f"UNLISTEN {self._channel}")
            raise DatabaseError(
                "expected notifications to arrive, found a pooler that holds them back, such as "
                "PgBouncer in transaction mode"
            )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        failures: tuple[type[Exception], ...] = (self._engine.dialect.loaded_dbapi.Error, OSError)
        try:
            yield
        except failures as error:
            said = " ".join(str(error).split())
            raise DatabaseError(f"{type(error).__name__}: {said}") from error


def _keep_alive(descriptor: int) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family in {socket.AF_INET, socket.AF_INET6}:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEP_ALIVE.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
