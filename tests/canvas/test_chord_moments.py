"""Chords dispatched while a transaction commits, or in asyncio: their backend hears with the rows."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery, chord
from sqlalchemy import event
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from celery_outbox import Outbox
from tests.canvas.stall import OpenStall, SoldOutError, Stall, add_tasks, stored
from tests.canvas.ways import Way, either_way


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def stall(open_stall: OpenStall) -> Stall:
    """A stall with results in memory."""
    stall = open_stall(config={"result_backend": "cache+memory://"})
    stall.app.backend.client.cache.clear()
    Base.metadata.create_all(stall.engine)
    return stall


def prepared(app: Celery) -> int:
    """How many chords the backend has been told of."""
    return sum(b"taskset-meta" in bytes(key) for key in app.backend.client.cache)


def dispatch(app: Celery) -> None:
    add, total = app.tasks["stall.add"], app.tasks["stall.total"]
    chord([add.s(1, 1), add.s(2, 2)], total.s()).apply_async(via_outbox=True)


@pytest.fixture
def dispatch_once(stall: Stall) -> Iterator[Callable[..., None]]:
    """A listener that dispatches a chord the first time it is called."""
    calls: list[Any] = []

    def listener(*_: Any) -> None:
        calls.append(_)
        if len(calls) == 1:
            dispatch(stall.app)

    yield listener
    assert calls


MOMENTS = ["before_commit", "before_flush", "after_flush", "after_flush_postexec", "after_commit"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_listener_of_the_session_may_dispatch_a_chord(
    moment: str, stall: Stall, dispatch_once: Callable[..., None]
) -> None:
    with Session(stall.engine) as session:
        event.listen(session, moment, dispatch_once)
        session.add(Order())
        session.commit()
    assert (stall.names, prepared(stall.app)) == (["add", "add"], 1)


def test_a_listener_of_the_engines_commit_may_dispatch_a_chord(
    stall: Stall, dispatch_once: Callable[..., None]
) -> None:
    event.listen(stall.engine, "commit", dispatch_once)
    with stall.transaction() as session:
        session.execute(sa.text("SELECT 1"))
    event.remove(stall.engine, "commit", dispatch_once)
    assert (stall.names, prepared(stall.app)) == (["add", "add"], 1)


@either_way
def test_an_asynchronous_transaction_tells_the_backend_when_it_commits(
    way: Way, tmp_path: Path
) -> None:
    app = Celery("stall", broker="memory://", backend="cache+memory://", set_as_current=False)
    add_tasks(app)
    app.backend.client.cache.clear()
    seen: list[int] = []

    async def work(url: str) -> None:
        engine = create_async_engine(url)
        Outbox(app, databases={"default": engine}).install()
        with pytest.raises(SoldOutError):
            async with way(engine):
                dispatch(app)
                raise SoldOutError
        async with way(engine):
            dispatch(app)
            seen.append(prepared(app))
        await engine.dispose()

    asyncio.run(work(f"sqlite+aiosqlite:///{tmp_path / 'stall.db'}"))
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'stall.db'}")
    assert [each.name for each in stored(engine)] == ["stall.add"] * 2
    assert [*seen, prepared(app)] == [0, 1]
    engine.dispose()
