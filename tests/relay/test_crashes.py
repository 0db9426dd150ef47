"""A producer that dies: what it committed is delivered, what it did not never was."""

import sys

import pytest
import sqlalchemy as sa

from tests.processes import HOST, unused_port
from tests.relay.apps import relay_once, rows
from tests.relay.commands import run
from tests.relay.conftest import OpenOutbox
from tests.relay.wire import task_ids


@pytest.mark.parametrize(
    ("database_url", "how"),
    [("sqlite", "exit"), ("sqlite", "kill"), ("postgresql", "kill"), ("mariadb", "kill")],
    indirect=["database_url"],
)
def test_what_a_dead_producer_committed_is_delivered_and_nothing_else(
    how: str, database_url: str, redis_url: str, open_outbox: OpenOutbox
) -> None:
    outbox = open_outbox(redis_url, database_url)
    bind = outbox.settings.databases["default"]
    assert isinstance(bind, sa.Engine)
    with bind.begin() as connection:
        connection.execute(sa.text("CREATE TABLE orders (id INTEGER PRIMARY KEY)"))
    # The broker is down as long as the producer lives.
    nowhere = f"redis://{HOST}:{unused_port()}/0"
    done = run([sys.executable, "-m", "tests.relay.dying", database_url, nowhere, how])
    assert done.returncode == (1 if how == "exit" else -9), done.stderr
    committed, _ = done.stdout.split()
    assert [row.task_id for row in rows(outbox)] == [committed]
    relay_once(outbox)
    assert task_ids(redis_url) == [committed]
    with bind.connect() as connection:
        assert connection.execute(sa.text("SELECT id FROM orders")).scalars().all() == [1]
