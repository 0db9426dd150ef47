"""The statements of the operator's desk: what is shown, what may be changed, and what never is."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from celery_outbox.policy import RetryPolicy
from celery_outbox.storage.database import Database
from celery_outbox.storage.desk import CONTENTS_BYTES, STATES, Desk, Filter, Page, StoredMessage
from celery_outbox.storage.schema import FAR_FUTURE
from tests.storage.rows import HOUR, add, change, hours_from_now, make_message, rows
from tests.storage.test_states import EXAMPLES, make_row

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
        desk.forgettable(connection, after=0, limit=5)
    assert statements
    for secret in (".message,", ".body", "claim_token"):
        assert secret not in " ".join(statements)


def test_every_message_with_an_id_is_found(database: Database, desk: Desk) -> None:
    add(database, *map(make_message, ["a", "b", "a", "c"]))
    found = database.read(lambda connection: desk.find(connection, ["a", "c", "x"]))
    assert ids(found) == ["a", "a", "c"]


def test_what_rows_carry_is_read_but_for_long_bodies(database: Database, desk: Desk) -> None:
    long = b"x" * (CONTENTS_BYTES + 1)
    add(database, make_message("a", body=b"\0\xff"), make_message("b", body=long), make_message("c"))
    a, b, c = row_ids(database)
    found = database.read(partial(desk.contents, ids=[a, b]))
    assert {row_id: each.body for row_id, each in found.items()} == {a: b"\0\xff", b: None}
    assert found[b].envelope == make_message("b").envelope
    assert c not in found


CHOSEN: dict[str, tuple[Filter, list[str]]] = {
    "task": (Filter(tasks=["shop.add"]), ["add"]),
    "beginning": (Filter(tasks=["shop.*"]), ["add", "add more", "percent", "billing"]),
    "no pattern of SQL": (Filter(tasks=["shop%*", "s_op.add"]), ["percent sign"]),
    "two tasks": (Filter(tasks=["shop.add", "Shop.add"]), ["add", "large"]),
    "any task": (
        Filter(tasks=["*"]),
        ["add", "add more", "large", "percent sign", "percent", "billing"],
    ),
    "broker": (Filter(brokers=["billing"]), ["billing"]),
    "queue": (Filter(queues=["slow", "none"]), ["percent"]),
    "all at once": (
        Filter(states=["retrying"], tasks=["shop.*"], brokers=["shop"], queues=["celery"]),
        ["add more"],
    ),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_messages_can_be_chosen_by_state_task_broker_and_queue(name: str, database: Database) -> None:
    chosen, expected = CHOSEN[name]
    add(
        database,
        make_message("add"),
        make_message("add more", task_name="shop.add.more"),
        make_message("large", task_name="Shop.add"),
        make_message("percent sign", task_name="shop%add"),
        make_message("percent", task_name="shop.percent", queue="slow"),
        make_message("billing", task_name="shop.bill", broker="billing"),
    )
    for task_id in ("add more", "percent", "billing"):
        change(database, task_id, attempts=1, error="no", scheduled_at=hours_from_now(1))
    desk = Desk(database)
    listed = database.read(partial(desk.messages, limit=50, chosen=chosen))
    assert sorted(ids(listed)) == sorted(expected)
    forgettable = walk(database, partial(desk.forgettable, chosen=chosen, limit=2))
    assert forgettable == row_ids(database, *expected)
    tried = set(expected) & {"add more", "percent", "billing"}
    attempted = walk(database, partial(desk.attempted, chosen=chosen, limit=2))
    assert attempted == (row_ids(database, *tried) if tried else [])


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
