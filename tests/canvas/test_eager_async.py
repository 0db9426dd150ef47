"""Eager mode in asyncio: a task runs after the commit of an AsyncSession or AsyncConnection."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from celery_outbox import Outbox
from tests.canvas.stall import SoldOutError
from tests.canvas.ways import Way, either_way


@either_way
def test_a_task_runs_after_the_commit_and_never_after_a_rollback(way: Way, tmp_path: Path) -> None:
    notes: list[Any] = []

    async def work() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'stall.db'}")
        task = note(engine, notes)
        async with way(engine):
            result = task.apply_async(("a",), via_outbox=True)
            notes.append("before")
        assert result.get() == "a"
        with pytest.raises(SoldOutError):
            async with way(engine):
                task.apply_async(("b",), via_outbox=True)
                raise SoldOutError
        async with way(engine) as where:
            with pytest.raises(SoldOutError):
                async with where.begin_nested():
                    task.apply_async(("c",), via_outbox=True)
                    raise SoldOutError
            async with where.begin_nested():
                task.apply_async(("d",), via_outbox=True)
            notes.append("released")
        await engine.dispose()

    asyncio.run(work())
    assert notes == ["before", "a", "released", "d"]


def note(engine: AsyncEngine, notes: list[Any]) -> Any:
    """Make a task that takes notes, on an app in eager mode."""

    def note_(value: Any) -> Any:
        notes.append(value)
        return value

    app = Celery("stall", broker="memory://", set_as_current=False)
    app.conf.task_always_eager = True
    Outbox(app, databases={"default": engine}).install()
    return app.task(note_, name="stall.note", shared=False)
