"""Which SQLAlchemy transactions are open, and who began them.

Nothing here keeps a Session or Connection alive, and when a transaction has ended, nothing of it is
left.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session

from .owner import Mark
from .records import ConnectionRecord, Record, SessionRecord

__all__ = ["Register", "register"]


# Transactions begun in this context or in the one that it was copied from: an asyncio task sees by
# this that its parent has one open.
_inherited: ContextVar[tuple[Record, ...]] = ContextVar("celery_outbox_inherited", default=())


class Register:
    """Every open transaction of this process."""

    def __init__(self) -> None:
        self._changes = itertools.count(1)
        #: Another number whenever a transaction begins, takes a Connection or ends.
        self.change = 0
        self._sessions: dict[int, SessionRecord] = {}
        self._connections: dict[int, ConnectionRecord] = {}
        self._by_owner: weakref.WeakKeyDictionary[Any, dict[int, Record]] = weakref.WeakKeyDictionary()

    def record_of(self, subject: Session | Connection) -> Record | None:
        """The open transaction of a Session or Connection, None when it is in none."""
        if isinstance(subject, Session):
            return self.session(subject)
        return self.connection(subject)

    def begun_by(self, mark: Mark) -> list[Record]:
        """The open transactions that this thread or asyncio task began."""
        return [record for record in self._of(mark) if record.is_open]

    def found_by(self, mark: Mark) -> Iterator[Any]:
        """What was noted in ``found`` of the transactions that this thread or asyncio task began."""
        return (record.found for record in self._of(mark) if record.found is not None)

    def _of(self, mark: Mark) -> list[Record]:
        owner = mark.owner()
        records = None if owner is None else self._by_owner.get(owner)
        return [] if records is None else list(records.values())

    def unknown(self) -> list[Record]:
        """The open transactions that were begun before this listened."""
        return [each for each in self.everywhere() if each.is_unknown]

    def inherited(self) -> list[Record]:
        """The open transactions begun in this context or in one that it was copied from."""
        return [record for record in _inherited.get() if record.is_open]

    def everywhere(self) -> list[Record]:
        """Every open transaction of the process."""
        records = [*list(self._sessions.values()), *list(self._connections.values())]
        return [record for record in records if record.is_open]

    def session(self, session: Session) -> SessionRecord | None:
        """The open transaction of a Session, None when it is in none."""
        record = self._sessions.get(id(session))
        return record if record is not None and record.session is session else None

    def connection(self, connection: Connection) -> ConnectionRecord | None:
        """The open transaction of a Connection, None when it is in none."""
        record = self._connections.get(id(connection))
        return record if record is not None and record.connection is connection else None

    def begin(self, record: Record) -> None:
        """Remember a transaction that is begun here and now."""
        self.add(record)
        owner = record.mark.owner()
        self._by_owner.setdefault(owner, {})[id(record)] = record
        self.note_change()
        _inherited.set((*self.inherited(), record))

    def note_change(self) -> None:
        """What a search has found may be another thing now."""
        self.change = next(self._changes)

    def add(self, record: Record) -> None:
        """Remember a transaction whose beginner is not known."""
        if isinstance(record, SessionRecord):
            self._sessions[record.key] = record
        elif isinstance(record, ConnectionRecord):
            self._connections[record.key] = record

    def remove(self, record: Record) -> None:
        """A transaction has ended."""
        record.found = None
        self.note_change()
        if self._sessions.get(record.key) is record:
            del self._sessions[record.key]
        elif self._connections.get(record.key) is record:
            del self._connections[record.key]
        owner = record.mark.owner()
        if owner is not None:
            self._by_owner.get(owner, {}).pop(id(record), None)
        if isinstance(record, SessionRecord):
            for connection in record.connections:
                if record in connection.sessions:
                    connection.sessions.remove(record)

    def forget_everything(self) -> None:
        """After a fork: what was open belongs to the parent."""
        self._sessions.clear()
        self._connections.clear()
        self._by_owner.clear()
        self.note_change()
        _inherited.set(())


#: SQLAlchemy's Session and Engine classes are one for the whole process, and so are their transactions.
register = Register()
os.register_at_fork(after_in_child=register.forget_everything)
