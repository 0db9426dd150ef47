"""An installed, empty outbox table on each database in turn, and an app with two databases."""

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import sqlalchemy as sa
from click.testing import Result

from celery_outbox import Outbox
from celery_outbox.storage.database import Database
from tests.desk import conftest as desk
from tests.processes import HOST, unused_port
from tests.storage import conftest as storage

#: Calls ``monitor`` of the project and gives back what it printed and its exit code.
Call = Callable[..., Result]


shared_database = storage.shared_database
boxes, box, shop, billing = desk.boxes, desk.box, desk.shop, desk.billing


@pytest.fixture
def database(shared_database: Database) -> Database:
    """A database with the table installed, nothing in it, and no relay."""
    tables = shared_database.tables
    with shared_database.begin() as connection:
        connection.execute(sa.delete(tables.messages))
        connection.execute(sa.delete(tables.state).where(tables.state.c.name.startswith("relay:")))
    return shared_database


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
    return partial(desk.caller(box), "monitor")
