"""What the operator's desk changes: only rows that no relay is at, whoever is faster."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
import sqlalchemy as sa

from celery_outbox.storage.database import Database
from celery_outbox.storage.desk import Desk
from celery_outbox.storage.schema import FAR_FUTURE
from tests.storage.rows import HOUR, add, change, claim, hours_from_now, make_message, rows
from tests.storage.test_desk import REVIVED, ids, look, row_ids
from tests.storage.test_states import EXAMPLES, make_row
from tests.waiting import wait_until


def revive(database: Database, *task_ids: str) -> int:
    desk = Desk(database)
    chosen = row_ids(database, *task_ids)
    return database.run(lambda connection: desk.revive(connection, chosen))


def test_only_messages_that_were_tried_and_are_not_reserved_are_revived(database: Database) -> None:
    for name in EXAMPLES:
        make_row(database, name)
    before = {row.task_id: row for row in rows(database)}
    assert revive(database) == len(REVIVED)
    for row in rows(database):
        old = before[row.task_id]
        if row.task_id not in REVIVED:
            assert row == old
            continue
        assert abs(row.scheduled_at - datetime.now(UTC)) < timedelta(minutes=1)
        assert (row.attempts, row.error, row.finished_at) == (old.attempts, None, None)
        assert (row.claim_token, row.lease_until) == (None, None)
    assert set(ids(look(database, states=["ready"]))) == REVIVED | {"new"}


@pytest.mark.parametrize("state", ["retrying", "failed"])
def test_a_message_is_never_revived_before_its_intended_time(state: str, database: Database) -> None:
    add(database, make_message("later", countdown=7200.0), make_message("past", countdown=0.0))
    finished = hours_from_now(-1) if state == "failed" else None
    next_at = FAR_FUTURE if state == "failed" else hours_from_now(1)
    change(database, attempts=3, error="no", finished_at=finished, scheduled_at=next_at)
    change(database, "past", deliver_at=hours_from_now(-5))
    assert revive(database) == 2
    later, past = rows(database)
    assert later.scheduled_at == later.deliver_at
    assert abs(past.scheduled_at - datetime.now(UTC)) < timedelta(minutes=1)
    assert [message.state for message in look(database)] == ["ready", "retrying"]


def forget(database: Database, *task_ids: str) -> int:
    chosen = row_ids(database, *task_ids)
    return database.run(partial(Desk(database).forget, ids=chosen))


def reschedule(database: Database, eta: datetime, envelope: str = "new") -> int:
    """Move every row; how many could be."""
    desk = Desk(database)
    return sum(
        database.run(partial(desk.reschedule, id_=row_id, eta=eta, envelope=envelope))
        for row_id in row_ids(database)
    )


def move_an_hour(database: Database) -> int:
    return reschedule(database, hours_from_now(1))


@pytest.mark.parametrize("late_change", [revive, forget, move_an_hour])
def test_a_relay_that_is_reserving_a_message_is_faster_than_its_operator(
    late_change: Callable[[Database], int], database: Database
) -> None:
    add(database, make_message())
    change(database, attempts=1, error="no")
    before = threading.Event()
    if database.url.get_backend_name() == "sqlite":
        # There a second writer does not even begin.
        claim(database)
        assert late_change(database) == 0
        return
    with ThreadPoolExecutor(1) as pool:

        def late() -> int:
            before.set()
            return late_change(database)

        with database.begin() as connection:
            database.store.claim(connection, broker="shop", limit=1, lease=HOUR)
            changed = pool.submit(late)
            assert before.wait(10)
            # InnoDB shows what it showed before to those who ask more often.
            waits = partial(is_someone_waiting, database)
            wait_until(waits, message="the operator waiting for the claim", interval=0.15)
        assert changed.result(timeout=10) == 0
    (row,) = rows(database)
    assert (row.attempts, row.error, row.deliver_at) == (2, "no", None)
    assert row.claim_token is not None


def test_only_messages_that_are_neither_reserved_nor_delivered_are_forgotten(
    database: Database,
) -> None:
    for name in EXAMPLES:
        make_row(database, name)
    kept = {name for name, example in EXAMPLES.items() if example[0] in {"reserved", "delivered"}}
    assert forget(database) == len(EXAMPLES) - len(kept)
    assert {row.task_id for row in rows(database)} == kept


def test_no_others_than_the_rows_that_are_named_are_forgotten(database: Database) -> None:
    add(database, *map(make_message, ["a", "b", "a"]))
    assert forget(database, "a") == 2
    assert [row.task_id for row in rows(database)] == ["b"]


def test_only_messages_that_wait_are_rescheduled(database: Database) -> None:
    for name in EXAMPLES:
        make_row(database, name)
    before = {row.task_id: row for row in rows(database)}
    waiting = {
        name for name, example in EXAMPLES.items() if example[0] in {"ready", "delayed", "retrying"}
    }
    eta = hours_from_now(7)
    assert reschedule(database, eta) == len(waiting)
    for row in rows(database):
        old = before[row.task_id]
        if row.task_id not in waiting:
            assert row == old
            continue
        assert (row.scheduled_at, row.deliver_at, row.message) == (eta, eta, "new")
        assert (row.claim_token, row.lease_until) == (None, None)
        assert (row.attempts, row.error, row.body) == (old.attempts, old.error, old.body)
    assert {each.state for each in look(database) if each.task_id in waiting} == {"delayed", "retrying"}


def test_a_message_whose_new_time_has_passed_is_ready_since_now(database: Database) -> None:
    add(database, make_message(countdown=7200.0))
    assert reschedule(database, hours_from_now(-3)) == 1
    (row,) = rows(database)
    assert abs(row.scheduled_at - datetime.now(UTC)) < timedelta(minutes=1)
    assert [each.state for each in look(database)] == ["ready"]


def is_someone_waiting(database: Database) -> bool:
    query = {
        "postgresql": "SELECT count(*) FROM pg_locks WHERE NOT granted",
        "mysql": "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
    }[database.url.get_backend_name()]
    with database.begin() as connection:
        return bool(connection.execute(sa.text(query)).scalar())
