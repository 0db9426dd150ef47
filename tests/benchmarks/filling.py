"""Filling an outbox table with many rows at once, as they stand after weeks of work."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from celery_outbox.storage.database import Database
from celery_outbox.storage.schema import FAR_FUTURE

_DAY = 86_400.0

_FRESH_ID = {
    "postgresql": sa.cast(sa.func.gen_random_uuid(), sa.String(36)),
    "mysql": sa.func.uuid(),
    "sqlite": sa.func.lower(sa.func.hex(sa.func.randomblob(16))),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """The message that every row holds: a real one, dispatched once."""

    broker: str
    message: str
    body: bytes


def fill(
    database: Database, pattern: Pattern, *, ready: int = 0, delayed: int = 0, finished: int = 0
) -> None:
    """Add rows: first those that are out of the way, so that they stand in front; then the ready.

    `finished` rows are failed and delivered ones, half each.
    """
    c = database.tables.messages.c
    far, error = sa.literal(FAR_FUTURE, c.scheduled_at.type), sa.literal("ConnectionError: gone")
    with database.begin() as connection:
        clock = database.dialect.clock()
        kept = {c.scheduled_at: far, c.finished_at: clock, c.attempts: sa.literal(3)}
        _add(connection, database, pattern, finished // 2, 0.0, kept | {c.error: error})
        _add(connection, database, pattern, finished - finished // 2, 0.0, kept)
        _add(connection, database, pattern, delayed, _DAY, {})
        _add(connection, database, pattern, ready, -ready / 1000, {})


def analyze(database: Database, engine: sa.Engine) -> None:
    """Bring the planner's statistics up to date, as each server does by itself in time."""
    statement = {"mysql": "ANALYZE TABLE {}"}.get(engine.dialect.name, "ANALYZE {}")
    with engine.connect() as connection:
        connection.exec_driver_sql(statement.format(database.tables.messages.name))
        connection.commit()


def _add(
    connection: sa.Connection,
    database: Database,
    pattern: Pattern,
    count: int,
    first_in: float,
    values: Mapping[sa.Column[Any], sa.ColumnElement[Any]],
) -> None:
    """Add `count` rows, a millisecond apart, the first due in `first_in` seconds."""
    if not count:
        return
    if connection.dialect.name == "mysql":
        connection.exec_driver_sql(f"SET SESSION max_recursive_iterations = {count + 1}")
    c, clock = database.tables.messages.c, database.dialect.clock()
    start = sa.select(sa.literal(1).label("n")).cte("numbers", recursive=True)
    numbers = start.union_all(sa.select(start.c.n + 1).where(start.c.n < count))
    offset = numbers.c.n * sa.literal_column("0.001") + sa.literal(first_in, sa.Float(53))
    row = {
        c.broker: sa.literal(pattern.broker),
        c.task_id: _FRESH_ID[connection.dialect.name],
        c.task_name: sa.literal("shop.send_receipt"),
        c.queue: sa.literal("celery"),
        c.message: sa.literal(pattern.message),
        c.body: sa.literal(pattern.body),
        c.scheduled_at: database.dialect.shifted(clock, offset),
        c.attempts: sa.literal_column("0"),
        c.created_at: clock,
    } | dict(values)
    connection.execute(
        sa.insert(database.tables.messages).from_select(
            list(row), sa.select(*row.values()).select_from(numbers)
        )
    )
