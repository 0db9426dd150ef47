"""An app with two databases, and its commands called inside the test's own process."""

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
from tests.processes import HOST, unused_port

#: Calls a command of the project and gives back what it printed and its exit code.
Call = Callable[..., Result]


@pytest.fixture
def boxes() -> Iterator[Callable[[Mapping[str, str]], Outbox]]:
    """Make apps with an Outbox on the databases of these URLs, installed where they can be reached."""
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
def call(box: Outbox) -> Call:
    """Call a command of the app with the two databases."""
    return caller(box)


@pytest.fixture
def call_half(boxes: Callable[[Mapping[str, str]], Outbox], shop: Database) -> Call:
    """Call a command of an app whose first database is down; the other is "shop"."""
    down = f"postgresql+psycopg://shop:hunter2@{HOST}:{unused_port()}/shop"
    return caller(boxes({"down": down, "shop": shop.url.render_as_string()}))


def caller(box: Outbox) -> Call:
    def call(*arguments: str) -> Result:
        result = CliRunner().invoke(commands, arguments, obj=SimpleNamespace(app=box.app))
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert "hunter2" not in result.output
        return result

    return call
