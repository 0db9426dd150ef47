"""Where the messages of a dispatch go, and how they get there.

Into the caller's transaction: at once on a synchronous Connection, with the commit otherwise. Or into
a short transaction of our own. Nothing here ever commits, rolls back or flushes what is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy.engine import Engine

from ..errors import TransactionError
from ..message import OutboxMessage
from ..storage.database import Database
from .records import Record
from .tracking import tracker
from .writing import refuse_unusable, store

__all__ = ["OpenPlace", "OwnPlace", "Place", "Sink", "add_to"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPlace:
    """A short transaction of our own."""

    database: Database

    def add(self, messages: Sequence[OutboxMessage]) -> None:
        """Store messages and commit. Raises SchemaError or DatabaseError."""
        self.database.run(lambda connection: store(connection, self.database, messages))

    def call_before_commit(self, task_name: str, action: Callable[[], None]) -> None:
        """Call ``action`` at once: there is no transaction yet."""
        action()

    def call_after_commit(self, task_name: str, action: Callable[[], None]) -> None:
        """Call ``action`` at once: there is no transaction."""
        action()

    def call_when_dropped(self, task_name: str, action: Callable[[], None]) -> None:
        """Never call ``action``: what is committed at once is not dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPlace:
    """An open transaction of the caller's, on ``engine``, which is that of ``database``."""

    database: Database
    engine: Engine
    record: Record

    def check(self) -> None:
        """Raise TransactionError where nothing could be stored, or nothing be rolled back."""
        refuse_unusable(self.database, self.engine, self.record.connection_on(self.database))
        if self.record.is_unknown:
            raise TransactionError(
                "expected a transaction begun after celery_outbox was imported, found one on "
                f"{self.database.name!r} that was open before. Import it when the application starts."
            )
        if self.record.is_past_on(self.database):
            raise TransactionError(
                f"expected a transaction that can still write, found that {self.database.name!r} "
                "has been prepared for its two-phase commit, or committed, already. Dispatch before."
            )

    def add(self, messages: Sequence[OutboxMessage]) -> None:
        """Store messages with what the caller writes; commits nothing."""
        connection = self.record.writes_now_on(self.database)
        if connection is None:
            tracker.wait(self.record, (self.database, self.engine), messages)
        else:
            try:
                store(connection, self.database, messages)
            except BaseException:
                tracker.note_torn(connection)
                raise

    def call_before_commit(self, task_name: str, action: Callable[[], None]) -> None:
        """Call ``action`` before COMMIT, before messages are written; its error fails the commit."""
        if self.record.is_written_on(self.database):
            action()  # a listener of the commit itself dispatches: there is no later moment
        else:
            tracker.call(self.record, (self.database, self.engine), task_name, before=action)

    def call_after_commit(self, task_name: str, action: Callable[[], None]) -> None:
        """Call ``action`` after the root commit of the transaction; never after a rollback."""
        tracker.call(self.record, (self.database, self.engine), task_name, after=action)

    def call_when_dropped(self, task_name: str, action: Callable[[], None]) -> None:
        """Call ``action`` when what is dispatched here now goes without a commit."""
        tracker.call(
            self.record,
            (self.database, self.engine),
            task_name,
            after=lambda: None,
            dropped=action,
        )


Place = OpenPlace | OwnPlace

#: What takes the messages of a dispatch to their place.
Sink = Callable[[Place, Sequence[OutboxMessage]], None]


def add_to(place: Place, messages: Sequence[OutboxMessage]) -> None:
    """The sink of every day: store them there."""
    place.add(messages)
