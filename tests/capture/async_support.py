"""What the tests of asyncio, FastAPI and isolation share: a shop whose code runs in an event loop, and
ways to visit an ASGI app.
"""

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pymysql.converters
import pytest
import sqlalchemy as sa
from celery import Celery
from fastapi import FastAPI
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from celery_outbox import Outbox
from tests.capture.shop import TASK_NAME, Base, Shop, receipt
from tests.processes import unused_port

#: Each asynchronous driver, and the fixture of its server.
DRIVERS = {
    "aiosqlite": None,
    "asyncpg": "postgresql",
    "psycopg": "postgresql",
    "aiomysql": "mariadb",
}

#: How long anything may take that must happen.
PATIENCE_SECONDS = 20

Main = Callable[[], Coroutine[Any, Any, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncShop(Shop):
    """A shop with an asynchronous engine for the same database."""

    async_engine: AsyncEngine

    def clear(self) -> None:
        """Forget every order and task."""
        with self.engine.begin() as connection:
            for table in ("orders", "celery_outbox"):
                connection.execute(sa.delete(sa.table(table)))

    def session(self, **options: Any) -> AsyncSession:
        return AsyncSession(self.async_engine, **options)

    def run(self, main: Main) -> Any:
        """Run a coroutine in a loop of its own, and let go of the engine's connections."""

        async def run() -> Any:
            try:
                return await asyncio.wait_for(main(), PATIENCE_SECONDS)
            finally:
                await self.async_engine.dispose()

        return asyncio.run(run())

    def visit(self, api: FastAPI, path: str = "/") -> httpx.Response:
        """Visit an API; an error that leaves it is raised."""

        async def main() -> httpx.Response:
            async with visitor(api) as client:
                return await client.get(path)

        response: httpx.Response = self.run(main)
        return response


@contextmanager
def lasting_shop(request: pytest.FixtureRequest, driver: str, **options: Any) -> Iterator[AsyncShop]:
    """Open a shop for many tests, each of which begins with ``clear``: databases are slow to make.

    ``options`` are the synchronous engine's. The outbox has that engine; a dispatch without a
    transaction is stored alone, so that it is seen where it should not be.
    """
    engine = sa.create_engine(empty_database(request, driver), **options)
    app = Celery(
        f"shop-{uuid.uuid4().hex[:8]}",
        set_as_current=False,
        broker=f"redis://127.0.0.1:{unused_port()}/0",
    )
    app.task(name=TASK_NAME, shared=False)(receipt)
    outbox = Outbox(app, databases={"default": engine})
    outbox.install()
    Base.metadata.create_all(engine)
    yield AsyncShop(
        app=app,
        outbox=outbox,
        engines={"default": engine},
        async_engine=create_async_engine(async_url(engine, driver)),
    )
    engine.dispose()


def empty_database(request: pytest.FixtureRequest, driver: str) -> str:
    """The URL, for a synchronous driver, of an empty database that ``driver`` can reach."""
    server = DRIVERS[driver]
    if server is None:
        directory = request.getfixturevalue("tmp_path_factory").mktemp("shop")
        return f"sqlite:///{directory / 'shop.db'}"
    url: str = request.getfixturevalue(server).create_database()
    return url


def async_url(engine: sa.Engine, driver: str) -> sa.URL:
    """The same database, reached by another driver."""
    return engine.url.set(drivername=f"{engine.url.get_backend_name()}+{driver}")


def let_aiomysql_send_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give aiomysql back what PyMySQL 1.2 took away: without it no bytes reach any table."""
    monkeypatch.setattr("aiomysql.connection.escape_bytes_prefixed", pymysql.converters.escape_bytes)


def visitor(api: FastAPI, **options: Any) -> httpx.AsyncClient:
    """A client whose requests reach the API without a network."""
    transport = httpx.ASGITransport(api, **options)
    return httpx.AsyncClient(transport=transport, base_url="http://shop")
