"""Adding: many messages in few statements, and every byte as it was given."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from celery_outbox.message import OutboxMessage
from celery_outbox.policy import RetryPolicy
from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
from tests.storage.rows import add, claim, ids, make_message, rows

EVERY_BYTE = bytes(range(256))
MIB = 1024 * 1024
ETA = datetime(2099, 1, 2, 3, 4, 5, 678901, UTC)


@contextmanager
def inserts() -> Iterator[list[str]]:
    """Collect the INSERT statements that are sent to any database."""
    found: list[str] = []

    def note(connection: sa.Connection, cursor: object, statement: str, *rest: object) -> None:
        if statement.startswith("INSERT"):
            found.append(statement)

    sa.event.listen(sa.Engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", note)


def test_a_hundred_messages_are_one_insert(database: Database) -> None:
    with inserts() as statements:
        add(database, *(make_message(f"{number}") for number in range(100)))
    assert len(statements) == 1
    assert len(rows(database)) == 100


def test_a_thousand_messages_are_at_most_three_inserts(database: Database) -> None:
    with inserts() as statements:
        add(database, *(make_message(f"{number}") for number in range(1000)))
    assert len(statements) <= 3
    assert len(rows(database)) == 1000


def test_messages_of_every_kind_share_one_insert(database: Database) -> None:
    with inserts() as statements:
        add(
            database,
            make_message("plain"),
            make_message("delayed", countdown=60.0),
            make_message("expiring", expires_in=60.0),
            make_message("plain too"),
        )
    assert len(statements) == 1
    assert [
        (row.task_id, row.deliver_at is None, row.expires_at is None) for row in rows(database)
    ] == [
        ("plain", True, True),
        ("delayed", False, True),
        ("expiring", True, False),
        ("plain too", True, True),
    ]


def of_every_kind() -> list[OutboxMessage]:
    """More messages than go as single values, of every kind, with what drivers have to escape."""
    odd = "%s %% %(x)s :x ? $1 \\ ' \" ` {,NULL} é 漢 \U0001f600"
    policy = RetryPolicy(
        max_attempts=7, base_delay=timedelta(microseconds=1), max_delay=timedelta(days=300_000)
    )
    return [
        *(make_message(f"plain {number}") for number in range(10)),
        make_message(odd, task_name=odd, queue=odd, envelope=odd, body=EVERY_BYTE),
        make_message("NULL", task_name="a\0\ud800", body=b""),
        make_message("delayed", countdown=3600.5, lead=60.0),
        make_message("at once", countdown=0.0),
        make_message("late", eta=ETA, lead=900.0, expires_in=7200.0),
        make_message("retrying", retry=policy),
        make_message("plain too"),
    ]


def in_full(database: Database) -> list[tuple[Any, ...]]:
    """What was stored of each row; its instants as seconds since it was made."""

    def seconds(row: sa.Row[Any], instant: datetime | None) -> Any:
        return instant and (instant - row.created_at).total_seconds()

    return [
        (
            *row[1:7],
            *(seconds(row, each) for each in (row.scheduled_at, row.deliver_at, row.expires_at)),
            *(row.attempts, row.max_attempts, row.base_delay, row.max_delay),
        )
        for row in rows(database)
    ]


def about(found: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The same, to be compared with what was stored a moment earlier or later."""
    return [
        tuple(pytest.approx(each, abs=30) if isinstance(each, float) else each for each in row)
        for row in found
    ]


def test_many_messages_are_stored_like_one_each(database: Database) -> None:
    for message in of_every_kind():
        add(database, message)
    one_each = in_full(database)
    with database.begin() as connection:
        connection.execute(sa.delete(database.tables.messages))
    with inserts() as statements:
        add(database, *of_every_kind())
    assert len(statements) == 1
    assert in_full(database) == about(one_each)
    assert {row.deliver_at for row in rows(database) if row.task_id == "late"} == {ETA}


def test_rows_get_ids_in_the_order_in_which_messages_were_added(database: Database) -> None:
    names = [f"{number}" for number in range(700)]
    add(database, *(make_message(name) for name in names))
    assert [row.task_id for row in rows(database)] == names


def test_adding_nothing_sends_nothing(database: Database) -> None:
    with inserts() as statements:
        add(database)
    assert statements == []


def test_a_rollback_takes_the_messages_with_it(database: Database) -> None:
    with pytest.raises(KeyboardInterrupt), database.begin() as connection:
        database.store.add(connection, [make_message()])
        raise KeyboardInterrupt
    assert rows(database) == []


@pytest.mark.parametrize(
    "body",
    [
        EVERY_BYTE,
        b"",
        b"\\ ' \" \x1a %s %% :name ? $1 \r\n",
        EVERY_BYTE * (5 * MIB // 256),
        b"'" * (5 * MIB),
    ],
    ids=["every byte", "empty", "specials", "5 MiB", "5 MiB to escape"],
)
def test_a_body_comes_back_as_it_was_given(database: Database, body: bytes) -> None:
    add(database, make_message(body=body))
    (message,) = claim(database).messages
    assert message.body == body


def test_large_messages_are_split_below_what_a_statement_may_hold(database: Database) -> None:
    bodies = [bytes([number]) * (3 * MIB) for number in range(8)]
    add(database, *(make_message(f"{index}", body=body) for index, body in enumerate(bodies)))
    assert [message.body for message in claim(database).messages] == bodies


def test_texts_come_back_as_they_were_given(database: Database) -> None:
    odd = "%s %% %(x)s :x ? $1 \\ ' \" ` é 漢 \U0001f600"
    add(database, make_message(odd, task_name=odd, queue=odd, envelope=odd))
    (message,) = claim(database).messages
    found = (message.task_id, message.task_name, message.queue, message.envelope)
    assert found == (odd, odd, odd, odd)


def test_what_is_only_for_people_is_cut_to_its_column(database: Database) -> None:
    add(database, make_message(task_name="n" * 300, queue="q" * 300))
    (row,) = rows(database)
    assert (row.task_name, row.queue) == ("n" * 255, "q" * 255)


def test_what_is_only_for_people_may_hold_what_no_text_column_takes(database: Database) -> None:
    add(database, make_message(task_name="a\0\ud800b", queue="q\0\udfff"))
    (row,) = rows(database)
    assert (row.task_name[0], row.task_name[-1], row.queue[0]) == ("a", "b", "q")


def test_a_task_id_may_be_stored_twice(database: Database) -> None:
    add(database, make_message("same"), make_message("same"))
    assert ids(claim(database)) == ["same", "same"]


@pytest.mark.parametrize(
    ("server", "driver"),
    [("postgresql", "asyncpg"), ("postgresql", "psycopg"), ("sqlite", "aiosqlite")],
)
def test_messages_are_added_through_asyncio_drivers(
    server: str, driver: str, request: pytest.FixtureRequest
) -> None:
    url = sa.make_url(request.getfixturevalue(f"{server}_url"))
    engine = create_async_engine(url.set(drivername=f"{server}+{driver}"))
    database = Database("default", engine, "celery_outbox")
    install(database)
    messages = of_every_kind()

    async def store() -> None:
        async with engine.begin() as connection:
            await connection.run_sync(database.store.add, messages[:5])
            await connection.run_sync(database.store.add, messages[5:])
            await connection.run_sync(database.store.add, messages)
        await engine.dispose()

    asyncio.run(store())
    add(database, *of_every_kind())
    stored, count = in_full(database), len(messages)
    assert stored[:count] == about(stored[count : 2 * count]) == stored[2 * count :]
