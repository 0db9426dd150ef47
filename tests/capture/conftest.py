"""What the tests of capture share: engines, and apps with an installed outbox and no broker.

Making tables takes longer than most of these tests: where a test does not change them it gets a copy
of a furnished SQLite file, or the one furnished database of its server, emptied.
"""

import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery
from sqlalchemy import event

from celery_outbox import Outbox
from tests.capture.shop import (
    TASK_NAME,
    Base,
    FurnishedEngine,
    Listen,
    MakeEngine,
    OpenShop,
    Shop,
    receipt,
)
from tests.processes import unused_port
from tests.servers import DatabaseServer


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Make engines that are disposed of when the test ends."""
    engines: list[sa.Engine] = []

    def make(url: str | sa.URL, **options: Any) -> sa.Engine:
        engine = sa.create_engine(url, **options)
        if engine.name == "sqlite":
            # No test cuts the power: a commit need not wait for the disk.
            event.listen(engine, "connect", lambda driver, _: driver.execute("PRAGMA synchronous=OFF"))
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.dispose()


@pytest.fixture
def make_app() -> Callable[..., Celery]:
    """Make apps, each with a name of its own, whose broker nobody listens for."""

    def make(**options: Any) -> Celery:
        app = Celery(
            f"shop-{uuid.uuid4().hex[:8]}",
            set_as_current=False,
            **{"broker": f"redis://127.0.0.1:{unused_port()}/0"} | options,
        )
        # Shared, it would be made anew for every later app of the test run.
        app.task(name=TASK_NAME, shared=False)(receipt)
        return app

    return make


@pytest.fixture
def open_shop(make_app: Callable[..., Celery]) -> Iterator[OpenShop]:
    """Open shops: an app, its installed outbox on the databases given, and empty orders.

    `databases_as` is what the outbox is given when that is to be something else than the engines.
    """

    outboxes: list[Outbox] = []

    def open_(
        databases: dict[str, sa.Engine],
        databases_as: dict[str, Any] | None = None,
        app: Celery | None = None,
        **settings: Any,
    ) -> Shop:
        app = app or make_app()
        # No test shall store beside a transaction by accident.
        settings = {"require_transaction": True} | settings
        outbox = Outbox(app, databases=databases_as or databases, **settings)
        if not all(sa.inspect(engine).has_table("orders") for engine in databases.values()):
            furnish(outbox, databases)
        if databases_as:
            outboxes.append(outbox)
        return Shop(app=app, outbox=outbox, engines=databases)

    yield open_
    for outbox in outboxes:
        for database in outbox.databases.values():
            # An engine that the outbox opened has no owner but this.
            with database.begin() as connection:
                opened = connection.engine
            opened.dispose()


@pytest.fixture
def engine(database_url: str, make_engine: MakeEngine) -> sa.Engine:
    """An engine for an empty database, on each of the three in turn."""
    return make_engine(database_url)


@pytest.fixture(scope="session")
def furnished_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with all tables, to be copied."""
    path = tmp_path_factory.mktemp("furnished") / "test.db"
    furnish_database(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def furnished_postgresql(postgresql: DatabaseServer) -> str:
    return furnish_database(postgresql.create_database())


@pytest.fixture(scope="session")
def furnished_mariadb(mariadb: DatabaseServer) -> str:
    return furnish_database(mariadb.create_database())


@pytest.fixture
def furnished_engine(
    request: pytest.FixtureRequest, tmp_path: Path, make_engine: MakeEngine
) -> FurnishedEngine:
    """Make an engine for a database with all tables, which must be left as they are."""

    def make(kind: str, **options: Any) -> sa.Engine:
        furnished = request.getfixturevalue(f"furnished_{kind}")
        if kind == "sqlite":
            copy = shutil.copy(furnished, tmp_path / "test.db")
            return make_engine(f"sqlite:///{copy}", **options)
        engine = make_engine(furnished, **options)
        empty(engine)
        return engine

    return make


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def shop_engine(request: pytest.FixtureRequest, furnished_engine: FurnishedEngine) -> sa.Engine:
    """An engine for a database with all tables, on each of the three in turn."""
    return furnished_engine(request.param)


@pytest.fixture
def shop(shop_engine: sa.Engine, open_shop: OpenShop) -> Shop:
    """A shop on each of the three databases in turn."""
    return open_shop({"default": shop_engine})


@pytest.fixture
def sqlite_engine(furnished_engine: FurnishedEngine) -> sa.Engine:
    """An engine for a SQLite file of the test's own, with all tables."""
    return furnished_engine("sqlite")


@pytest.fixture
def sqlite_shop(sqlite_engine: sa.Engine, open_shop: OpenShop) -> Shop:
    """A shop on SQLite, where the database does not matter."""
    return open_shop({"default": sqlite_engine})


@pytest.fixture
def memory_app(make_app: Callable[..., Celery]) -> Celery:
    """An app whose broker is this process, with a queue of its own."""
    queue = f"queue-{uuid.uuid4().hex[:8]}"
    return make_app(broker="memory://", task_default_queue=queue)


@pytest.fixture
def two_engines(
    sqlite_engine: sa.Engine, other_url: str, furnished_sqlite: Path, make_engine: MakeEngine
) -> dict[str, sa.Engine]:
    """Engines of two databases, main and billing, on SQLite, with all tables."""
    billing = make_engine(other_url)
    shutil.copy(furnished_sqlite, str(billing.url.database))
    return {"main": sqlite_engine, "billing": billing}


@pytest.fixture
def memory_shop(memory_app: Celery, two_engines: dict[str, sa.Engine], open_shop: OpenShop) -> Shop:
    """A shop with two databases, where what is sent directly can be seen."""
    return open_shop(two_engines, app=memory_app, require_transaction=False)


@pytest.fixture
def other_url(tmp_path: Path) -> str:
    """The URL of a second SQLite file."""
    return f"sqlite:///{tmp_path / 'other.db'}"


@pytest.fixture
def two_shop(two_engines: dict[str, sa.Engine], open_shop: OpenShop) -> Shop:
    """A shop with two databases, main and billing."""
    return open_shop(two_engines)


@pytest.fixture
def listen() -> Iterator[Listen]:
    """Register listeners until the test ends."""
    registered: list[tuple[Any, str, Callable[..., Any]]] = []

    def listen_(target: Any, name: str, listener: Callable[..., Any]) -> None:
        event.listen(target, name, listener)
        registered.append((target, name, listener))

    yield listen_
    for each in registered:
        event.remove(*each)


def furnish(outbox: Outbox, databases: Mapping[str, sa.Engine]) -> None:
    outbox.install()
    for engine in databases.values():
        Base.metadata.create_all(engine)


def furnish_database(url: str) -> str:
    databases = {"default": sa.create_engine(url, poolclass=sa.NullPool)}
    furnish(Outbox(Celery("furnisher", set_as_current=False), databases=databases), databases)
    return url


def empty(engine: sa.Engine) -> None:
    """Delete every row; what a failed test left locked is an error soon."""
    patience = {"postgresql": "SET lock_timeout = '5s'", "mysql": "SET lock_wait_timeout = 5"}
    with engine.begin() as connection:
        connection.execute(sa.text(patience[engine.name]))
        for table in ("celery_outbox", *Base.metadata.tables):
            connection.execute(sa.text(f"DELETE FROM {table}"))
    engine.dispose()
