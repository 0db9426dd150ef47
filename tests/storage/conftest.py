"""An installed, empty outbox table on each database in turn.

The database is one for a whole module, which is faster than one for each test; what a test leaves
in it is deleted before the next.
"""

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install


@pytest.fixture(scope="module", params=["sqlite", "postgresql", "mariadb"])
def shared_database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Database]:
    """A database with the table installed, for every test of a module."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('storage') / 'shared.db'}"
    else:
        url = request.getfixturevalue(request.param).create_database()
    engine = sa.create_engine(url)
    database = Database("default", engine, "celery_outbox")
    install(database)
    yield database
    engine.dispose()


@pytest.fixture
def database(shared_database: Database) -> Database:
    """A database with the table installed and nothing in it."""
    with shared_database.begin() as connection:
        connection.execute(sa.delete(shared_database.tables.messages))
    return shared_database


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    """An engine of a database that has no table yet."""
    engine = sa.create_engine(database_url)
    yield engine
    engine.dispose()
