"""What is remembered of one open transaction, and the messages that wait in it.

Each message and each savepoint has a number, in the order of time: rolling a savepoint back drops the
messages with higher numbers. Nothing here keeps a Session or Connection alive.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.orm import Session

from ..message import OutboxMessage
from ..storage.database import Database
from .owner import Mark

__all__ = [
    "ConnectionRecord",
    "Record",
    "SessionRecord",
    "Waiting",
    "bound_connection",
    "next_savepoint",
]


#: Names of the states of a SessionTransaction in which no SQL is possible any more.
_ENDED = frozenset({"DEACTIVE", "COMMITTED", "CLOSED", ""})


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What waits for its transaction to commit.

    Attributes:
        number: its place in time, among the savepoints.
        database: the one whose transaction it is.
        engine: that of the caller's connection.
        task_name: for the warning when it is dropped.
        message: to be written before COMMIT; or
        before: to be called before it, and before messages are written; or
        after: to be called after it.
        dropped: to be called when it goes without a commit, with a rollback or otherwise.
    """

    number: int
    database: Database
    engine: Engine
    task_name: str
    message: OutboxMessage | None = None
    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None
    dropped: Callable[[], None] | None = None


class Record(ABC):
    """One open transaction: of a Session, or of a Connection that no Session works on.

    Attributes:
        mark: where it was begun.
        is_unknown: it was begun before celery_outbox was imported; nothing can be stored in it.
        found: what the latest search that ended in it noted, to spare the next one.
        waiting: what is to happen when it commits.
        due: what is to be called once COMMIT has been carried out.
    """

    def __init__(self, mark: Mark, subject: Any, gone: Callable[[Record], None]) -> None:
        self.mark = mark
        self.is_unknown = False
        self.found: Any = None
        self.key = id(subject)
        self.waiting: list[Waiting] = []
        self.due: list[Waiting] = []
        own = weakref.ref(self)

        def forget(_: object) -> None:
            if (record := own()) is not None:
                gone(record)

        self._subject = weakref.ref(subject, forget)

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether it has neither been committed nor rolled back."""

    @abstractmethod
    def connection_on(self, database: Database) -> Connection | None:
        """The Connection to ``database`` that it works on, None as long as there is none."""

    @abstractmethod
    def writes_now_on(self, database: Database) -> Connection | None:
        """The Connection on which to insert at once; None when messages are to wait."""

    @abstractmethod
    def is_written_on(self, database: Database) -> bool:
        """Whether what waited has been written: what is dispatched now is written at once."""

    @abstractmethod
    def is_past_on(self, database: Database) -> bool:
        """Whether nothing can be written any more: it has been prepared or committed."""

    def call_due(self) -> None:
        """Call what is due, in order; an error stops the rest, as it would have at the calls."""
        due, self.due = self.due, []
        for each in due:
            if each.after is not None:
                each.after()

    def drop_after(self, number: int) -> list[str]:
        """Drop what waits and came after ``number``; return the tasks' names."""
        dropped = [each for each in self.waiting if each.number > number]
        self.waiting = [each for each in self.waiting if each.number < number]
        return _told(dropped)

    def drop_on(self, connection: Connection) -> list[str]:
        """Drop what was to go by ``connection``; return the tasks' names."""
        return _told(self.take(connection))

    def drop_all(self) -> list[str]:
        """Drop everything, also what is due; return the tasks' names."""
        dropped, self.waiting, self.due = self.waiting + self.due, [], []
        return _told(dropped)

    def take(self, connection: Connection) -> list[Waiting]:
        """Take out what is to be written by ``connection``."""
        taken: list[Waiting] = []
        left: list[Waiting] = []
        for each in self.waiting:
            (taken if each.database.matches(connection.engine) else left).append(each)
        self.waiting = left
        return taken


