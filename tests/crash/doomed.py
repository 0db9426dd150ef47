"""A project whose relay kills itself at the point that the environment names.

``CRASH`` is a phase and a moment, such as ``settle during``. What the database is told is watched by
SQLAlchemy's events, what goes to the broker by a publisher around the real one; where the process is
to die with a part of a batch on its way, the connection leads through a proxy in this very process.
The rest of the environment is that of ``tests.relay.shop``.
"""

import os
import re
import signal
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa
from celery import Celery
from kombu import Connection

from celery_outbox import ClaimedMessage, Outbox, Outcome, Publisher, Transport
from celery_outbox.relay.publishers import publisher_for
from tests.crash.places import SETTINGS
from tests.proxy import TcpProxy

_CLAIM = re.compile(r"\bUPDATE\b.*\bcelery_outbox\b.*\bSET\b.*\blease_until\b", re.DOTALL)
_SETTLE = re.compile(r"\bDELETE\b.*\bcelery_outbox\b", re.DOTALL)


def die() -> None:
    """End here, as the kernel ends a process: nothing more is done."""
    os.kill(os.getpid(), signal.SIGKILL)


class StatementTrap:
    """Dies at the first claim or settlement, before its statement, before its COMMIT or after it.

    ``next`` is a claim in the transaction of a settlement.
    """

    def __init__(self, phase: str, moment: str) -> None:
        self._phase = phase
        self._moment = moment
        self._has_settled = set[Any]()
        self._watched: Any = None

    def watch(self, engine: sa.Engine) -> None:
        """Hear of everything that an engine does."""
        sa.event.listen(engine, "before_cursor_execute", self.on_statement)
        sa.event.listen(engine, "commit", self.on_commit)
        sa.event.listen(engine, "rollback", self.on_rollback)
        sa.event.listen(engine, "checkin", self.on_checkin)

    def on_statement(self, connection: sa.Connection, cursor: Any, statement: str, *_: Any) -> None:
        """Look at a statement that is about to be sent."""
        driver = connection.connection.dbapi_connection
        if _SETTLE.search(statement):
            self._has_settled.add(driver)
            is_it = self._phase == "settle"
        elif _CLAIM.search(statement):
            is_it = self._phase == "claim" or (self._phase == "next" and driver in self._has_settled)
        else:
            is_it = False
        if is_it and self._watched is None:
            self._watched = driver
            if self._moment == "before":
                die()

    def on_commit(self, connection: sa.Connection) -> None:
        """Everything of the transaction is done but its COMMIT."""
        if connection.connection.dbapi_connection is self._watched and self._moment == "during":
            die()

    def on_rollback(self, connection: sa.Connection) -> None:
        """Others were in the way: it begins again."""
        driver = connection.connection.dbapi_connection
        self._has_settled.discard(driver)
        if driver is self._watched:
            self._watched = None

    def on_checkin(self, driver: Any, _: object) -> None:
        """The transaction has been committed, and its connection goes back to the pool."""
        self._has_settled.discard(driver)
        if driver is self._watched:
            die()


class DeadlyProxy(TcpProxy):
    """Where another proxy cuts, this one kills."""

    def cut(self) -> None:
        """Die; what was let pass is on its way to the broker."""
        die()


class DoomedPublisher(Publisher):
    """Dies at its first batch: before it, with half of it on its way, or with the answer to it."""

    def __init__(self, inner: Publisher, moment: str, proxy: DeadlyProxy) -> None:
        self._inner = inner
        self._moment = moment
        self._proxy = proxy

    @property
    def is_connected(self) -> bool:
        return self._inner.is_connected

    def connect(self) -> None:
        self._inner.connect()

    def publish(
        self, messages: Sequence[ClaimedMessage], *, deadline: float, read_at: float
    ) -> Outcome:
        if self._moment == "before":
            die()
        if self._moment == "during":
            # Whatever is written around them, bodies become no shorter on the wire.
            self._proxy.cut_after(sum(len(each.body) for each in messages) // 2)
        outcome = self._inner.publish(messages, deadline=deadline, read_at=read_at)
        if self._moment == "after":
            die()
        return outcome

    def line_of(self, message: ClaimedMessage) -> str | None:
        return self._inner.line_of(message)

    def longest(self, count: int) -> float | None:
        return self._inner.longest(count)

    def keep_alive(self) -> None:
        self._inner.keep_alive()

    def close(self) -> None:
        self._inner.close()


class DoomedTransport(Transport):
    """The real publisher of the broker, in one that dies."""

    def publisher(self, connection: Connection) -> Publisher:
        return DoomedPublisher(publisher_for(connection), moment, proxy)


phase, moment = os.environ["CRASH"].split()
broker = os.environ["SHOP_BROKER"]
parts = urlsplit(broker)
proxy = DeadlyProxy(parts.hostname or "", parts.port or 0)
engine = sa.create_engine(os.environ["SHOP_DATABASE"])
app = Celery("shop", broker=proxy.through(broker))
outbox = Outbox(
    app,
    databases={"default": engine},
    transports={parts.scheme.partition("+")[0]: DoomedTransport} if phase == "publish" else {},
    **SETTINGS,
)
if phase != "publish":
    StatementTrap(phase, moment).watch(engine)
