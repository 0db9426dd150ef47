"""The two ways to a transaction of SQLAlchemy's asyncio extension."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

#: Opens a transaction on an engine, for the time of an ``async with`` block.
Way = Callable[[AsyncEngine], Any]


@asynccontextmanager
async def session(engine: AsyncEngine) -> AsyncIterator[Any]:
    async with AsyncSession(engine) as it, it.begin():
        yield it


@asynccontextmanager
async def connection(engine: AsyncEngine) -> AsyncIterator[Any]:
    async with engine.begin() as it:
        yield it


either_way = pytest.mark.parametrize("way", [session, connection], ids=lambda way: way.__name__)
