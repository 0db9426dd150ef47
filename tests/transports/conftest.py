"""Outboxes whose brokers nobody connects to."""

from collections.abc import Callable
from typing import Any

import pytest

from celery_outbox import Outbox
from tests.relay.conftest import OpenOutbox, open_outbox  # noqa: F401 - a fixture of these tests too

OpenStored = Callable[..., Outbox]


@pytest.fixture
def outbox_for(open_outbox: OpenOutbox, sqlite_url: str) -> OpenStored:  # noqa: F811
    """Make an Outbox on SQLite for a broker URL."""

    def open_(broker: str, **settings: Any) -> Outbox:
        return open_outbox(broker, sqlite_url, **settings)

    return open_
