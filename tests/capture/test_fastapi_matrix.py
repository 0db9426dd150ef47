"""FastAPI runs a request's dependencies and endpoint where it likes: its transaction is found, or the
dispatch is refused with what to write.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any

import pytest
import sqlalchemy as sa
from fastapi import Depends, FastAPI
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from celery_outbox import OutboxMiddleware
from celery_outbox.errors import TransactionError
from tests.capture.async_support import AsyncShop, lasting_shop
from tests.capture.shop import Order

Dependency = Callable[[str], Any]

dependencies = pytest.mark.parametrize("dependency", ["sync", "async", "async_session"])
endpoints = pytest.mark.parametrize("endpoint", ["sync", "async"])
situations = pytest.mark.parametrize(
    ("state", "dispatch"),
    [
        ("untouched", "after_the_order"),
        ("begun", "after_the_order"),
        ("begun", "before_the_order"),
        ("selected", "after_the_order"),
        ("selected", "before_the_order"),
        ("flushed", "after_the_order"),
        ("flushed", "before_the_order"),
    ],
)


@pytest.fixture(scope="module")
def lasting(request: pytest.FixtureRequest) -> Iterator[AsyncShop]:
    with lasting_shop(request, "aiosqlite") as shop:
        yield shop


@pytest.fixture
def shop(lasting: AsyncShop) -> AsyncShop:
    lasting.clear()
    return lasting


def make_dependency(shop: AsyncShop, kind: str, state: str) -> Dependency:
    """A dependency that hands out a Session in ``state`` and ends it as the request asks."""

    def prepare(session: Session) -> None:
        if state == "begun":
            session.begin()
        elif state == "selected":
            session.execute(sa.select(1))
        elif state == "flushed":
            session.add(Order(id=7))
            session.flush()

    def sync_dependency(end: str) -> Iterator[Session]:
        with Session(shop.engine) as session:
            prepare(session)
            yield session
            getattr(session, end)()

    async def async_dependency(end: str) -> AsyncIterator[Session]:
        with Session(shop.engine) as session:
            prepare(session)
            yield session
            getattr(session, end)()

    async def async_session_dependency(end: str) -> AsyncIterator[AsyncSession]:
        async with shop.session() as session:
            await session.run_sync(prepare)
            yield session
            await getattr(session, end)()

    return {
        "sync": sync_dependency,
        "async": async_dependency,
        "async_session": async_session_dependency,
    }[kind]


def make_api(shop: AsyncShop, dependency: Dependency, endpoint: str, dispatch: str) -> FastAPI:
    """An API whose one endpoint adds an order to the dependency's session and sends its task."""
    api = FastAPI()
    Given = Annotated[Any, Depends(dependency)]  # noqa: N806 - a type

    def work(session: Session | AsyncSession) -> None:
        if dispatch == "before_the_order":
            shop.send("1")
        session.add(Order(id=1))
        if isinstance(session, Session):
            session.flush()
        if dispatch == "after_the_order":
            shop.send("1")

    if endpoint == "sync":

        @api.get("/")
        def sync_endpoint(session: Given) -> None:
            work(session)

    else:

        @api.get("/")
        async def async_endpoint(session: Given) -> None:
            work(session)
            if isinstance(session, AsyncSession):
                await session.flush()

    return api


def outcome(shop: AsyncShop) -> tuple[bool, list[str]]:
    """Whether the endpoint's order is there, and which tasks."""
    return 1 in shop.orders, shop.tasks


@dependencies
@endpoints
@situations
def test_with_the_middleware_every_endpoint_stores_in_its_dependencys_transaction(
    shop: AsyncShop, dependency: str, endpoint: str, state: str, dispatch: str
) -> None:
    api = make_api(shop, make_dependency(shop, dependency, state), endpoint, dispatch)
    api.add_middleware(OutboxMiddleware)
    shop.visit(api, "/?end=rollback")
    assert outcome(shop) == (False, [])
    shop.visit(api, "/?end=commit")
    assert outcome(shop) == (True, ["1"])


@dependencies
@endpoints
@situations
def test_without_the_middleware_the_transaction_is_found_or_the_error_says_what_to_write(
    shop: AsyncShop, dependency: str, endpoint: str, state: str, dispatch: str
) -> None:
    api = make_api(shop, make_dependency(shop, dependency, state), endpoint, dispatch)
    try:
        shop.visit(api, "/?end=rollback")
    except TransactionError as error:
        assert "with outbox.using(session)" in str(error)
        assert "app.add_middleware(OutboxMiddleware)" in str(error)
        assert outcome(shop) == (False, [])
    else:
        assert outcome(shop) == (False, [])
        shop.visit(api, "/?end=commit")
        assert outcome(shop) == (True, ["1"])


@pytest.mark.parametrize("dependency", ["async", "async_session"])
@situations
def test_an_async_endpoint_of_an_async_dependency_needs_no_middleware(
    shop: AsyncShop, dependency: str, state: str, dispatch: str
) -> None:
    api = make_api(shop, make_dependency(shop, dependency, state), "async", dispatch)
    shop.visit(api, "/?end=commit")
    assert outcome(shop) == (True, ["1"])
