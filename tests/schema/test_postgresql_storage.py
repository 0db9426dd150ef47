"""What PostgreSQL's storage parameters are for: a claim writes beside the old row, and no index."""

import os

import pytest
import sqlalchemy as sa

from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
from tests.storage.rows import add, claim, make_message
from tests.waiting import wait_until


@pytest.fixture
def database(postgresql_url: str, request: pytest.FixtureRequest) -> Database:
    engine = sa.create_engine(postgresql_url)
    request.addfinalizer(engine.dispose)
    database = Database("default", engine, "celery_outbox")
    install(database)
    return database


def updates(database: Database) -> tuple[int, int]:
    """Rows updated so far, and how many of them as heap-only tuples."""
    query = sa.text(
        "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'celery_outbox'"
    )
    with database.begin() as connection:
        row = connection.execute(query).one()
    return int(row[0]), int(row[1])


@pytest.mark.parametrize("size", [1, 1000, 20_000], ids=lambda size: f"{size} bytes")
def test_a_claim_updates_no_index(size: int, database: Database) -> None:
    body = os.urandom(size)
    for number in range(10):
        add(database, *(make_message(f"{number} {each}", body=body) for each in range(100)))
    taken = 0
    for _ in range(10):
        taken += len(claim(database, limit=100).messages)
    assert taken == 1000
    # Sessions report what they did when they have been idle for a second, or end.
    wait_until(lambda: updates(database)[0] == 1000)
    _, hot = updates(database)
    # A claimed row is longer, by its token and its lease: not quite all fit beside short ones.
    assert hot >= 900


def test_message_and_body_are_not_compressed(database: Database) -> None:
    add(database, make_message(body=b"x" * 100_000))
    query = sa.text("SELECT pg_column_size(body) FROM celery_outbox")
    with database.begin() as connection:
        assert connection.execute(query).scalar_one() >= 100_000
