"""A relay whose app is set up in another way: what was fixed at the dispatch is what is sent."""

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery

from tests.equivalence.pairs import ID, TASK, Pair, comparable
from tests.relay.apps import make_outbox, relay_once, rows

# Kombu's tables use what SQLAlchemy 2.1 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")

OTHERS = {
    "task_compression": "gzip",
    "task_serializer": "yaml",
    "task_default_queue": "elsewhere",
    "task_default_exchange": "elsewhere",
    "task_routes": {"*": {"queue": "elsewhere", "priority": 9}},
    "task_default_priority": 7,
    "task_default_delivery_mode": 1,
    "task_create_missing_queues": False,
    "task_protocol": 1,
    "timezone": "Asia/Kolkata",
}

CALLS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "compression": {"compression": "zlib"},
    "compression of pickle": {"compression": "bzip2", "serializer": "pickle"},
    "a queue": {"queue": "reports"},
    "a delay": {"countdown": 0, "expires": 600},
}


@pytest.mark.parametrize("name", CALLS)
def test_the_settings_of_a_relay_change_nothing(name: str, pair: Pair, engine: sa.Engine) -> None:
    compare(pair, lambda app, **choice: apply(app, **CALLS[name], **choice), engine)


def test_settings_changed_after_the_dispatch_change_nothing(pair: Pair) -> None:
    def call(app: Celery, **choice: bool) -> None:
        apply(app, **choice)
        app.conf.update(OTHERS)

    compare(pair, call, None)


def apply(app: Celery, **options: Any) -> None:
    app.tasks[TASK].apply_async((1, 2), task_id=ID, **options)


def compare(pair: Pair, call: Callable[..., None], engine: sa.Engine | None) -> None:
    """Assert that both come out alike when the relay of another app, or the same, delivers."""
    queues = ("celery", "reports", "elsewhere")
    call(pair.plain)
    plain = pair.take(*queues)
    call(pair.outbox.app, via_outbox=True)
    relays = pair.outbox if engine is None else make_outbox(pair.url, engine, config=OTHERS)
    relay_once(relays)
    assert rows(pair.outbox) == []
    assert comparable(pair.take(*queues)) == comparable(plain)
    relays.app.close()
