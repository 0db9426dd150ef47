"""A project whose tasks dispatch tasks through the outbox, inside a worker."""

import asyncio
import os
from typing import Any

import sqlalchemy as sa
from celery import Celery
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from celery_outbox import Outbox
from tests.end_to_end import tasks

app = Celery("shop", broker=os.environ["SHOP_BROKER"], backend=os.environ["SHOP_RESULTS"])
engine = sa.create_engine(os.environ["SHOP_DATABASE"])
# A loop for each task, and no connection that outlives its loop.
async_engine = create_async_engine(
    engine.url.set(drivername="postgresql+asyncpg"), poolclass=sa.NullPool
)
outbox = Outbox(
    app, databases={"default": async_engine if os.environ["SHOP_ENGINE"] == "async" else engine}
)
# In the parent of the processes that run tasks, and so is the connection that it leaves behind.
outbox.install()
note, add, total = (
    app.task(task, name=f"shop.{task.__name__}") for task in (tasks.note, tasks.add, tasks.total)
)


class RefusedError(Exception):
    """What rolls a transaction back."""


@app.task(name="shop.passes_on")
def passes_on(what: str) -> str:
    """Dispatch without a transaction."""
    return str(note.apply_async((what,), via_outbox=True).id)


@app.task(name="shop.passes_on_in_a_transaction")
def passes_on_in_a_transaction(what: str, end: str) -> str:
    """Dispatch in a transaction that ends in a commit or a rollback."""
    try:
        with Session(engine) as session, session.begin():
            session.execute(sa.text("SELECT 1"))
            result = note.apply_async((what,), via_outbox=True)
            if end == "rollback":
                raise RefusedError
    except RefusedError:
        return "refused"
    return str(result.id)


@app.task(name="shop.passes_on_in_a_coroutine")
def passes_on_in_a_coroutine(what: str, end: str) -> str:
    """Do the same in an event loop."""

    async def pass_on() -> str:
        async with AsyncSession(async_engine) as session, session.begin():
            await session.execute(sa.text("SELECT 1"))
            result = note.apply_async((what,), via_outbox=True)
            if end == "rollback":
                raise RefusedError
        return str(result.id)

    try:
        return asyncio.run(pass_on())
    except RefusedError:
        return "refused"


def connection_of_outbox() -> tuple[int, int]:
    """Name this process, and the process of the server that the outbox's connection leads to."""
    with outbox.databases["default"].begin() as connection:
        return os.getpid(), int(connection.execute(sa.text("SELECT pg_backend_pid()")).scalar_one())


connection_at_import = connection_of_outbox()


@app.task(name="shop.connections")
def connections() -> list[tuple[int, int]]:
    """Compare what was used when this module was imported with what is used now."""
    return [connection_at_import, connection_of_outbox()]


@app.task(name="shop.retries", bind=True, via_outbox=True, max_retries=3)
def retries(self: Any, what: str) -> int:
    """Fail twice, by ``retry``, which the task's own choice of the outbox does not concern."""
    tasks.note(f"{what} {self.request.retries}")
    if self.request.retries < 2:
        raise self.retry(countdown=0)
    return int(self.request.retries)
