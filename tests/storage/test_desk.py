"""The statements of the operator's desk: what is shown, what may be changed, and what never is."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from celery_outbox.policy import RetryPolicy
from celery_outbox.storage.database import Database
from celery_outbox.storage.desk import STATES, Desk, Filter, Page, StoredMessage
from celery_outbox.storage.schema import FAR_FUTURE
from tests.storage.rows import HOUR, add, change, claim, hours_from_now, make_message, rows
from tests.storage.test_states import EXAMPLES, make_row
from tests.waiting import wait_until

TRIED = {name for name, example in EXAMPLES.items() if example[0] in {"ready", "retrying", "failed"}}
REVIVED = TRIED - {"new"}


@pytest.fixture
def desk(database: Database) -> Desk:
    """The desk of an empty table."""
    return Desk(database)


def look(
    database: Database, limit: int = 50, states: Sequence[str] = STATES
) -> Sequence[StoredMessage]:
    desk = Desk(database)
    return database.read(
        lambda connection: desk.messages(connection, limit=limit, chosen=Filter(states=states))
    )


def ids(messages: Sequence[StoredMessage]) -> list[str]:
    return [message.task_id for message in messages]


def row_ids(database: Database, *task_ids: str) -> list[int]:
    return [row.id for row in rows(database) if row.task_id in task_ids or not task_ids]


def make_kept(database: Database, *task_ids: str, hours: float, error: str | None = None) -> None:
    """Store messages that were delivered so long ago, or given up when there is an error."""
    add(database, *map(make_message, task_ids))
    ended = {"scheduled_at": FAR_FUTURE, "finished_at": hours_from_now(-hours), "error": error}
    for task_id in task_ids:
        change(database, task_id, **ended)


def test_the_states_are_those_of_the_predicates(database: Database) -> None:
    assert set(STATES) == set(database.tables.states(database.dialect.now()))


def test_each_message_is_shown_with_its_state_in_words(database: Database) -> None:
    for name in EXAMPLES:
        make_row(database, name)
    found = {message.task_id: message.state for message in look(database)}
    assert found == {name: example[0] for name, example in EXAMPLES.items()}


@pytest.mark.parametrize("state", STATES)
def test_messages_of_one_state_are_shown(state: str, database: Database) -> None:
    for name in EXAMPLES:
        make_row(database, name)
    for name in ("given up", "kept"):
        change(database, name, scheduled_at=FAR_FUTURE)
    expected = {name for name, example in EXAMPLES.items() if example[0] == state}
    assert set(ids(look(database, states=[state]))) == expected


def test_messages_of_all_brokers_are_shown_in_the_order_of_their_times(database: Database) -> None:
    brokers = {"a": "shop", "b": "billing", "c": "Shop", "d": "shop"}
    add(database, *(make_message(name, broker=broker) for name, broker in brokers.items()))
    for name, hours in {"a": 3, "b": -1, "c": 2, "d": -2}.items():
        change(database, name, scheduled_at=hours_from_now(hours))
    make_kept(database, "e", hours=1)
    assert ids(look(database)) == ["d", "b", "c", "a", "e"]
    assert ids(look(database, 2)) == ["d", "b"]
    assert {message.task_id: message.broker for message in look(database)} == brokers | {"e": "shop"}


def test_everything_but_the_contents_is_shown(database: Database) -> None:
    policy = RetryPolicy(max_attempts=7, base_delay=timedelta(microseconds=5), max_delay=HOUR)
    message = make_message("id-1", countdown=7200.0, expires_in=9000.0, retry=policy, queue="reports")
    add(database, message)
    change(database, attempts=2, error="no")
    (row,), (shown,) = rows(database), look(database)
    now = datetime.now(UTC)
    assert abs(shown.read_at - now) < timedelta(minutes=1)
    assert shown == StoredMessage(
        database="default",
        id=row.id,
        task_id="id-1",
        task_name="shop.add",
        broker="shop",
        queue="reports",
        state="retrying",
        attempts=2,
        max_attempts=7,
        base_delay=timedelta(microseconds=5),
        max_delay=HOUR,
        next_attempt_at=row.scheduled_at,
        deliver_at=row.deliver_at,
        expires_at=row.expires_at,
        reserved_until=None,
        finished_at=None,
        created_at=row.created_at,
        error="no",
        read_at=shown.read_at,
    )


def test_a_next_attempt_is_shown_only_where_there_will_be_one(database: Database) -> None:
    add(database, make_message("waiting"))
    make_kept(database, "delivered", hours=1)
    make_kept(database, "failed", hours=1, error="no")
    make_row(database, "claimed")
    shown = {message.task_id: message for message in look(database)}
    assert shown["waiting"].next_attempt_at is not None
    for name in ("delivered", "failed", "claimed"):
        assert shown[name].next_attempt_at is None
    assert shown["claimed"].reserved_until is not None
    assert shown["waiting"].reserved_until is None


def test_neither_bodies_nor_headers_nor_tokens_are_read(database: Database, desk: Desk) -> None:
    make_row(database, "claimed")
    statements: list[str] = []
    with database.begin() as connection:

        def note(conn: object, cursor: object, statement: str, *rest: object) -> None:
            statements.append(statement)

        sa.event.listen(connection, "before_cursor_execute", note)
        desk.messages(connection, limit=5)
        desk.find(connection, ["claimed"])
        desk.attempted(connection, after=0, limit=5)
    assert statements
    for secret in (".message,", ".body", "claim_token"):
        assert secret not in " ".join(statements)


def test_every_message_with_an_id_is_found(database: Database, desk: Desk) -> None:
    add(database, *map(make_message, ["a", "b", "a", "c"]))
    found = database.read(lambda connection: desk.find(connection, ["a", "c", "x"]))
    assert ids(found) == ["a", "a", "c"]


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


def test_a_relay_that_is_reserving_a_message_is_faster_than_a_retry(database: Database) -> None:
    add(database, make_message())
    change(database, attempts=1, error="no")
    before = threading.Event()
    if database.url.get_backend_name() == "sqlite":
        # There a second writer does not even begin.
        claim(database)
        assert revive(database) == 0
        return
    with ThreadPoolExecutor(1) as pool:

        def late() -> int:
            before.set()
            return revive(database)

        with database.begin() as connection:
            database.store.claim(connection, broker="shop", limit=1, lease=HOUR)
            revived = pool.submit(late)
            assert before.wait(10)
            # InnoDB shows what it showed before to those who ask more often.
            waits = partial(is_someone_waiting, database)
            wait_until(waits, message="the retry waiting for the claim", interval=0.15)
        assert revived.result(timeout=10) == 0
    (row,) = rows(database)
    assert (row.attempts, row.error) == (2, "no")
    assert row.claim_token is not None


def is_someone_waiting(database: Database) -> bool:
    query = {
        "postgresql": "SELECT count(*) FROM pg_locks WHERE NOT granted",
        "mysql": "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
    }[database.url.get_backend_name()]
    with database.begin() as connection:
        return bool(connection.execute(sa.text(query)).scalar())


def walk(database: Database, page: partial[Page]) -> list[int]:
    """Go through all pages."""
    found: list[int] = []
    after: int | None = 0
    while after is not None:
        made = database.read(partial(page, after=after))
        found += made.ids
        after = made.end
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_pages_lead_once_through_everything_that_was_attempted(
    size: int, database: Database, desk: Desk
) -> None:
    for name in EXAMPLES:
        make_row(database, name)
    assert walk(database, partial(desk.attempted, limit=size)) == row_ids(database, *REVIVED)


@pytest.mark.parametrize("size", [1, 2, 50])
def test_pages_lead_once_through_everything_that_is_old_enough(
    size: int, database: Database, desk: Desk
) -> None:
    add(database, make_message("waiting"))
    make_kept(database, "old", "old too", hours=3)
    make_kept(database, "failed", hours=3, error="no")
    make_kept(database, "young", hours=1)
    add(database, make_message("other", broker="billing"))
    change(database, "other", scheduled_at=FAR_FUTURE, finished_at=hours_from_now(-3))
    for broker, state, expected in [
        ("shop", "delivered", ["old", "old too"]),
        ("shop", "failed", ["failed"]),
        ("billing", "delivered", ["other"]),
        ("billing", "failed", []),
    ]:
        page = partial(desk.finished, broker=broker, state=state, older_than=2 * HOUR, limit=size)
        found = walk(database, page)
        assert found == (row_ids(database, *expected) if expected else [])


def test_only_what_is_in_the_state_and_old_enough_is_deleted(database: Database, desk: Desk) -> None:
    for name in EXAMPLES:
        make_row(database, name)
    make_kept(database, "young", hours=0.5)
    change(database, "given up", finished_at=hours_from_now(-3))
    change(database, "kept", finished_at=hours_from_now(-3))
    everything = row_ids(database)

    def prune(state: str) -> int:
        return database.run(partial(desk.prune, ids=everything, state=state, older_than=HOUR))

    assert prune("delivered") == 1
    assert {row.task_id for row in rows(database)} == {*EXAMPLES, "young"} - {"kept"}
    assert prune("failed") == 1
    assert {row.task_id for row in rows(database)} == {*EXAMPLES, "young"} - {"kept", "given up"}


def test_finished_messages_are_found_by_the_claims_index(postgresql_url: str) -> None:
    engine = sa.create_engine(postgresql_url)
    database = Database("default", engine, "celery_outbox")
    database.tables.metadata.create_all(engine)
    add(database, make_message())
    plans: list[str] = []
    with engine.connect() as connection:
        connection.exec_driver_sql("SET enable_seqscan = off")

        def explain(conn: sa.Connection, cursor: Any, statement: str, values: Any, *rest: Any) -> None:
            if "LIMIT" in statement:
                found = conn.connection.cursor()
                found.execute(f"EXPLAIN {statement}", values)
                plans.append("\n".join(line for (line,) in found.fetchall()))

        sa.event.listen(connection, "before_cursor_execute", explain)
        desk = Desk(database)
        desk.finished(connection, "shop", "delivered", HOUR, after=7, limit=10)
        desk.messages(connection, limit=10, chosen=Filter(states=["failed"]))
        desk.messages(connection, limit=10)
    assert len(plans) == 3
    for plan in plans:
        assert "ix_celery_outbox_claim" in plan
        assert "Sort" not in plan
    engine.dispose()
