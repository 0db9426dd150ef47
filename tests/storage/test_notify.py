"""What PostgreSQL tells the relays: once for a transaction, and only with a reason to look."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from celery import group
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from celery_outbox import Outbox
from celery_outbox.message import OutboxMessage
from celery_outbox.storage.database import Database
from celery_outbox.storage.dialects.postgresql import PostgreSQL
from celery_outbox.storage.install import install
from celery_outbox.storage.schema import Tables
from tests.relay.apps import make_outbox, send
from tests.servers import DatabaseServer
from tests.storage.rows import add, make_message, rows
from tests.waiting import wait_until

TABLE = "celery_outbox"
#: More than two INSERTs take.
MANY = 1100
END = "the end"


class Ear:
    """Hears every notification of one outbox table, by a connection of its own."""

    def __init__(self, engine: sa.Engine, table: str = TABLE) -> None:
        url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        self.connection = psycopg.connect(url, autocommit=True)
        self.channel = PostgreSQL().channel(Tables.build(table, "postgresql"))
        self.payloads: list[str] = []
        self.connection.add_notify_handler(lambda told: self.payloads.append(told.payload))
        self.connection.execute(f"LISTEN {self.channel}")

    def heard(self) -> list[str]:
        """Return what came since the last time; PostgreSQL tells in the order of the commits."""
        self.connection.execute(f"NOTIFY {self.channel}, '{END}'")
        wait_until(lambda: self.connection.execute("SELECT 1") and END in self.payloads)
        heard, self.payloads[:] = self.payloads[: self.payloads.index(END)], []
        return heard


@pytest.fixture(scope="module")
def engine(postgresql: DatabaseServer) -> Iterator[sa.Engine]:
    engine = sa.create_engine(postgresql.create_database())
    install(Database("default", engine, TABLE))
    yield engine
    engine.dispose()


@pytest.fixture
def database(engine: sa.Engine) -> Database:
    """A database with the table installed and nothing in it."""
    database = Database("default", engine, TABLE)
    with database.begin() as connection:
        connection.execute(sa.delete(database.tables.messages))
    return database


@pytest.fixture
def ear(engine: sa.Engine) -> Iterator[Ear]:
    ear = Ear(engine)
    yield ear
    ear.connection.close()


@pytest.fixture
def outbox(database: Database, engine: sa.Engine) -> Iterator[Outbox]:
    outbox = make_outbox("memory://", engine)
    yield outbox
    outbox.app.close()


def messages(count: int, **changes: Any) -> list[OutboxMessage]:
    return [make_message(f"id-{number}", **changes) for number in range(count)]


# By values, by one array for each column, and by several INSERTs.
@pytest.mark.parametrize("count", [1, 3, 50, MANY])
def test_a_transaction_that_stores_notifies_once(count: int, database: Database, ear: Ear) -> None:
    add(database, *messages(count))
    assert ear.heard() == [""]
    assert len(rows(database)) == count


def test_a_transaction_that_stores_again_and_again_notifies_once(database: Database, ear: Ear) -> None:
    with database.begin() as connection:
        for number in range(30):
            database.store.add(connection, [make_message(f"id-{number}")])
        assert ear.heard() == []
    assert ear.heard() == [""]


def test_each_transaction_notifies_anew_on_the_same_connection(
    database: Database, engine: sa.Engine, ear: Ear
) -> None:
    with engine.connect() as connection:
        for number in range(8):
            with connection.begin():
                database.store.add(connection, [make_message(f"id-{number}")])
    assert ear.heard() == [""] * 8


def test_nobody_is_notified_of_what_is_rolled_back(
    database: Database, engine: sa.Engine, ear: Ear
) -> None:
    with engine.connect() as connection:
        with connection.begin() as transaction:
            database.store.add(connection, messages(50))
            transaction.rollback()
        assert ear.heard() == []
        with connection.begin():
            database.store.add(connection, messages(1))
        assert ear.heard() == [""]


def soon(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "changes",
    [{"countdown": 60.0}, {"eta": soon(3600)}, {"countdown": 60.0, "lead": 30.0}],
    ids=["countdown", "eta", "lead"],
)
@pytest.mark.parametrize("count", [1, 50])
def test_nobody_is_notified_of_what_is_not_due_yet(
    count: int, changes: dict[str, Any], database: Database, ear: Ear
) -> None:
    add(database, *messages(count, **changes))
    assert ear.heard() == []
    assert len(rows(database)) == count


@pytest.mark.parametrize(
    "changes",
    [
        {"countdown": 0.0},
        {"eta": soon(-60)},
        {"countdown": 60.0, "lead": 90.0},
        {"eta": soon(3600), "lead": 9000.0},
        {"expires_in": 60.0},
    ],
    ids=["countdown", "eta", "lead", "lead of eta", "expires"],
)
@pytest.mark.parametrize("count", [1, 50])
def test_relays_are_notified_of_what_may_leave_at_once(
    count: int, changes: dict[str, Any], database: Database, ear: Ear
) -> None:
    add(database, *messages(count, **changes))
    assert ear.heard() == [""]
    assert {row.attempts for row in rows(database)} == {0}


@pytest.mark.parametrize("count", [2, MANY])
def test_one_message_that_is_due_among_delayed_ones_is_enough(
    count: int, database: Database, ear: Ear
) -> None:
    add(database, *messages(count, countdown=60.0), make_message("due"))
    assert ear.heard() == [""]


def test_nobody_is_notified_when_that_is_turned_off(engine: sa.Engine, ear: Ear) -> None:
    silent = Database("default", engine, TABLE, notify=False)
    add(silent, *messages(1))
    add(silent, *messages(MANY))
    assert ear.heard() == []


def test_what_follows_a_savepoint_that_was_rolled_back_notifies(
    database: Database, engine: sa.Engine, ear: Ear
) -> None:
    with engine.begin() as connection:
        savepoint = connection.begin_nested()
        database.store.add(connection, messages(1))
        savepoint.rollback()
        database.store.add(connection, messages(1))
    assert ear.heard() == [""]


def test_nobody_is_notified_of_a_savepoint_that_was_rolled_back(
    database: Database, engine: sa.Engine, ear: Ear
) -> None:
    with engine.begin() as connection:
        savepoint = connection.begin_nested()
        database.store.add(connection, messages(1))
        savepoint.rollback()
    assert ear.heard() == []


def test_a_savepoint_takes_back_nothing_of_what_was_stored_before_it(
    database: Database, engine: sa.Engine, ear: Ear
) -> None:
    with engine.begin() as connection:
        database.store.add(connection, messages(1))
        savepoint = connection.begin_nested()
        database.store.add(connection, messages(1))
        savepoint.rollback()
    assert ear.heard() == [""]


def test_savepoints_that_are_kept_notify_once(database: Database, engine: sa.Engine, ear: Ear) -> None:
    with engine.begin() as connection:
        for _ in range(3):
            with connection.begin_nested(), connection.begin_nested():
                database.store.add(connection, messages(1))
        database.store.add(connection, messages(1))
    assert ear.heard() == [""]


def test_savepoints_in_plain_sql_take_back_what_they_enclose(
    database: Database, engine: sa.Engine, ear: Ear
) -> None:
    with engine.begin() as connection:
        connection.execute(sa.text("SAVEPOINT mine"))
        database.store.add(connection, messages(1))
        connection.execute(sa.text("ROLLBACK TO SAVEPOINT mine"))
        database.store.add(connection, messages(1))
    assert ear.heard() == [""]


@pytest.mark.parametrize("is_prepared", [True, False])
def test_a_two_phase_commit_succeeds_without_notifying(
    is_prepared: bool, database: Database, engine: sa.Engine, ear: Ear
) -> None:
    with engine.connect() as connection:
        transaction = connection.begin_twophase()
        database.store.add(connection, messages(1))
        if is_prepared:
            transaction.prepare()
        transaction.commit()
    assert ear.heard() == []
    assert len(rows(database)) == 1


@pytest.mark.parametrize(("count", "inserts"), [(1, 1), (3, 1), (50, 1), (MANY, 3)])
def test_notifying_takes_no_statement_of_its_own(
    count: int, inserts: int, database: Database, engine: sa.Engine
) -> None:
    statements: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: object) -> None:
        statements.append(statement)

    sa.event.listen(engine, "before_cursor_execute", note)
    add(database, *messages(count))
    sa.event.remove(engine, "before_cursor_execute", note)
    assert [statement.split()[0] for statement in statements] == ["INSERT"] * inserts
    assert "".join(statements).count("pg_notify") == 1


@pytest.mark.parametrize("others", ["other_outbox", "elsewhere.celery_outbox", "o" * 63])
def test_a_table_does_not_notify_the_relays_of_another(
    others: str, engine: sa.Engine, database: Database, ear: Ear
) -> None:
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE SCHEMA IF NOT EXISTS elsewhere"))
    other = Database("other", engine, others)
    install(other)
    other_ear = Ear(engine, others)
    add(other, *messages(1))
    assert (ear.heard(), other_ear.heard()) == ([], [""])
    add(database, *messages(1))
    assert (ear.heard(), other_ear.heard()) == ([""], [])
    other_ear.connection.close()


def test_a_session_notifies_once_for_all_its_tasks(outbox: Outbox, engine: sa.Engine, ear: Ear) -> None:
    with Session(engine) as session, session.begin():
        session.execute(sa.text("SELECT 1"))
        task = outbox.app.tasks["shop.add"]
        group(task.s(number, 1) for number in range(MANY)).apply_async(via_outbox=True)
        with session.begin_nested() as savepoint:
            send(outbox)
            savepoint.rollback()
        send(outbox)
    assert ear.heard() == [""]


def test_a_session_whose_only_task_went_with_a_savepoint_notifies_nobody(
    outbox: Outbox, engine: sa.Engine, ear: Ear
) -> None:
    with Session(engine) as session, session.begin():
        session.execute(sa.text("SELECT 1"))
        with session.begin_nested() as savepoint:
            send(outbox)
            savepoint.rollback()
    assert ear.heard() == []


def test_a_two_phase_session_commits_without_notifying(
    outbox: Outbox, engine: sa.Engine, ear: Ear
) -> None:
    with Session(engine, twophase=True) as session, session.begin():
        session.execute(sa.text("SELECT 1"))
        send(outbox)
    assert ear.heard() == []


def test_a_task_in_a_transaction_of_its_own_notifies(outbox: Outbox, ear: Ear) -> None:
    send(outbox)
    send(outbox, countdown=3600)
    assert ear.heard() == [""]


@pytest.mark.parametrize("count", [1, 50])
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_an_async_session_notifies_once(
    driver: str, count: int, outbox: Outbox, engine: sa.Engine, ear: Ear
) -> None:
    async_engine = create_async_engine(engine.url.set(drivername=f"postgresql+{driver}"))

    async def store() -> None:
        async with AsyncSession(async_engine) as session, session.begin():
            await session.execute(sa.text("SELECT 1"))
            for _ in range(count):
                send(outbox)
        await async_engine.dispose()

    asyncio.run(store())
    assert ear.heard() == [""]


def test_the_setting_turns_it_off(database: Database, engine: sa.Engine, ear: Ear) -> None:
    outbox = make_outbox("memory://", engine, notify=False)
    with engine.begin():
        send(outbox)
    assert ear.heard() == []
    assert not outbox.databases["default"].can_listen
    outbox.app.close()


@pytest.mark.parametrize("kind", ["sqlite", "mariadb"])
def test_other_databases_store_without_notifying(kind: str, request: pytest.FixtureRequest) -> None:
    engine = sa.create_engine(request.getfixturevalue(f"{kind}_url"))
    database = Database("default", engine, TABLE)
    install(database)
    statements: list[str] = []
    sa.event.listen(engine, "before_cursor_execute", lambda *told: statements.append(told[2]))
    with database.begin() as connection:
        statements.clear()
        database.store.add(connection, messages(3))
    assert [statement.split()[0] for statement in statements] == ["INSERT"]
    assert "notify" not in statements[0]
    assert not database.can_listen
    engine.dispose()
