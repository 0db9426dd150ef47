"""Stalls: apps with an installed outbox whose broker nobody listens for, or one in memory."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery

from celery_outbox import Outbox
from tests.canvas.stall import OpenStall, Stall, add_tasks, memory_config
from tests.processes import unused_port


@pytest.fixture
def open_stall(tmp_path: Path) -> Iterator[OpenStall]:
    """Open stalls, each with a database file of its own unless ``databases`` has URLs.

    ``config`` is Celery's, ``settings`` are the Outbox's.
    """
    opened: list[Stall] = []

    def open_(*, databases: dict[str, str] | None = None, config: Any = None, **settings: Any) -> Stall:
        name = f"stall-{uuid.uuid4().hex[:8]}"
        urls = databases or {"default": f"sqlite:///{tmp_path / name}.db"}
        engines = {each: sa.create_engine(url) for each, url in urls.items()}
        app = Celery(name, set_as_current=False)
        app.conf.update({"broker_url": f"redis://127.0.0.1:{unused_port()}/0"} | (config or {}))
        outbox = Outbox(app, databases=engines, **settings)
        add_tasks(app)
        outbox.install()
        opened.append(Stall(app=app, outbox=outbox, engines=engines))
        return opened[-1]

    yield open_
    for stall in opened:
        close(stall.app)
        for engine in stall.engines.values():
            engine.dispose()


@pytest.fixture
def stall(open_stall: OpenStall) -> Stall:
    """A stall whose broker is not there: what is sent directly raises."""
    return open_stall()


@pytest.fixture
def mixed_stall(open_stall: OpenStall) -> Stall:
    """A stall with a broker in memory, for what is sent directly."""
    return open_stall(config=memory_config())


@pytest.fixture
def two_stall(open_stall: OpenStall, tmp_path: Path) -> Stall:
    """A stall with two databases, main and billing, and a broker in memory."""
    urls = {name: f"sqlite:///{tmp_path / name}.db" for name in ("main", "billing")}
    return open_stall(databases=urls, config=memory_config())


def close(app: Celery) -> None:
    """Close what ``app`` holds open to its broker and to a result backend in Redis."""
    if (app.conf.result_backend or "").startswith("redis:"):
        app.backend.client.connection_pool.disconnect()
    app.close()
