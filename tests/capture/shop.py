"""A small shop: business rows and an app with an outbox, and what a test asks about the two.

A task's id says where it was sent; an order's number where it was inserted. Each test compares what
lies in the database afterwards, read by a connection that nobody else uses.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from celery import Celery
from celery.result import AsyncResult
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from celery_outbox import Outbox

TRACKING_LOGGER = "celery_outbox.capture.tracking"
TASK_NAME = "shop.receipt"


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    note: Mapped[str | None] = mapped_column(sa.String(50))


class Invoice(Base):
    __tablename__ = "bills"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class OutOfStockError(Exception):
    """Raised to leave a transaction without committing it."""


def receipt(*args: Any) -> None:
    """What every dispatch of these tests would run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shop:
    """An app with an installed outbox; `engine` is that of the first database."""

    app: Celery
    outbox: Outbox
    engines: Mapping[str, sa.Engine]

    @property
    def engine(self) -> sa.Engine:
        return next(iter(self.engines.values()))

    def send(self, task_id: str, **options: Any) -> AsyncResult:
        task = self.app.tasks[TASK_NAME]
        return task.apply_async((task_id,), task_id=task_id, **{"via_outbox": True} | options)

    def order_and_send(self, where: Session | sa.Connection, number: int) -> None:
        """Insert an order at once and send a task named like it."""
        insert_order(where, number)
        self.send(str(number))

    @property
    def sent(self) -> list[str]:
        """The ids of the tasks that lie on the broker; only of a shop whose broker is in memory."""
        found: list[str] = []
        queue_name = self.app.conf.task_default_queue
        with self.app.connection_for_read() as broker, broker.SimpleQueue(queue_name) as queue:
            while len(queue):
                found.append(queue.get(block=False).headers["id"])
        return found

    @property
    def tasks(self) -> list[str]:
        """The ids of the tasks stored in the first database."""
        return tasks(self.engine)

    @property
    def orders(self) -> list[int]:
        """The orders committed in the first database."""
        return orders(self.engine)


OpenShop = Callable[..., Shop]
MakeEngine = Callable[..., sa.Engine]
FurnishedEngine = Callable[..., sa.Engine]
Listen = Callable[[Any, str, Callable[..., Any]], None]


def insert_order(where: Session | sa.Connection, number: int) -> None:
    where.execute(sa.insert(Order.__table__).values(id=number))  # type: ignore[arg-type]


def tasks(engine: sa.Engine, table: str = "celery_outbox") -> list[str]:
    """The ids of the stored tasks, in the order in which they were stored."""
    return _read(
        engine, sa.select(sa.column("task_id")).select_from(sa.table(table)).order_by(sa.text("id"))
    )


def orders(engine: sa.Engine) -> list[int]:
    return _read(engine, sa.select(Order.id).order_by(Order.id))


def invoices(engine: sa.Engine) -> list[int]:
    return _read(engine, sa.select(Invoice.id).order_by(Invoice.id))


def _read(engine: sa.Engine, query: sa.Select[Any]) -> list[Any]:
    witness = sa.create_engine(engine.url, poolclass=sa.NullPool)
    with witness.connect() as connection:
        return list(connection.scalars(query))
