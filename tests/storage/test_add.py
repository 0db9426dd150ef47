"""Adding: many messages in few statements, and every byte as it was given."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
from tests.storage.rows import add, claim, ids, make_message, rows

EVERY_BYTE = bytes(range(256))
MIB = 1024 * 1024


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
    messages = [
        make_message("plain", body=EVERY_BYTE),
        make_message("late", countdown=-1.0, expires_in=900.0),
        make_message("plain too"),
    ]

    async def store() -> None:
        async with engine.begin() as connection:
            await connection.run_sync(database.store.add, messages)
        await engine.dispose()

    asyncio.run(store())
    claimed = claim(database).messages
    with database.begin() as connection:
        own = connection.engine
    own.dispose()
    assert [message.task_id for message in claimed] == ["plain", "late", "plain too"]
    assert claimed[0].body == EVERY_BYTE
    assert claimed[1].expires_in == pytest.approx(900, abs=20)
