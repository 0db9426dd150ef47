"""Savepoints of an AsyncSession: what is rolled back takes its tasks back, and nothing else does."""

from collections.abc import Iterator

import pytest

from tests.capture.async_support import DRIVERS, AsyncShop, lasting_shop, let_aiomysql_send_bytes
from tests.capture.shop import Order


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


def test_a_rolled_back_savepoint_takes_only_its_own_tasks_back(shop: AsyncShop) -> None:
    async def main() -> None:
        async with shop.session() as session, session.begin():
            shop.send("before")
            nested = await session.begin_nested()
            session.add(Order(id=1))
            shop.send("inside")
            await nested.rollback()
            session.add(Order(id=2))
            shop.send("after")

    shop.run(main)
    assert (shop.orders, shop.tasks) == ([2], ["before", "after"])


def test_a_released_savepoint_is_stored_with_the_root(shop: AsyncShop) -> None:
    async def main() -> None:
        async with shop.session() as session, session.begin(), session.begin_nested():
            session.add(Order(id=1))
            shop.send("1")

    shop.run(main)
    assert (shop.orders, shop.tasks) == ([1], ["1"])


def test_a_released_savepoint_is_taken_back_with_the_root(shop: AsyncShop) -> None:
    async def main() -> None:
        async with shop.session() as session:
            # As the first act of the session, before any other SQL.
            async with session.begin_nested():
                session.add(Order(id=1))
                shop.send("1")
            await session.rollback()

    shop.run(main)
    assert (shop.orders, shop.tasks) == ([], [])


def test_savepoints_inside_a_savepoint_go_with_it(shop: AsyncShop) -> None:
    async def main() -> None:
        async with shop.session() as session, session.begin():
            outer = await session.begin_nested()
            async with session.begin_nested():
                shop.send("released")
            inner = await session.begin_nested()
            shop.send("rolled back")
            await inner.rollback()
            await outer.rollback()
            async with session.begin_nested():
                shop.send("kept")

    shop.run(main)
    assert shop.tasks == ["kept"]
