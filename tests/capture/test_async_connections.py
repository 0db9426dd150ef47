"""AsyncConnection, and AsyncSessions bound to one: stored by the commit of the connection."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from celery_outbox.errors import TransactionError
from tests.capture.async_support import DRIVERS, AsyncShop, lasting_shop, let_aiomysql_send_bytes
from tests.capture.shop import Order, OutOfStockError


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


#: For what does not depend on the driver.
on_sqlite = pytest.mark.parametrize("lasting", ["aiosqlite"], indirect=True)
on_two = pytest.mark.parametrize("lasting", ["aiosqlite", "asyncpg"], indirect=True)


async def insert(connection: AsyncConnection, number: int) -> None:
    await connection.execute(sa.insert(Order).values(id=number))


def test_a_connections_commit_stores(shop: AsyncShop) -> None:
    async def main() -> None:
        async with shop.async_engine.begin() as connection:
            shop.send("before any statement")
            await insert(connection, 1)
            shop.send("1")
            assert shop.tasks == []

    shop.run(main)
    assert (shop.orders, shop.tasks) == ([1], ["before any statement", "1"])


def test_a_connections_rollback_stores_nothing(shop: AsyncShop) -> None:
    async def main() -> None:
        async with shop.async_engine.begin() as connection:
            await insert(connection, 1)
            shop.send("1")
            raise OutOfStockError

    with pytest.raises(OutOfStockError):
        shop.run(main)
    assert (shop.orders, shop.tasks) == ([], [])


def test_a_connection_commits_as_it_goes(shop: AsyncShop) -> None:
    async def main() -> None:
        async with shop.async_engine.connect() as connection:
            for number in range(4):
                await insert(connection, number)
                shop.send(str(number))
                await (connection.rollback() if number % 2 else connection.commit())
            await insert(connection, 9)
            shop.send("closed without a commit")

    shop.run(main)
    assert (shop.orders, shop.tasks) == ([0, 2], ["0", "2"])


def test_a_rolled_back_savepoint_of_a_connection_takes_only_its_own_tasks_back(shop: AsyncShop) -> None:
    async def main() -> None:
        async with shop.async_engine.begin() as connection:
            async with connection.begin_nested():
                await insert(connection, 1)
                shop.send("1")
            savepoint = await connection.begin_nested()
            await insert(connection, 2)
            shop.send("2")
            await savepoint.rollback()
            shop.send("3")

    shop.run(main)
    assert (shop.orders, shop.tasks) == ([1], ["1", "3"])


def test_a_released_savepoint_is_taken_back_with_the_connections_transaction(
    shop: AsyncShop,
) -> None:
    async def main() -> None:
        async with shop.async_engine.connect() as connection:
            async with connection.begin_nested():
                await insert(connection, 1)
                shop.send("1")
            await connection.rollback()

    shop.run(main)
    assert (shop.orders, shop.tasks) == ([], [])


def test_a_function_run_in_the_sync_connection_finds_its_transaction(shop: AsyncShop) -> None:
    async def main() -> None:
        async with shop.async_engine.begin() as connection:
            await connection.run_sync(lambda it: shop.order_and_send(it, 1))

    shop.run(main)
    assert (shop.orders, shop.tasks) == ([1], ["1"])


@on_two
@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize(
    "mode", ["conditional_savepoint", "rollback_only", "control_fully", "create_savepoint"]
)
def test_a_session_on_a_connection_stores_when_its_rows_are_committed(
    shop: AsyncShop, mode: Any, end: str
) -> None:
    async def main() -> None:
        async with shop.async_engine.connect() as connection:
            transaction = await connection.begin()
            async with AsyncSession(connection, join_transaction_mode=mode) as session:
                session.add(Order(id=1))
                shop.send("1")
                await session.commit()
            if transaction.is_active:
                await getattr(transaction, end)()

    shop.run(main)
    is_there = end == "commit" or mode == "control_fully"
    assert (shop.orders, shop.tasks) == (([1], ["1"]) if is_there else ([], []))


@on_two
@pytest.mark.parametrize(
    ("mode", "is_kept"),
    [
        ("conditional_savepoint", False),
        ("rollback_only", False),
        ("control_fully", False),
        ("create_savepoint", True),
    ],
)
def test_a_session_on_a_connection_is_taken_back_by_its_own_rollback(
    shop: AsyncShop, mode: Any, is_kept: bool
) -> None:
    async def main() -> None:
        async with shop.async_engine.connect() as connection:
            transaction = await connection.begin()
            shop.send("connection")
            async with AsyncSession(connection, join_transaction_mode=mode) as session:
                session.add(Order(id=1))
                shop.send("session")
                await session.flush()
                await session.rollback()
            if transaction.is_active:
                await transaction.commit()

    shop.run(main)
    assert (shop.orders, shop.tasks) == ([], ["connection"] if is_kept else [])


def test_a_session_on_a_connection_with_a_savepoint_joins_conditionally(shop: AsyncShop) -> None:
    async def main() -> None:
        async with shop.async_engine.begin() as connection:
            shop.send("connection")
            savepoint = await connection.begin_nested()
            async with AsyncSession(connection) as session:
                session.add(Order(id=1))
                shop.send("session")
                await session.commit()
            await savepoint.rollback()

    shop.run(main)
    assert (shop.orders, shop.tasks) == ([], ["connection"])


def test_a_test_that_rolls_a_connection_back_around_sessions_leaves_nothing(
    shop: AsyncShop, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with shop.async_engine.connect() as connection:
            transaction = await connection.begin()
            for number in range(2):
                options = {"join_transaction_mode": "create_savepoint"}
                async with AsyncSession(connection, **options) as session:
                    session.add(Order(id=number))
                    shop.send(str(number))
                    await session.commit()
            await transaction.rollback()

    with caplog.at_level(logging.WARNING):
        shop.run(main)
    assert (shop.orders, shop.tasks, caplog.text) == ([], [], "")


def test_using_takes_a_connection_in_a_transaction(shop: AsyncShop) -> None:
    async def main() -> None:
        async with shop.async_engine.begin() as connection, shop.session() as session:
            await session.begin()
            with shop.outbox.using(connection):
                shop.send("1")
            await session.rollback()

    shop.run(main)
    assert shop.tasks == ["1"]


@on_sqlite
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda engine: engine.connect(), "connected"),
        (lambda engine: engine, "AsyncEngine"),
    ],
)
def test_using_refuses_what_is_in_no_transaction(
    shop: AsyncShop, make: Callable[..., object], expected: str
) -> None:
    async def main() -> None:
        with (
            pytest.raises(TransactionError, match=expected),
            shop.outbox.using(make(shop.async_engine)),
        ):
            shop.send("1")

    shop.run(main)
    assert shop.tasks == []


@on_sqlite
def test_using_asks_for_the_begin_of_a_connection(shop: AsyncShop) -> None:
    async def main() -> None:
        async with shop.async_engine.connect() as connection:
            with (
                pytest.raises(TransactionError, match=r"await connection\.begin\(\)"),
                shop.outbox.using(connection),
            ):
                shop.send("1")

    shop.run(main)
    assert shop.tasks == []
