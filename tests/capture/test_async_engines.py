"""An outbox beside asynchronous engines: which engine it is given, and what it does on its own."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from celery_outbox import Outbox
from celery_outbox.errors import ConfigurationError, TransactionError
from tests.capture.async_support import (
    DRIVERS,
    AsyncShop,
    async_url,
    empty_database,
    let_aiomysql_send_bytes,
)
from tests.capture.shop import MakeEngine, OpenShop, Order

OpenAsyncShop = Callable[..., AsyncShop]


@pytest.fixture
def open_async_shop(
    request: pytest.FixtureRequest,
    make_engine: MakeEngine,
    open_shop: OpenShop,
    monkeypatch: pytest.MonkeyPatch,
) -> OpenAsyncShop:
    """Open shops whose outbox is given what the test makes of the asynchronous engine."""
    let_aiomysql_send_bytes(monkeypatch)

    def open_(driver: str, given: Callable[[AsyncEngine], Any], **settings: Any) -> AsyncShop:
        engine = make_engine(empty_database(request, driver))
        async_engine = create_async_engine(async_url(engine, driver))
        settings = {"require_transaction": False} | settings
        shop = open_shop({"default": engine}, {"default": given(async_engine)}, **settings)
        return AsyncShop(
            app=shop.app, outbox=shop.outbox, engines=shop.engines, async_engine=async_engine
        )

    return open_


def the_async_engine(engine: AsyncEngine) -> object:
    return engine


def its_url(engine: AsyncEngine) -> object:
    return engine.url


def its_url_as_text(engine: AsyncEngine) -> object:
    return engine.url.render_as_string(hide_password=False)


@pytest.mark.parametrize("given", [the_async_engine, its_url, its_url_as_text])
@pytest.mark.parametrize("driver", DRIVERS)
def test_an_outbox_given_the_asynchronous_engine_or_its_url_stores_in_its_transactions(
    open_async_shop: OpenAsyncShop, driver: str, given: Callable[[AsyncEngine], object]
) -> None:
    shop = open_async_shop(driver, given)

    async def main() -> None:
        shop.send("alone")
        async with shop.session() as session:
            session.add(Order(id=1))
            shop.send("rolled back")
            await session.rollback()
        async with shop.session() as session, session.begin():
            session.add(Order(id=2))
            shop.send("session")
        async with shop.async_engine.begin():
            shop.send("connection")

    shop.run(main)
    assert (shop.orders, shop.tasks) == ([2], ["alone", "session", "connection"])


def with_options(engine: AsyncEngine) -> AsyncEngine:
    return engine.execution_options(compiled_cache=None)


def another_engine(engine: AsyncEngine) -> AsyncEngine:
    return create_async_engine(engine.url, poolclass=sa.NullPool)


@pytest.mark.parametrize("variant", [with_options, another_engine])
def test_every_asynchronous_engine_for_the_same_database_is_the_same(
    open_async_shop: OpenAsyncShop, variant: Callable[[AsyncEngine], AsyncEngine]
) -> None:
    shop = open_async_shop("aiosqlite", the_async_engine)

    async def main() -> None:
        async with AsyncSession(variant(shop.async_engine)) as session:
            session.add(Order(id=1))
            shop.send("1")
            assert shop.tasks == []
            await session.commit()

    shop.run(main)
    assert (shop.orders, shop.tasks) == ([1], ["1"])


def test_a_coroutine_without_a_transaction_is_refused_where_one_is_required(
    open_async_shop: OpenAsyncShop,
) -> None:
    shop = open_async_shop("aiosqlite", the_async_engine, require_transaction=True)

    async def main() -> None:
        with pytest.raises(TransactionError, match="outbox_require_transaction"):
            shop.send("1")
        async with shop.session() as session:
            with pytest.raises(TransactionError, match="outbox_require_transaction"):
                shop.send("2")
            await session.begin()
            shop.send("3")
            await session.commit()

    shop.run(main)
    assert shop.tasks == ["3"]


def test_a_transaction_on_another_database_is_refused(
    open_async_shop: OpenAsyncShop, other_url: str
) -> None:
    shop = open_async_shop("aiosqlite", the_async_engine)
    stranger = create_async_engine(other_url.replace("sqlite:", "sqlite+aiosqlite:"))

    async def main() -> None:
        async with AsyncSession(stranger) as session:
            await session.begin()
            with pytest.raises(TransactionError, match=r"other\.db.*outbox_databases"):
                shop.send("1")
        await stranger.dispose()

    shop.run(main)
    assert shop.tasks == []


def test_an_asynchronous_session_that_commits_each_statement_is_refused(
    open_async_shop: OpenAsyncShop,
) -> None:
    shop = open_async_shop("asyncpg", the_async_engine)
    autocommit = shop.async_engine.execution_options(isolation_level="AUTOCOMMIT")

    async def main() -> None:
        async with AsyncSession(autocommit) as session:
            await session.execute(sa.select(1))
            with pytest.raises(TransactionError, match="AUTOCOMMIT"):
                shop.send("1")
        async with autocommit.begin():
            with pytest.raises(TransactionError, match="AUTOCOMMIT"):
                shop.send("2")

    shop.run(main)
    assert shop.tasks == []


@pytest.mark.parametrize(
    "url",
    [
        "sqlite+aiosqlite://",
        "sqlite+aiosqlite:///:memory:",
        "sqlite+aiosqlite:///file::memory:?uri=true",
    ],
)
@pytest.mark.parametrize("given", [the_async_engine, its_url])
def test_an_asynchronous_database_in_memory_is_refused_at_configuration(
    make_app: Callable[..., Any], url: str, given: Callable[[AsyncEngine], object]
) -> None:
    engine = create_async_engine(url)
    outbox = Outbox(make_app(), databases={"default": given(engine)})
    with pytest.raises(ConfigurationError, match="in memory"):
        outbox.install()
    asyncio.run(engine.dispose())


def test_a_synchronous_and_an_asynchronous_engine_of_one_database_are_one_table(
    make_app: Callable[..., Any], make_engine: MakeEngine, sqlite_url: str
) -> None:
    engine = make_engine(sqlite_url)
    async_engine = create_async_engine(async_url(engine, "aiosqlite"))
    outbox = Outbox(make_app(), databases={"sync": engine, "async": async_engine})
    with pytest.raises(ConfigurationError, match="'sync' and 'async' are the same"):
        outbox.install()
