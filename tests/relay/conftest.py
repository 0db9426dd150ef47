"""Outboxes on real databases, closed when the test ends."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kombu.pools
import pytest
import sqlalchemy as sa

from celery_outbox import Outbox
from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
from tests.relay.apps import make_outbox

OpenOutbox = Callable[..., Outbox]
MakeDatabase = Callable[..., Database]


@pytest.fixture
def open_outbox() -> Iterator[OpenOutbox]:
    """Open outboxes by broker and database URL; each gets an engine of its own."""
    engines: list[sa.Engine] = []
    outboxes: list[Outbox] = []

    def open_(broker: str, database: str, **settings: Any) -> Outbox:
        engines.append(sa.create_engine(database))
        outboxes.append(make_outbox(broker, engines[-1], **settings))
        return outboxes[-1]

    yield open_
    for outbox in outboxes:
        outbox.app.close()
    for engine in engines:
        engine.dispose()
    # Kombu keeps pools by URL, and in them what it declared: Redis databases come round again.
    kombu.pools.reset()


@pytest.fixture
def make_database(tmp_path: Path) -> Iterator[MakeDatabase]:
    """Make databases, each a file or of the URL given, with their tables."""
    engines: list[sa.Engine] = []

    def make(url: str | None = None, **options: Any) -> Database:
        number = len(engines)
        engines.append(sa.create_engine(url or f"sqlite:///{tmp_path}/{number}.db", **options))
        database = Database(f"database {number}", engines[-1], "celery_outbox")
        install(database)
        return database

    yield make
    for engine in engines:
        engine.dispose()


@pytest.fixture
def database(make_database: MakeDatabase, postgresql_url: str) -> Database:
    return make_database(postgresql_url)
