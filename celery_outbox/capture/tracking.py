"""What becomes of SQLAlchemy's transactions, and of the messages that wait in them.

Listens to every Session, Engine and Connection of the process. Messages of a Session (and of an
AsyncConnection) wait here in memory and are written in the engine's ``commit`` event, the last
moment before COMMIT. Each message and each savepoint gets the next number: rolling a savepoint back
drops the messages with higher numbers, whichever of SQLAlchemy's layers it was made in. Invariants:
nothing here keeps a Session or Connection alive, and when a transaction has ended, nothing of it is
left.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.orm import session as orm_session

from ..message import OutboxMessage
from ..storage.database import Database, is_own
from ..storage.dialects import before_savepoint
from .commit_hook import call_after_commit
from .owner import here, nowhere
from .records import (
    ConnectionRecord,
    Record,
    SessionRecord,
    Waiting,
    bound_connection,
    next_savepoint,
)
from .register import Register, register
from .writing import write

__all__ = ["Tracker", "tracker"]

logger = logging.getLogger(__name__)


_FIRST = frozenset(
    {
        "after_transaction_create",
        "after_begin",
        "after_commit",
        "after_rollback",
        "begin",
        "begin_twophase",
    }
)


class Tracker:
    """Follows every transaction of this process, and keeps what waits for its commit."""

    def __init__(self, transactions: Register) -> None:
        self._numbers = itertools.count(1)
        self._register = transactions

    def wait(
        self, record: Record, place: tuple[Database, Engine], messages: Sequence[OutboxMessage]
    ) -> None:
        """Keep messages until the transaction of ``record`` commits on ``place``."""
        self._keep(record, [self._waiting(place, each.task_name, message=each) for each in messages])

    def call(
        self,
        record: Record,
        place: tuple[Database, Engine],
        task_name: str,
        *,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
        dropped: Callable[[], None] | None = None,
    ) -> None:
        """Call ``before`` or ``after`` the commit of ``record``'s transaction, or when ``dropped``."""
        waiting = self._waiting(place, task_name, before=before, after=after, dropped=dropped)
        self._keep(record, [waiting])

    def _waiting(self, place: tuple[Database, Engine], task_name: str, **what: Any) -> Waiting:
        database, engine = place
        number = next(self._numbers)
        return Waiting(number=number, database=database, engine=engine, task_name=task_name, **what)

    def _keep(self, record: Record, waiting: Sequence[Waiting]) -> None:
        record.waiting += waiting
        if isinstance(record, ConnectionRecord):
            connection = record.connection
            if connection is not None and not record.is_hooked and any(each.after for each in waiting):
                record.is_hooked = True
                call_after_commit(connection, record.call_due, record.drop_all)
        elif isinstance(record, SessionRecord) and record.is_committing:
            self._connect(record)

    def note_torn(self, connection: Connection) -> None:
        """An INSERT failed at a call: inside the ``commit`` event, that tears the transaction."""
        record = self._register.connection(connection)
        if record is not None and record.is_written:
            record.is_torn = True

    # What SQLAlchemy tells

    def listen(self) -> None:
        """Begin to listen; doing so twice changes nothing."""
        # Sessions that are in a transaction already: who began them is not known, and nothing of
        # theirs was seen. SQLAlchemy's close_all_sessions() finds them in the same place.
        for session in list(getattr(orm_session, "_sessions", {}).values()):
            if session.in_transaction() and self._register.session(session) is None:
                record = SessionRecord(nowhere(), session, self._gone)
                record.is_unknown = True
                self._register.add(record)
        for target, name, listener in self._listeners():
            if not event.contains(target, name, listener):
                # What tells of a beginning or an end comes first here: others' listeners dispatch.
                event.listen(target, name, listener, insert=name in _FIRST)

    def _listeners(self) -> list[tuple[Any, str, Callable[..., None]]]:
        return [
            (Session, "after_transaction_create", self._session_began),
            (Session, "after_begin", self._session_took),
            (Session, "before_commit", self._session_commits),
            (Session, "after_commit", self._session_committed),
            (Session, "after_rollback", self._session_rolled_back),
            (Session, "after_soft_rollback", self._savepoint_of_session_rolled_back),
            (Session, "after_transaction_end", self._session_ended),
            (Engine, "begin", self._began),
            (Engine, "begin_twophase", self._began_twophase),
            (Engine, "savepoint", self._savepoint_made),
            (Engine, "rollback_savepoint", self._savepoint_rolled_back),
            (Engine, "commit", self._commits),
            (Engine, "prepare_twophase", self._prepares),
            (Engine, "commit_twophase", self._commits_twophase),
            (Engine, "rollback", self._rolled_back),
            (Engine, "rollback_twophase", self._rolled_back_twophase),
        ]

    def _session_began(self, session: Session, transaction: SessionTransaction) -> None:
        if transaction.parent is None:
            record = SessionRecord(here(), session, self._gone)
            self._register.begin(record)
        elif (found := self._register.session(session)) is not None:
            found.starts[id(transaction)] = next(self._numbers)

    def _session_took(
        self, session: Session, transaction: SessionTransaction, connection: Connection
    ) -> None:
        record, taken = self._register.session(session), self._register.connection(connection)
        if record is not None and taken is not None and taken not in record.connections:
            record.connections.append(taken)
            self._register.note_change()
            taken.sessions.append(record)

    def _session_commits(self, session: Session) -> None:
        record = self._register.session(session)
        # The event also comes when a savepoint is released.
        if record is None or session.get_nested_transaction() is not None:
            return
        record.is_committing = True
        self._connect(record)

    def _connect(self, record: SessionRecord) -> None:
        """See to it that the Session has Connections whose commits will write its messages."""
        session = record.session
        if session is None or bound_connection(session) is not None or record.is_connecting:
            return
        for each in {id(each.database): each for each in record.waiting if not each.after}.values():
            if record.on(each.database) is None:
                session.connection(bind_arguments={"bind": each.engine})

    def _session_committed(self, session: Session) -> None:
        record = self._register.session(session)
        if record is None or session.get_nested_transaction() is not None:
            return
        record.is_over = True
        # A Session on a Connection whose transaction goes on: so do the messages.
        bound = bound_connection(session)
        outer = None if bound is None else self._register.connection(bound)
        if outer is not None and outer.is_open:
            self._keep(outer, record.waiting + record.due)
            record.waiting, record.due = [], []
        else:
            # What is only to be called afterwards needed no Connection, and may have had none.
            record.due += [each for each in record.waiting if each.after is not None]
            record.waiting = [each for each in record.waiting if each.after is None]

    def _session_rolled_back(self, session: Session) -> None:
        record = self._register.session(session)
        if record is not None and session.get_nested_transaction() is None:
            record.is_over = True
            record.drop_all()
            record.lost = []

    def _savepoint_of_session_rolled_back(
        self, session: Session, transaction: SessionTransaction
    ) -> None:
        record = self._register.session(session)
        if record is None:
            return
        # A flush that fails tells of its own transaction only; it rolls back the savepoint around it.
        around: SessionTransaction | None = transaction
        while around is not None and not around.nested:
            around = around.parent
        start = None if around is None else record.starts.get(id(around))
        if start is not None:
            record.drop_after(start)

    def _session_ended(self, session: Session, transaction: SessionTransaction) -> None:
        record = self._register.session(session)
        if transaction.parent is None and record is not None:
            self._gone(record)
            if record.is_over:
                record.call_due()

    def _began(self, connection: Connection) -> None:
        if not is_own(connection):
            if (ended := self._register.connection(connection)) is not None:
                self._register.remove(ended)
                if ended.is_torn and not connection.invalidated:
                    # The driver is still in the transaction that SQLAlchemy let go of.
                    connection.dialect.do_rollback(connection.connection)
            record = ConnectionRecord(here(), connection, self._gone)
            self._register.begin(record)

    def _began_twophase(self, connection: Connection, xid: object) -> None:
        self._began(connection)

    def _savepoint_made(self, connection: Connection, name: str | None) -> None:
        before_savepoint(connection)
        record = self._register.connection(connection)
        if record is not None:
            record.savepoints.append((name or next_savepoint(connection), next(self._numbers)))

    def _savepoint_rolled_back(self, connection: Connection, name: str, context: object) -> None:
        record = self._register.connection(connection)
        if record is None:
            return
        names = [found for found, _ in record.savepoints]
        if name not in names:
            return
        # What was made after it is gone with it; it can itself be rolled back to again.
        del record.savepoints[names.index(name) + 1 :]
        _, number = record.savepoints[-1]
        for each in (record, *record.sessions):
            each.drop_after(number)

    def _commits(self, connection: Connection) -> None:
        try:
            self._write_waiting(connection)
        except BaseException:
            # SQLAlchemy has let go of the transaction by now, the driver has not: the next commit
            # would commit the caller's work without its tasks.
            if not connection.invalidated:
                connection.dialect.do_rollback(connection.connection)
            raise

    def _commits_twophase(self, connection: Connection, xid: object, is_prepared: bool) -> None:
        if is_prepared:
            return
        try:
            self._write_waiting(connection)
        except BaseException:
            if not connection.invalidated:
                connection.dialect.do_rollback_twophase(connection, xid, is_prepared=False)
            raise

    def _prepares(self, connection: Connection, xid: object) -> None:
        self._write_waiting(connection)
        record = self._register.connection(connection)
        if record is not None:
            record.is_prepared = True

    def _write_waiting(self, connection: Connection) -> None:
        record = self._register.connection(connection)
        if record is None:
            return
        record.is_written = True
        waiting: list[Waiting] = []
        for each in (record, *record.sessions):
            taken = each.take(connection)
            waiting += [one for one in taken if one.after is None]
            each.due += [one for one in taken if one.after is not None]
        waiting.sort(key=lambda one: one.number)
        for one in waiting:
            if one.before is not None:
                one.before()
        write(connection, [one for one in waiting if one.message is not None])

    def _rolled_back(self, connection: Connection) -> None:
        record = self._register.connection(connection)
        if record is None:
            return
        for session in record.sessions:
            session.lost += session.drop_on(connection)
        record.drop_all()
        self._register.remove(record)

    def _rolled_back_twophase(self, connection: Connection, xid: object, is_prepared: bool) -> None:
        self._rolled_back(connection)

    def _gone(self, record: Record) -> None:
        """The transaction has ended, or its Session or Connection was garbage-collected."""
        self._register.remove(record)
        lost = record.drop_after(0)
        if isinstance(record, SessionRecord):
            lost += record.lost
            record.lost = []
        if lost:
            logger.warning(
                "Dropped %d outbox message(s) of a transaction that ended without a commit: %s",
                len(lost),
                ", ".join(sorted(set(lost))),
            )


#: SQLAlchemy's Session and Engine classes are one for the whole process, and so are their events.
tracker = Tracker(register)
