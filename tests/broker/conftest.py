"""Outboxes whose broker is Kombu's database transport, in the database that the outbox is in."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import kombu.pools
import pytest
import sqlalchemy as sa
from kombu import Connection
from sqlalchemy.orm import Session

from celery_outbox import Outbox
from tests.capture.shop import Base, insert_order, orders
from tests.relay.apps import make_outbox, rows, send
from tests.relay.wire import database_connection, task_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """An outbox on an engine, and the URL of the broker in the same database."""

    outbox: Outbox
    engine: sa.Engine
    url: str

    def send(self, **options: Any) -> str:
        return send(self.outbox, **options)

    def order_and_send(self, where: Session | sa.Connection, number: int, **options: Any) -> str:
        """Insert an order at once and send a task."""
        insert_order(where, number)
        return self.send(**options)

    @property
    def on_broker(self) -> list[str]:
        """The ids of the tasks that another connection sees in Kombu's table."""
        return task_ids(self.url)

    @property
    def to_relay(self) -> list[str]:
        """The ids of the tasks in the outbox."""
        return [row.task_id for row in rows(self.outbox)]

    @property
    def orders(self) -> list[int]:
        return orders(self.engine)

    def change(self, statement: str) -> None:
        """Change the database as somebody else."""
        with database_connection(self.url) as connection:
            connection.exec_driver_sql(statement)


MakeBeside = Callable[..., Beside]


def furnish(url: str, *queues: str) -> None:
    """Let Kombu make its tables and queues, as a worker that starts."""
    with Connection(url) as broker:
        for queue in queues:
            broker.default_channel.queue_declare(queue)
        broker.default_channel.session.close()


@pytest.fixture
def make_beside() -> Iterator[MakeBeside]:
    """Make outboxes in databases that have an empty table of orders."""
    made: list[Beside] = []

    def make(database: str, *queues: str, broker: str | None = None, **options: Any) -> Beside:
        url = broker or f"sqla+{database}"
        if queues:
            furnish(url, *queues)
        engine = sa.create_engine(database, **options.pop("engine", {}))
        Base.metadata.create_all(engine)
        made.append(Beside(outbox=make_outbox(url, engine, **options), engine=engine, url=url))
        return made[-1]

    yield make
    for each in made:
        each.outbox.app.close()
        each.engine.dispose()
    kombu.pools.reset()


@pytest.fixture
def beside(database_url: str, make_beside: MakeBeside) -> Beside:
    """On each of the three databases in turn, with Kombu's tables and the default queue."""
    return make_beside(database_url, "celery")
