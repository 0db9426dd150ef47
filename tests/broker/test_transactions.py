"""A task for a broker in the same database is delivered by the caller's own commit."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from celery import group
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from celery_outbox import signals
from celery_outbox.testing import OutboxRecorder
from tests.broker.conftest import Beside, MakeBeside
from tests.capture.shop import OutOfStockError
from tests.relay.apps import relay_once

# Kombu's tables use what SQLAlchemy 2.1 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")

Begin = Callable[[sa.Engine], Any]


@contextmanager
def session(engine: sa.Engine) -> Iterator[Session]:
    with Session(engine) as it, it.begin():
        yield it


@contextmanager
def connection(engine: sa.Engine) -> Iterator[sa.Connection]:
    with engine.begin() as it:
        yield it


@contextmanager
def session_on_connection(engine: sa.Engine) -> Iterator[Session]:
    with engine.begin() as outer, Session(outer) as it, it.begin():
        yield it


ways = pytest.mark.parametrize("begin", [session, connection, session_on_connection])


@ways
def test_it_is_seen_from_the_commit_on_and_needs_no_relay(begin: Begin, beside: Beside) -> None:
    with begin(beside.engine) as where:
        sent = [beside.order_and_send(where, number) for number in range(3)]
        assert beside.on_broker == []
    assert beside.on_broker == sent
    assert (beside.to_relay, beside.orders) == ([], [0, 1, 2])


@ways
def test_a_rollback_takes_it_back(begin: Begin, beside: Beside) -> None:
    with pytest.raises(OutOfStockError), begin(beside.engine) as where:
        beside.order_and_send(where, 1)
        raise OutOfStockError
    assert (beside.on_broker, beside.to_relay, beside.orders) == ([], [], [])


@ways
def test_so_does_the_rollback_of_a_savepoint(begin: Begin, beside: Beside) -> None:
    with begin(beside.engine) as where:
        before = beside.order_and_send(where, 1)
        with pytest.raises(OutOfStockError), where.begin_nested():
            beside.order_and_send(where, 2)
            raise OutOfStockError
        with where.begin_nested():
            after = beside.order_and_send(where, 3)
    assert (beside.on_broker, beside.orders) == ([before, after], [1, 3])


def test_without_a_transaction_it_is_there_at_once(beside: Beside) -> None:
    sent = beside.send()
    assert (beside.on_broker, beside.to_relay) == ([sent], [])


@pytest.mark.parametrize(
    ("kind", "driver"),
    [
        ("postgresql", "psycopg_async"),
        ("postgresql", "asyncpg"),
        ("mariadb", "aiomysql"),
        ("sqlite", "aiosqlite"),
    ],
)
def test_in_an_async_session_and_connection(
    kind: str, driver: str, request: pytest.FixtureRequest, make_beside: MakeBeside
) -> None:
    beside = make_beside(request.getfixturevalue(f"{kind}_url"), "celery")
    url = beside.engine.url.set(drivername=f"{beside.engine.url.get_backend_name()}+{driver}")

    async def work() -> tuple[list[str], list[str]]:
        engine = create_async_engine(url)
        async with AsyncSession(engine) as where, where.begin():
            await where.execute(sa.select(1))
            sent = [beside.send(), beside.send()]
        async with engine.begin() as connection:
            await connection.execute(sa.select(1))
            sent.append(beside.send())
            before = beside.on_broker
        async with AsyncSession(engine) as where:
            await where.execute(sa.select(1))
            beside.send()
            await where.rollback()
        await engine.dispose()
        return sent, before

    sent, before = asyncio.run(work())
    assert before == sent[:2]
    assert (beside.on_broker, beside.to_relay) == (sent, [])


@contextmanager
def statements(engine: sa.Engine) -> Iterator[list[str]]:
    """What an engine is asked, until the block ends."""
    seen: list[str] = []

    def listener(connection: Any, cursor: Any, statement: str, *args: Any) -> None:
        seen.append(statement)

    event.listen(engine, "before_cursor_execute", listener)
    yield seen
    event.remove(engine, "before_cursor_execute", listener)


def test_many_of_one_commit_are_one_insert(beside: Beside) -> None:
    beside.send()
    task = beside.outbox.app.tasks["shop.add"]
    with statements(beside.engine) as seen, Session(beside.engine) as where, where.begin():
        where.execute(sa.select(1))
        results = group(task.s(number, 1) for number in range(50)).apply_async(via_outbox=True)
        sent = [each.id for each in results.results]
        sent += [each.id for each in beside.outbox.bulk([task.s(1, 1), task.s(2, 2)])]
    assert beside.on_broker[1:] == sent
    asked = [text.partition(" ")[0] for text in seen if "kombu" in text]
    # SQLite takes its lock first.
    assert [word for word in asked if word != "DELETE"] == ["SELECT", "INSERT"]


def test_what_is_delayed_beside_it_waits_in_the_outbox(beside: Beside) -> None:
    with Session(beside.engine) as where, where.begin():
        delayed = beside.order_and_send(where, 1, countdown=600)
        sent = beside.send()
        with pytest.raises(OutOfStockError), where.begin_nested():
            beside.order_and_send(where, 2, countdown=600)
            beside.send()
            raise OutOfStockError
    assert (beside.on_broker, beside.to_relay, beside.orders) == ([sent], [delayed], [1])


FORBID = {
    "postgresql": "ALTER TABLE kombu_message ADD CHECK (version = 7)",
    "mysql": "ALTER TABLE kombu_message ADD CHECK (version = 7)",
    "sqlite": "CREATE TRIGGER no BEFORE INSERT ON kombu_message BEGIN SELECT RAISE(ABORT, 'no'); END",
}


@ways
def test_what_the_table_refuses_fails_the_callers_commit(begin: Begin, beside: Beside) -> None:
    beside.send()
    if beside.engine.name != "sqlite":
        beside.change("DELETE FROM kombu_message")
    beside.change(FORBID[beside.engine.name])
    with pytest.raises(sa.exc.DBAPIError) as caught, begin(beside.engine) as where:
        beside.order_and_send(where, 1)
    assert "parameters hidden" in str(caught.value)
    assert (beside.to_relay, beside.orders) == ([], [])
    with Session(beside.engine) as where, where.begin():
        where.execute(sa.select(1))


def test_signals_and_recorders_hear_of_it(beside: Beside) -> None:
    heard: list[str] = []

    def listener(sender: str, task_ids: list[str], **kwargs: Any) -> None:
        heard.extend(task_ids)

    signals.outbox_stored.connect(listener)
    try:
        with OutboxRecorder(beside.outbox) as recorder:
            with Session(beside.engine) as where, where.begin():
                sent = [beside.order_and_send(where, 1), beside.send(countdown=60)]
            assert [task.id for task in recorder.assert_stored("shop.add", count=2)] == sent
    finally:
        signals.outbox_stored.disconnect(listener)
    assert heard == sent


def test_another_writer_in_between_does_not_fail_the_commit(
    sqlite_url: str, make_beside: MakeBeside
) -> None:
    beside = make_beside(sqlite_url, "celery")
    beside.change("PRAGMA journal_mode = WAL")
    event.listen(beside.engine, "connect", lambda driver, _: setattr(driver, "isolation_level", None))
    event.listen(beside.engine, "begin", lambda it: it.exec_driver_sql("BEGIN"))
    beside.engine.dispose()
    others: list[str] = []

    def write(connection: Any, cursor: Any, statement: str, *args: Any) -> None:
        if statement.startswith("INSERT INTO kombu_message") and not others:
            with sa.create_engine(sqlite_url, connect_args={"timeout": 0}).connect() as other:
                try:
                    other.exec_driver_sql("INSERT INTO orders (id) VALUES (9)")
                    other.commit()
                except sa.exc.OperationalError as error:
                    others.append(str(error.orig))

    event.listen(beside.engine, "before_cursor_execute", write)
    with Session(beside.engine) as where, where.begin():
        sent = beside.send()
    assert others == ["database is locked"]
    assert beside.on_broker == [sent]


def test_a_relay_finds_nothing_to_do(beside: Beside) -> None:
    sent = beside.send()
    relay_once(beside.outbox)
    assert beside.on_broker == [sent]
