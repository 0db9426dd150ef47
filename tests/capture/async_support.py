"""What the tests of asyncio, FastAPI and isolation share: a shop on an asynchronous engine, and ways
to run coroutines and to visit an ASGI app.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import httpx
import sqlalchemy as sa
from celery import Celery
from fastapi import FastAPI
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from celery_outbox import Outbox
from tests.capture.shop import Base, Shop

#: Each asynchronous driver, and the fixture that gives it an empty database.
DRIVERS = {
    "aiosqlite": "sqlite_url",
    "asyncpg": "postgresql_url",
    "psycopg": "postgresql_url",
    "aiomysql": "mariadb_url",
}

Main = Callable[[], Coroutine[Any, Any, Any]]


def async_url(url: str, driver: str) -> sa.URL:
    """The same database, reached by another driver."""
    parsed = sa.make_url(url)
    return parsed.set(drivername=f"{parsed.get_backend_name()}+{driver}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncShop(Shop):
    """A shop whose code runs in an event loop; `engine` is only read from."""

    async_engine: AsyncEngine

    def session(self, **options: Any) -> AsyncSession:
        return AsyncSession(self.async_engine, **options)

    def run(self, main: Main) -> Any:
        """Run a coroutine in a loop of its own, and let go of the engine's connections."""

        async def run() -> Any:
            try:
                return await main()
            finally:
                await self.async_engine.dispose()

        return asyncio.run(run())


def open_async_shop(
    app: Celery,
    url: sa.URL,
    sync_engine: sa.Engine,
    configured: Callable[[AsyncEngine], Any] = lambda engine: engine,
    **settings: Any,
) -> AsyncShop:
    """Open a shop whose outbox is given what ``configured`` makes of the asynchronous engine."""
    engine = create_async_engine(url)
    outbox = Outbox(app, databases={"default": configured(engine)}, **settings)
    outbox.install()
    Base.metadata.create_all(sync_engine)
    return AsyncShop(
        app=app, outbox=outbox, engines={"default": sync_engine}, async_engine=engine
    )


def visit(api: FastAPI, *paths: str) -> list[httpx.Response]:
    """Visit the paths of an API all at once; an error of the API's is raised."""

    async def main() -> list[httpx.Response]:
        async with visitor(api) as client:
            return await asyncio.gather(*(client.get(path) for path in paths or ["/"]))

    return asyncio.run(main())


def visitor(api: FastAPI, **options: Any) -> httpx.AsyncClient:
    """A client whose requests reach the API without a network."""
    transport = httpx.ASGITransport(api, **options)
    return httpx.AsyncClient(transport=transport, base_url="http://shop")


async def meet(*coroutines: Awaitable[Any]) -> list[Any]:
    """Run them at once; the first error is raised when all have ended."""
    results = await asyncio.gather(*coroutines, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
