"""An installed, empty outbox table on each database in turn, and an app with two databases."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from celery import Celery
from click.testing import CliRunner, Result

from celery_outbox import Outbox
from celery_outbox.cli import outbox as commands
from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
from tests.processes import HOST, unused_port

#: Calls ``monitor`` of the project and gives back what it printed and its exit code.
Call = Callable[..., Result]


@pytest.fixture(scope="module", params=["sqlite", "postgresql", "mariadb"])
def shared_database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Database]:
    """A database with the table installed, for every test of a module."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('monitor') / 'shared.db'}"
    else:
        url = request.getfixturevalue(request.param).create_database()
    engine = sa.create_engine(url)
    database = Database("default", engine, "celery_outbox")
    install(database)
    yield database
    engine.dispose()


@pytest.fixture
def database(shared_database: Database) -> Database:
    """A database with the table installed, nothing in it, and no relay."""
    tables = shared_database.tables
    with shared_database.begin() as connection:
        connection.execute(sa.delete(tables.messages))
        connection.execute(sa.delete(tables.state).where(tables.state.c.name.startswith("relay:")))
    return shared_database


@pytest.fixture
def boxes() -> Iterator[Callable[[Mapping[str, str]], Outbox]]:
    """Make apps with an Outbox on the databases of these URLs."""
    engines: list[sa.Engine] = []
    apps: list[Celery] = []

    def make(urls: Mapping[str, str]) -> Outbox:
        app = Celery("shop", broker="redis://localhost:1/0", set_as_current=False)
        made = {name: sa.create_engine(url) for name, url in urls.items()}
        engines.extend(made.values())
        apps.append(app)
        return Outbox(app, databases=made)

    yield make
    for app in apps:
        app.close()
    for engine in engines:
        engine.dispose()


@pytest.fixture
def box(boxes: Callable[[Mapping[str, str]], Outbox], tmp_path: Path) -> Outbox:
    """An Outbox on the SQLite databases "shop" and "billing"."""
    made = boxes({name: f"sqlite:///{tmp_path / name}.db" for name in ("shop", "billing")})
    made.install()
    return made


@pytest.fixture
def shop(box: Outbox) -> Database:
    return box.databases["shop"]


@pytest.fixture
def billing(box: Outbox) -> Database:
    return box.databases["billing"]


@pytest.fixture
def monitor(box: Outbox) -> Call:
    """Call ``monitor`` of the app with the two databases."""
    return caller(box)


@pytest.fixture
def monitor_half(boxes: Callable[[Mapping[str, str]], Outbox], shop: Database) -> Call:
    """Call ``monitor`` of an app whose first database is down; the other is "shop"."""
    down = f"postgresql+psycopg://shop:hunter2@{HOST}:{unused_port()}/shop"
    return caller(boxes({"down": down, "shop": shop.url.render_as_string()}))


def caller(box: Outbox) -> Call:
    def call(*arguments: str) -> Result:
        given = ["monitor", *arguments]
        result = CliRunner().invoke(commands, given, obj=SimpleNamespace(app=box.app))
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert "hunter2" not in result.output
        return result

    return call
