"""A pytest plugin: what a test's code stored and what it rolled back, and ways to run it.

pytest loads this package in every run: what brings Celery, Kombu or SQLAlchemy is imported inside the
functions that need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .recorder import OutboxRecorder
from .tasks import RecordedTask

__all__ = ["OutboxRecorder", "RecordedTask", "outbox", "outbox_app", "outbox_fake"]


@pytest.fixture
def outbox_app() -> Any:
    """The Celery app whose Outbox is recorded, or the Outbox: Celery's current app; to override."""
    from celery import current_app

    return current_app


@pytest.fixture
def outbox(outbox_app: Any) -> Iterator[OutboxRecorder]:
    """Records what this test's code stores, and stores it."""
    with OutboxRecorder(outbox_app) as recorder:
        yield recorder


@pytest.fixture
def outbox_fake(outbox_app: Any) -> Iterator[OutboxRecorder]:
    """Records what this test's code would store, and writes nothing: no table is needed."""
    with OutboxRecorder(outbox_app, is_fake=True) as recorder:
        yield recorder
