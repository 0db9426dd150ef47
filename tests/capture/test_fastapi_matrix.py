"""FastAPI runs a request's dependencies and endpoint where it likes: its transaction is found, or the
dispatch is refused with what to write.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any

import pytest
import sqlalchemy as sa
from celery import Celery
from fastapi import Depends, FastAPI
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from celery_outbox import OutboxMiddleware
from celery_outbox.errors import TransactionError
from tests.capture.async_support import AsyncShop, async_url, open_async_shop, visit
from tests.capture.shop import MakeEngine, Order

Dependency = Callable[[], Any]

dependencies = pytest.mark.parametrize("dependency", ["sync", "async", "async_session"])
endpoints = pytest.mark.parametrize("endpoint", ["sync", "async"])
states = pytest.mark.parametrize("state", ["untouched", "begun", "selected", "flushed"])
orders = pytest.mark.parametrize("dispatch", ["after_the_order", "before_the_order"])
ends = pytest.mark.parametrize("end", ["commit", "rollback"])


@pytest.fixture
def shop(make_app: Callable[..., Celery], sqlite_url: str, make_engine: MakeEngine) -> AsyncShop:
    return open_async_shop(make_app(), async_url(sqlite_url, "aiosqlite"), make_engine(sqlite_url))


def make_dependency(shop: AsyncShop, kind: str, state: str, end: str) -> Dependency:
    """A dependency that hands out a Session in ``state`` and ends it with ``end``."""

    def prepare(session: Session) -> None:
        if state == "begun":
            session.begin()
        elif state == "selected":
            session.execute(sa.select(1))
        elif state == "flushed":
            session.add(Order(id=7))
            session.flush()

    def sync_dependency() -> Iterator[Session]:
        with Session(shop.engine) as session:
            prepare(session)
            yield session
            getattr(session, end)()

    async def async_dependency() -> AsyncIterator[Session]:
        with Session(shop.engine) as session:
            prepare(session)
            yield session
            getattr(session, end)()

    async def async_session_dependency() -> AsyncIterator[AsyncSession]:
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
    Given = Annotated[Any, Depends(dependency)]

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

    @api.on_event("shutdown")
    async def never() -> None: ...

    return api


def outcome(shop: AsyncShop) -> tuple[bool, list[str]]:
    """Whether the endpoint's order is there, and which tasks."""
    return 1 in shop.orders, shop.tasks


EXPECTED = {"commit": (True, ["1"]), "rollback": (False, [])}
