"""Outboxes on real databases, closed when the test ends."""

from collections.abc import Callable, Iterator
from typing import Any

import kombu.pools
import pytest
import sqlalchemy as sa

from celery_outbox import Outbox
from tests.relay.apps import make_outbox

OpenOutbox = Callable[..., Outbox]


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
