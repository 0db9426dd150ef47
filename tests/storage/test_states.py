"""The states of a row: derived from its columns, exactly one for each row."""

from typing import Any

import pytest
import sqlalchemy as sa

from celery_outbox.storage.database import Database
from tests.storage.rows import add, change, hours_from_now, make_message

PAST, FUTURE = -2.0, 2.0

#: state: (scheduled_at in hours, attempts, lease_until in hours, error, finished)
EXAMPLES: dict[str, tuple[str, float, int, float | None, str | None, bool]] = {
    "new": ("ready", PAST, 0, None, None, False),
    "tried and due again": ("ready", PAST, 3, None, "no", False),
    "lapsed": ("ready", PAST, 1, PAST, None, False),
    "waiting for its time": ("delayed", FUTURE, 0, None, None, False),
    "waiting for its next attempt": ("retrying", FUTURE, 2, None, "no", False),
    "lapsed and put back": ("retrying", FUTURE, 2, PAST, "no", False),
    "claimed": ("reserved", PAST, 1, FUTURE, None, False),
    "claimed again": ("reserved", PAST, 2, FUTURE, "no", False),
    "claimed before its time": ("reserved", FUTURE, 1, FUTURE, None, False),
    "given up": ("failed", FUTURE, 5, None, "no", True),
    "kept": ("delivered", FUTURE, 1, None, None, True),
}


def make_row(database: Database, name: str) -> None:
    _, scheduled, attempts, lease, error, is_finished = EXAMPLES[name]
    values: dict[str, Any] = {
        "scheduled_at": hours_from_now(scheduled),
        "attempts": attempts,
        "lease_until": None if lease is None else hours_from_now(lease),
        "claim_token": None if lease is None else "token",
        "error": error,
        "finished_at": hours_from_now(-1) if is_finished else None,
    }
    add(database, make_message(name))
    change(database, name, **values)


def test_each_row_is_in_exactly_one_state(database: Database) -> None:
    for name in EXAMPLES:
        make_row(database, name)
    t = database.tables.messages
    states = database.tables.states(database.dialect.now())
    columns = [sa.case((predicate, 1), else_=0).label(name) for name, predicate in states.items()]
    with database.begin() as connection:
        found = connection.execute(sa.select(t.c.task_id, *columns)).all()
    assert {row.task_id: [name for name in states if getattr(row, name)] for row in found} == {
        name: [example[0]] for name, example in EXAMPLES.items()
    }


def test_the_counts_of_the_states_add_up_to_the_rows(database: Database) -> None:
    for name in EXAMPLES:
        make_row(database, name)
    with database.begin() as connection:
        counts = database.store.count(connection)
    assert counts == {
        "ready": 3,
        "delayed": 1,
        "retrying": 2,
        "reserved": 3,
        "failed": 1,
        "delivered": 1,
    }


def test_an_empty_table_counts_nothing(database: Database) -> None:
    with database.begin() as connection:
        assert set(database.store.count(connection).values()) == {0}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_claim_takes_the_ready_and_no_others(database: Database, name: str) -> None:
    make_row(database, name)
    with database.begin() as connection:
        assert database.store.is_empty(connection, "shop") == (EXAMPLES[name][0] != "ready")
