"""What the tests of the store begin with: messages to add, claims to make, rows to look at."""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa

from celery_outbox.message import ClaimedMessage, Envelope, OutboxMessage
from celery_outbox.storage.database import Database
from celery_outbox.storage.store import Claim, Failure

BROKER = "shop"
LEASE = timedelta(minutes=5)
HOUR = timedelta(hours=1)


def make_message(task_id: str = "id-1", **changes: Any) -> OutboxMessage:
    """Make a message without delay, deadline or retry policy, but for the changes."""
    envelope = Envelope(
        exchange="",
        routing_key="celery",
        content_type="application/json",
        content_encoding="utf-8",
        headers={"id": task_id, "task": "shop.add"},
    )
    values: dict[str, Any] = {
        "task_id": task_id,
        "task_name": "shop.add",
        "broker": BROKER,
        "queue": "celery",
        "envelope": envelope.to_text(),
        "body": b"[[1, 2], {}, {}]",
        "made_at": time.monotonic(),
    }
    return OutboxMessage(**values | changes)


def add(database: Database, *messages: OutboxMessage) -> None:
    """Store messages in a transaction of their own."""
    with database.begin() as connection:
        database.store.add(connection, messages)


def claim(
    database: Database, limit: int = 100, *, broker: str = BROKER, lease: timedelta = LEASE
) -> Claim:
    """Claim in a transaction of its own, as the relay does."""
    return database.run(
        lambda connection: database.store.claim(connection, broker=broker, limit=limit, lease=lease)
    )


def claim_one(database: Database) -> tuple[str, ClaimedMessage]:
    """Claim the one ready message; return the claim token and the message."""
    made = claim(database)
    (message,) = made.messages
    return made.token, message


def fail(
    database: Database, token: str, row_id: int, error: str, delay: timedelta | None = HOUR
) -> int:
    """Settle one message as failed in a transaction of its own."""
    failures: Mapping[int, Failure] = {row_id: Failure(error=error, delay=delay)}
    return database.run(lambda connection: database.store.fail(connection, token, failures))


def rows(database: Database) -> Sequence[sa.Row[Any]]:
    """Return every row, in the order of their ids."""
    t = database.tables.messages
    with database.begin() as connection:
        return connection.execute(sa.select(t).order_by(t.c.id)).all()


def change(database: Database, task_id: str | None = None, **values: Any) -> None:
    """Overwrite columns by hand, of one task or of every row."""
    t = database.tables.messages
    statement = sa.update(t).values(values)
    if task_id is not None:
        statement = statement.where(t.c.task_id == task_id)
    with database.begin() as connection:
        connection.execute(statement)


def hours_from_now(hours: float) -> datetime:
    """Return an instant that no slow machine can mistake for now."""
    return datetime.now(UTC) + hours * HOUR


def ids(made: Claim) -> list[str]:
    """Return the task ids of a claim, in its order."""
    return [message.task_id for message in made.messages]