class ConnectionRecord(Record):
    """The transaction of a Connection, from BEGIN on.

    Attributes:
        savepoints: names and numbers, innermost last.
        sessions: the Sessions that work in this transaction.
        is_written: its ``commit`` event has come: what is dispatched now is written at once.
        is_prepared: PREPARE TRANSACTION has been sent: nothing more can be written.
        is_hooked: what is due will be called after its COMMIT.
        is_torn: a listener's own INSERT failed inside its ``commit`` event.
    """

    def __init__(self, mark: Mark, connection: Connection, gone: Callable[[Record], None]) -> None:
        super().__init__(mark, connection, gone)
        self.savepoints: list[tuple[str, int]] = []
        self.sessions: list[SessionRecord] = []
        self.is_written = False
        self.is_prepared = False
        self.is_hooked = False
        self.is_torn = False

    @property
    def connection(self) -> Connection | None:
        """The Connection, None when it is gone."""
        connection: Connection | None = self._subject()
        return connection

    @property
    def is_open(self) -> bool:
        """Whether its transaction has neither been committed nor rolled back."""
        connection = self.connection
        return connection is not None and not connection.closed and connection.in_transaction()

    @property
    def open_sessions(self) -> list[SessionRecord]:
        """The Sessions whose work goes on in it."""
        return [each for each in self.sessions if each.is_open]

    def connection_on(self, database: Database) -> Connection | None:
        """The Connection itself."""
        return self.connection

    def writes_now_on(self, database: Database) -> Connection | None:
        """The Connection; an asynchronous one does no I/O at a call, only in its commit."""
        connection = self.connection
        if connection is not None and connection.dialect.is_async and not self.is_written:
            return None
        return connection

    def is_written_on(self, database: Database) -> bool:
        """Whether its ``commit`` event has come."""
        return self.is_written

    def is_past_on(self, database: Database) -> bool:
        """Whether it has been prepared or committed."""
        return self.is_prepared or (self.is_written and not self.is_open)


class SessionRecord(Record):
    """The transaction of a Session, from its (auto)begin on.

    Attributes:
        starts: the number at which each nested SessionTransaction began, by its ``id()``.
        connections: the Connections that it works on so far.
        lost: names of tasks whose messages went with a rollback that the Session did not ask for.
        is_committing: ``before_commit`` of the root has come.
        is_over: committed or rolled back, though the Session may not have let go of it yet.
    """

    def __init__(self, mark: Mark, session: Session, gone: Callable[[Record], None]) -> None:
        super().__init__(mark, session, gone)
        self.starts: dict[int, int] = {}
        self.connections: list[ConnectionRecord] = []
        self.lost: list[str] = []
        self.is_committing = False
        self.is_over = False

    @property
    def session(self) -> Session | None:
        """The Session, None when it is gone."""
        session: Session | None = self._subject()
        return session

    @property
    def is_open(self) -> bool:
        """Whether SQL is still possible in it."""
        session = self.session
        if session is None or self.is_over:
            return False
        root = session.get_transaction()
        if root is None:
            return False
        # A SessionTransaction is not active either while it begins a Connection or commits one;
        # SQLAlchemy tells that from its end in its state alone.
        ended = _state_of(root) in _ENDED
        return root.is_active or not ended or any(each.is_open for each in self.connections)

    @property
    def is_connecting(self) -> bool:
        """Whether the Session is just beginning a Connection, and can begin no other."""
        session = self.session
        root = None if session is None else session.get_transaction()
        return root is not None and _state_of(root) == "PROVISIONING_CONNECTION"

    def connection_on(self, database: Database) -> Connection | None:
        """The Connection that it works on already, or is bound to."""
        taken, session = self.on(database), self.session
        if taken is not None:
            return taken.connection
        return None if session is None else bound_connection(session)

    def writes_now_on(self, database: Database) -> Connection | None:
        """A synchronous Connection that it is bound to, or one whose commit is under way."""
        taken, session = self.on(database), self.session
        if taken is not None and taken.is_written:
            return taken.connection
        bound = None if session is None else bound_connection(session)
        if session is None or bound is None or bound.dialect.is_async:
            return None
        # The Session may be about to make its savepoint on that Connection: let it.
        return session.connection(bind_arguments={"bind": bound})

    def is_written_on(self, database: Database) -> bool:
        """Whether the ``commit`` event of its Connection has come."""
        taken = self.on(database)
        return taken is not None and taken.is_written

    def is_past_on(self, database: Database) -> bool:
        """Whether its Connection has been prepared or committed, while another has not yet."""
        taken = self.on(database)
        return taken is not None and taken.is_past_on(database)

    def on(self, database: Database) -> ConnectionRecord | None:
        """The Connection to ``database`` that this Session works on already."""
        for record in self.connections:
            connection = record.connection
            if connection is not None and database.matches(connection.engine):
                return record
        return None


def bound_connection(session: Session) -> Connection | None:
    """The Connection that a Session is bound to, None when it is bound to an engine or to nothing."""
    return session.bind if isinstance(session.bind, Connection) else None


def next_savepoint(connection: Connection) -> str:
    """The name that SQLAlchemy is about to give a savepoint; its event comes before that."""
    return f"sa_savepoint_{getattr(connection, '_Connection__savepoint_seq', 0) + 1}"


def _state_of(transaction: Any) -> str:
    return getattr(getattr(transaction, "_state", None), "name", "")


def _told(dropped: Sequence[Waiting]) -> list[str]:
    for each in dropped:
        if each.dropped is not None:
            each.dropped()
    # What only wanted to be told is no task of its own.
    return [each.task_name for each in dropped if each.dropped is None]
