"""A shop as users of the plugin have one: an app, its Outbox, and tests inside a transaction."""

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery
from celery.app.task import Task
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from celery_outbox import Outbox
from celery_outbox.testing import RecordedTask
from tests.processes import unused_port


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shop:
    """An app with its Outbox on one database; `ran` is what its tasks were called with."""

    app: Celery
    outbox: Outbox
    engine: sa.Engine
    ran: list[Any] = field(default_factory=list)

    @property
    def receipt(self) -> Task:
        """A task that notes its first argument."""
        task: Task = self.app.tasks["shop.receipt"]
        return task

    def task(self, **options: Any) -> Callable[[Callable[..., Any]], Task]:
        """Register a task, under the name of its function."""

        def register(function: Callable[..., Any]) -> Task:
            task: Task = self.app.task(name=f"shop.{function.__name__}", shared=False, **options)(
                function
            )
            return task

        return register

    def send(self, *args: Any, **options: Any) -> str:
        """Dispatch a receipt through the outbox; its id."""
        task_id: str = self.receipt.apply_async(args, **{"via_outbox": True} | options).id
        return task_id

    def rows(self) -> int:
        """How many messages lie in the table."""
        witness = sa.create_engine(self.engine.url, poolclass=sa.NullPool)
        with witness.connect() as connection:
            return connection.scalar(sa.text("SELECT count(*) FROM celery_outbox")) or 0


OpenShop = Callable[..., Shop]


def first_arguments(tasks: list[RecordedTask]) -> list[Any]:
    """What tells the tasks of a test apart."""
    return [task.args[0] for task in tasks]


@pytest.fixture
def open_shop() -> Iterator[OpenShop]:
    """Open shops; `installs=False` leaves the outbox's table out."""
    engines: list[sa.Engine] = []

    def open_(url: str, *, installs: bool = True, **options: Any) -> Shop:
        engine = sa.create_engine(url)
        engines.append(engine)
        Base.metadata.create_all(engine)
        app = Celery(
            f"shop-{uuid.uuid4().hex[:8]}",
            set_as_current=False,
            **{"broker": f"redis://127.0.0.1:{unused_port()}/0"} | options,
        )
        outbox = Outbox(app, databases={"default": engine})
        if installs:
            outbox.install()
        shop = Shop(app=app, outbox=outbox, engine=engine)

        @shop.task()
        def receipt(*args: Any, **kwargs: Any) -> Any:
            shop.ran.append(args[0])
            return args[0]

        return shop

    yield open_
    for engine in engines:
        engine.dispose()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty database, on each of the two in turn."""
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


@pytest.fixture
def shop(sqlite_url: str, open_shop: OpenShop) -> Shop:
    """A shop on SQLite, where the database does not matter."""
    return open_shop(sqlite_url)


@pytest.fixture
def outbox_app(shop: Shop) -> Outbox:
    """What the plugin records."""
    return shop.outbox


@pytest.fixture
def session(shop: Shop) -> Iterator[Session]:
    with Session(shop.engine) as session:
        yield session
