"""Many requests at once, each with a transaction of its own: their tasks never mix."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from celery_outbox import OutboxMiddleware
from celery_outbox.errors import TransactionError
from tests.capture.async_support import AsyncShop, async_url, lasting_shop, visitor
from tests.capture.shop import Order

COUNT = 24


@pytest.fixture(scope="module")
def lasting(request: pytest.FixtureRequest) -> Iterator[AsyncShop]:
    with lasting_shop(request, "asyncpg", pool_size=COUNT) as shop:
        yield shop


@pytest.fixture
def shop(lasting: AsyncShop) -> AsyncShop:
    lasting.clear()
    return lasting


def is_committed(number: int) -> bool:
    return number % 5 != 0


COMMITTED = [number for number in range(COUNT) if is_committed(number)]


def begun_session(shop: AsyncShop) -> Callable[..., Iterator[Session]]:
    """A synchronous dependency: a thread begins the session, another thread ends it."""

    def dependency(number: int) -> Iterator[Session]:
        with Session(shop.engine) as session:
            session.add(Order(id=number))
            session.flush()
            yield session
            if is_committed(number):
                session.commit()

    return dependency


async def visit_at_once(api: FastAPI) -> list[int]:
    """Visit the endpoint once for each number; returns the status codes."""
    async with visitor(api, raise_app_exceptions=False) as client:
        visits = (client.get(f"/{number}") for number in range(COUNT))
        return [response.status_code for response in await asyncio.gather(*visits)]


def make_api(shop: AsyncShop, endpoint: str, refused: list[int], *, has_middleware: bool) -> FastAPI:
    """An API whose endpoint sends when as many requests as there will be are in it."""
    api = FastAPI()
    if has_middleware:
        api.add_middleware(OutboxMiddleware)
    Given = Annotated[Session, Depends(begun_session(shop))]  # noqa: N806 - a type

    def send(number: int) -> None:
        try:
            shop.send(str(number))
        except TransactionError:
            refused.append(number)
            raise

    if endpoint == "sync":
        everyone = threading.Barrier(COUNT, timeout=20)

        @api.get("/{number}")
        def sync_endpoint(number: int, session: Given) -> None:
            everyone.wait()
            send(number)

    else:
        wait_for_everyone = rendezvous(COUNT)

        @api.get("/{number}")
        async def async_endpoint(number: int, session: Given) -> None:
            await wait_for_everyone()
            send(number)

    return api


def rendezvous(count: int) -> Callable[[], Coroutine[Any, Any, None]]:
    """A coroutine function that returns when it has been called ``count`` times."""
    arrived = itertools.count(1)
    everyone = asyncio.Event()

    async def wait() -> None:
        if next(arrived) == count:
            everyone.set()
        await asyncio.wait_for(everyone.wait(), 20)

    return wait


@pytest.mark.parametrize("endpoint", ["sync", "async"])
def test_with_the_middleware_each_request_in_flight_stores_in_its_own_transaction(
    shop: AsyncShop, endpoint: str
) -> None:
    api = make_api(shop, endpoint, [], has_middleware=True)
    assert set(asyncio.run(visit_at_once(api))) == {200}
    assert sorted(map(int, shop.tasks)) == shop.orders == COMMITTED


@pytest.mark.parametrize("endpoint", ["sync", "async"])
def test_without_the_middleware_a_request_in_flight_is_refused_rather_than_mixed(
    shop: AsyncShop, endpoint: str
) -> None:
    refused: list[int] = []
    asyncio.run(visit_at_once(make_api(shop, endpoint, refused, has_middleware=False)))
    stored = {int(task) for task in shop.tasks}
    assert sorted(refused) == list(range(COUNT))
    assert stored == set(shop.orders) == set()


def test_requests_that_follow_each_other_through_the_same_threads_never_mix(shop: AsyncShop) -> None:
    api = FastAPI()
    api.add_middleware(OutboxMiddleware)
    Given = Annotated[Session, Depends(begun_session(shop))]  # noqa: N806 - a type

    @api.get("/sync/{number}")
    def sync_endpoint(number: int, session: Given) -> None:
        shop.send(str(number))

    @api.get("/async/{number}")
    async def async_endpoint(number: int, session: Given) -> None:
        shop.send(str(number))

    @api.get("/without/{number}")
    def endpoint_without_a_session(number: int) -> None:
        shop.send(f"alone-{number}")

    paths = [f"/{kind}/" for kind in ("sync", "without", "async")]
    numbers = range(5 * COUNT)

    async def main() -> set[int]:
        at_once = asyncio.Semaphore(COUNT // 2)
        async with visitor(api) as client:

            async def visit(number: int) -> int:
                async with at_once:
                    response = await client.get(f"{paths[number % 3]}{number}")
                    return response.status_code

            return set(await asyncio.gather(*map(visit, numbers)))

    assert asyncio.run(main()) == {200}
    alone = {f"alone-{number}" for number in numbers if number % 3 == 1}
    assert len(shop.tasks) == len(set(shop.tasks))
    assert alone <= set(shop.tasks)
    assert {int(task) for task in set(shop.tasks) - alone} == set(shop.orders)


def test_async_dependencies_in_flight_need_no_middleware(shop: AsyncShop) -> None:
    engine = create_async_engine(async_url(shop.engine, "asyncpg"), pool_size=COUNT)
    api = FastAPI()
    wait_for_everyone = rendezvous(COUNT)

    async def dependency(number: int) -> AsyncIterator[AsyncSession]:
        async with AsyncSession(engine) as session:
            session.add(Order(id=number))
            await session.flush()
            yield session
            if is_committed(number):
                await session.commit()

    @api.get("/{number}")
    async def endpoint(number: int, session: Annotated[AsyncSession, Depends(dependency)]) -> None:
        await wait_for_everyone()
        shop.send(str(number))

    async def main() -> set[int]:
        try:
            return set(await visit_at_once(api))
        finally:
            await engine.dispose()

    assert asyncio.run(main()) == {200}
    assert sorted(map(int, shop.tasks)) == shop.orders == COMMITTED
