"""Celery apps with an Outbox, and relays for them, inside the test's own process."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import sqlalchemy as sa
from celery import Celery

from celery_outbox import Outbox
from celery_outbox.relay.loop import Relay, RelayOptions
from celery_outbox.storage.database import Database


def add(x: int, y: int) -> int:
    """The task of every app here; Celery wants a function with a name."""
    return x + y


def make_outbox(
    broker: str, source: sa.Engine | str, *, main: str = "shop", config: Any = None, **settings: Any
) -> Outbox:
    """Make an app named ``main`` with the task ``add`` and an outbox on one installed database."""
    app = Celery(main, broker=broker, set_as_current=False)
    app.conf.update(config or {})
    app.task(add, name="shop.add", shared=False)
    outbox = Outbox(app, databases={"default": source}, **settings)
    outbox.install()
    return outbox


def make_relay(outbox: Outbox, **options: Any) -> Relay:
    """Make a relay as the command makes one, for every broker that the app knows."""
    settings = outbox.settings
    chosen: dict[str, Any] = {
        "lease": settings.retry_after,
        "retry": settings.retry,
        "keep": settings.keep,
        "sleep": timedelta(seconds=0.05),
    }
    return Relay(
        list(outbox.databases.values()),
        {name: partial(outbox.publisher, name) for name in outbox.brokers.names},
        RelayOptions(**chosen | options),
    )


def relay_once(outbox: Outbox, **options: Any) -> None:
    """Give every broker of every database one turn."""
    make_relay(outbox, once=True, **options).run()


def relay_all(outbox: Outbox) -> bool:
    """Give every broker one turn, and say whether nothing is left."""
    relay_once(outbox)
    return not rows(outbox)


@contextmanager
def relaying(outbox: Outbox, **options: Any) -> Iterator[Relay]:
    """Run a relay in a thread beside the test; afterwards it has ended."""
    relay = make_relay(outbox, **options)
    thread = threading.Thread(target=relay.run, name="relay")
    thread.start()
    try:
        yield relay
    finally:
        relay.stop()
        thread.join(timeout=30)
        assert not thread.is_alive()


def send(outbox: Outbox, *args: Any, **options: Any) -> str:
    """Store one ``shop.add`` and return its id."""
    result = outbox.app.send_task("shop.add", args or (1, 2), via_outbox=True, **options)
    return str(result.id)


def rows(outbox: Outbox) -> Sequence[sa.Row[Any]]:
    """Return every row of the default database, in the order of their ids."""
    return rows_of(outbox.databases["default"])


def rows_of(database: Database) -> Sequence[sa.Row[Any]]:
    """Return every row of a database, in the order of their ids."""
    t = database.tables.messages
    with database.begin() as connection:
        return connection.execute(sa.select(t).order_by(t.c.id)).all()


def make_due(outbox: Outbox) -> None:
    """Let every lease have lapsed and every wait be over."""
    database = outbox.databases["default"]
    t = database.tables.messages
    now = database.dialect.clock()
    values = {"lease_until": None, "claim_token": None, "scheduled_at": now}
    with database.begin() as connection:
        connection.execute(sa.update(t).where(t.c.finished_at.is_(None)).values(values))
