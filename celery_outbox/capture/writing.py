"""The moment of writing: messages become rows, in the transaction that a Connection is in."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from ..errors import TransactionError
from ..message import OutboxMessage
from ..signals import outbox_stored
from ..storage.database import Database
from .records import Waiting

__all__ = ["refuse_unusable", "store", "write"]


def write(connection: Connection, waiting: Sequence[Waiting]) -> None:
    """Insert messages in the transaction that ``connection`` is in.

    Raises TransactionError when they could not be rolled back, and like ``store``.
    """
    by_database: dict[int, list[Waiting]] = {}
    for each in waiting:
        by_database.setdefault(id(each.database), []).append(each)
    for group in by_database.values():
        messages = [each.message for each in group if each.message is not None]
        # Seen at each dispatch already, but the Session may have taken another Connection since.
        refuse_unusable(group[0].database, connection.engine, connection)
        store(connection, group[0].database, messages)


def refuse_unusable(database: Database, engine: Engine, connection: Connection | None) -> None:
    """Raise TransactionError where a rollback would undo nothing, or a write is not allowed."""
    if database.dialect.is_autocommit(engine, connection):
        raise TransactionError(
            f"expected a transaction that can be rolled back, found {database.name!r} in AUTOCOMMIT "
            "mode, where each statement is permanent at once. Use a connection without "
            "isolation_level='AUTOCOMMIT', or dispatch outside it."
        )
    if database.dialect.is_read_only(engine, connection):
        raise TransactionError(
            f"expected a transaction that can write, found {database.name!r} opened for reading "
            "only. Dispatch inside a transaction that can write."
        )


def store(connection: Connection, database: Database, messages: Sequence[OutboxMessage]) -> None:
    """Insert messages of one database, on a connection that can write and roll back.

    Where a broker's own tables are in the same database they go there, if they need no relay: their
    commit delivers them.

    Raises SchemaError when the outbox's table is missing or not as expected, DatabaseError when it may
    not be written. Every other error is the caller's to see as it is: retrying after a deadlock rests
    on its class.
    """
    try:
        to_relay = database.queues.add(connection, messages)
    except DBAPIError as error:
        error.hide_parameters = True  # they are a payload
        raise
    try:
        database.store.add(connection, to_relay)
    except DBAPIError as error:
        error.hide_parameters = True  # they are a payload
        if database.dialect.trouble(error) is not None:
            raise database.explain(error) from error
        raise
    outbox_stored.send(sender=database.name, task_ids=[message.task_id for message in messages])
