"""AsyncSession: the call stands in the coroutine, without await; the session's commit stores it."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
)
from sqlalchemy.orm import Session

from tests.capture.async_support import DRIVERS, AsyncShop, lasting_shop, let_aiomysql_send_bytes
from tests.capture.shop import (
    TASK_NAME,
    TRACKING_LOGGER,
    Listen,
    Order,
    OutOfStockError,
)

Opened = Callable[[AsyncEngine], AbstractAsyncContextManager[AsyncSession]]


@pytest.fixture(scope="module", params=DRIVERS)
def lasting(request: pytest.FixtureRequest) -> Iterator[AsyncShop]:
    """A shop for each driver in turn."""
    with lasting_shop(request, request.param) as shop:
        yield shop


@pytest.fixture
def shop(lasting: AsyncShop, monkeypatch: pytest.MonkeyPatch) -> AsyncShop:
    let_aiomysql_send_bytes(monkeypatch)
    lasting.clear()
    return lasting


@asynccontextmanager
async def plain(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    async with AsyncSession(engine) as session:
        yield session
        await session.commit()


@asynccontextmanager
async def session_and_begin(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    async with AsyncSession(engine) as session, session.begin():
        yield session


def sessionmaker_begin(engine: AsyncEngine) -> AbstractAsyncContextManager[AsyncSession]:
    return async_sessionmaker(engine).begin()


@asynccontextmanager
async def without_autobegin(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    async with AsyncSession(engine, autobegin=False) as session:
        await session.begin()
        yield session
        await session.commit()


@asynccontextmanager
async def with_execution_options(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    async with AsyncSession(engine.execution_options(compiled_cache=None)) as session:
        yield session
        await session.commit()


@asynccontextmanager
async def scoped(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    registry = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)
    try:
        yield registry()
        await registry.commit()
    finally:
        await registry.remove()


#: For what does not depend on the driver.
on_sqlite = pytest.mark.parametrize("lasting", ["aiosqlite"], indirect=True)
ways = pytest.mark.parametrize(
    "opened",
    [
        plain,
        session_and_begin,
        sessionmaker_begin,
        without_autobegin,
        with_execution_options,
        scoped,
    ],
)


@on_sqlite
@ways
def test_every_way_to_begin_and_commit_stores(shop: AsyncShop, opened: Opened) -> None:
    async def main() -> None:
        async with opened(shop.async_engine) as session:
            session.add(Order(id=1))
            shop.send("1")

    shop.run(main)
    assert (shop.orders, shop.tasks) == ([1], ["1"])


@on_sqlite
@ways
def test_every_way_to_be_rolled_back_by_an_exception_stores_nothing(
    shop: AsyncShop, opened: Opened
) -> None:
    async def main() -> None:
        async with opened(shop.async_engine) as session:
            session.add(Order(id=1))
            await session.flush()
            shop.send("1")
            raise OutOfStockError

    with pytest.raises(OutOfStockError):
        shop.run(main)
    assert (shop.orders, shop.tasks) == ([], [])


def test_a_commit_stores_and_a_rollback_does_not_in_one_session(shop: AsyncShop) -> None:
    async def main() -> None:
        async with shop.session() as session:
            for number in range(4):
                session.add(Order(id=number))
                shop.send(str(number))
                assert shop.tasks == [str(done) for done in range(number) if done % 2 == 0]
                await (session.rollback() if number % 2 else session.commit())

    shop.run(main)
    assert (shop.orders, shop.tasks) == ([0, 2], ["0", "2"])


def test_a_dispatch_before_any_sql_is_stored_by_the_commit(shop: AsyncShop) -> None:
    async def main() -> None:
        async with shop.session() as session, session.begin():
            shop.send("1")

    shop.run(main)
    assert shop.tasks == ["1"]


def test_a_dispatch_before_any_sql_is_taken_back_by_the_rollback(shop: AsyncShop) -> None:
    async def main() -> None:
        async with shop.session() as session:
            await session.begin()
            shop.send("1")
            await session.rollback()

    shop.run(main)
    assert shop.tasks == []


def test_a_session_closed_without_a_commit_drops_its_tasks_and_says_which(
    shop: AsyncShop, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with shop.session() as session:
            session.add(Order(id=1))
            await session.flush()
            shop.send("1")

    with caplog.at_level(logging.WARNING, TRACKING_LOGGER):
        shop.run(main)
    assert (shop.orders, shop.tasks) == ([], [])
    assert TASK_NAME in caplog.text


def test_a_session_that_is_rolled_back_says_nothing(
    shop: AsyncShop, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with shop.session() as session:
            session.add(Order(id=1))
            await session.flush()
            shop.send("1")
            await session.rollback()

    with caplog.at_level(logging.WARNING, TRACKING_LOGGER):
        shop.run(main)
    assert caplog.text == ""


@on_sqlite
@pytest.mark.parametrize("end", ["reset", "invalidate", "close"])
def test_every_end_without_a_commit_drops_the_tasks(
    shop: AsyncShop, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    async def main() -> None:
        session = shop.session()
        session.add(Order(id=1))
        shop.send("dropped")
        await getattr(session, end)()
        shop.send("alone")
        await session.close()

    with caplog.at_level(logging.WARNING, TRACKING_LOGGER):
        shop.run(main)
    assert shop.tasks == ["alone"]
    assert TASK_NAME in caplog.text


@on_sqlite
def test_a_collected_session_drops_its_tasks_and_says_which(
    shop: AsyncShop, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        session = shop.session()
        session.add(Order(id=1))
        shop.send("dropped")
        del session
        gc.collect()
        shop.send("alone")

    with caplog.at_level(logging.WARNING, TRACKING_LOGGER):
        shop.run(main)
    assert shop.tasks == ["alone"]
    assert TASK_NAME in caplog.text


def test_a_commit_that_fails_stores_nothing_and_leaves_the_session_usable(shop: AsyncShop) -> None:
    async def main() -> None:
        async with shop.session() as session, session.begin():
            session.add(Order(id=1))
        async with shop.session() as session:
            session.add(Order(id=1))
            shop.send("failed")
            with pytest.raises(IntegrityError):
                await session.commit()
            await session.rollback()
            session.add(Order(id=2))
            shop.send("2")
            await session.commit()

    shop.run(main)
    assert (shop.orders, shop.tasks) == ([1, 2], ["2"])


@pytest.mark.parametrize("lasting", ["asyncpg", "psycopg"], indirect=True)
def test_a_commit_refused_by_the_database_stores_nothing(shop: AsyncShop) -> None:
    deferred = "ALTER TABLE orders ADD CONSTRAINT one UNIQUE (note) DEFERRABLE INITIALLY DEFERRED"

    async def main() -> None:
        async with shop.session() as session:
            await session.execute(sa.text(deferred))
            session.add_all([Order(id=1, note="same"), Order(id=2, note="same")])
            await session.flush()
            shop.send("failed")
            with pytest.raises(IntegrityError):
                await session.commit()
            await session.rollback()
            shop.send("alone")

    shop.run(main)
    assert (shop.orders, shop.tasks) == ([], ["alone"])


def test_listeners_of_the_sync_session_may_send_before_the_commit(
    shop: AsyncShop, listen: Listen
) -> None:
    async def main() -> None:
        async with shop.session() as session:
            listen(session.sync_session, "before_commit", lambda _: shop.send("before commit"))
            listen(session.sync_session, "after_flush", lambda *_: shop.send("flush"))
            session.add(Order(id=1))
            await session.commit()

    shop.run(main)
    assert (shop.orders, sorted(shop.tasks)) == ([1], ["before commit", "flush"])


def test_what_a_listener_sends_before_a_commit_that_fails_is_taken_back(
    shop: AsyncShop, listen: Listen
) -> None:
    async def main() -> None:
        async with shop.session() as session, session.begin():
            session.add(Order(id=1))
        async with shop.session() as session:
            listen(session.sync_session, "before_commit", lambda _: shop.send("1"))
            session.add(Order(id=1))
            with pytest.raises(IntegrityError):
                await session.commit()

    shop.run(main)
    assert shop.tasks == []


def test_a_function_run_in_the_sync_session_finds_its_transaction(shop: AsyncShop) -> None:
    def work(session: Session) -> None:
        with session.begin_nested():
            shop.order_and_send(session, 1)
        savepoint = session.begin_nested()
        shop.order_and_send(session, 2)
        savepoint.rollback()

    async def main() -> None:
        async with shop.session() as session, session.begin():
            await session.run_sync(work)

    shop.run(main)
    assert (shop.orders, shop.tasks) == ([1], ["1"])


def test_using_chooses_between_two_open_sessions(shop: AsyncShop) -> None:
    async def main() -> None:
        async with shop.session() as one, shop.session() as other:
            await one.begin()
            await other.begin()
            with shop.outbox.using(other):
                shop.send("other")
            with shop.outbox.using(one):
                shop.send("one")
            await one.rollback()
            await other.commit()

    shop.run(main)
    assert shop.tasks == ["other"]


def test_using_begins_a_session_that_has_not_begun(shop: AsyncShop) -> None:
    async def main() -> None:
        async with shop.session() as session:
            with shop.outbox.using(session):
                shop.send("rolled back")
            await session.rollback()
            with shop.outbox.using(session):
                shop.send("committed")
            await session.commit()

    shop.run(main)
    assert shop.tasks == ["committed"]


@on_sqlite
def test_using_takes_an_async_scoped_session(shop: AsyncShop) -> None:
    async def main() -> None:
        maker = async_sessionmaker(shop.async_engine)
        registry = async_scoped_session(maker, asyncio.current_task)
        async with shop.session() as another:
            await another.begin()
            with shop.outbox.using(registry):
                shop.send("1")
            await registry.commit()
            await registry.remove()

    shop.run(main)
    assert shop.tasks == ["1"]
