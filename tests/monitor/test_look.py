"""What a look finds: counts, ages, unknown brokers, failing queues; on every database."""

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from celery_outbox.monitoring import Age, Backlog, BrokerBacklog, Count, Thresholds, look
from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
from celery_outbox.storage.schema import FAR_FUTURE
from tests.storage.rows import HOUR, add, change, claim, hours_from_now, make_message

NAMES = ("ready", "delayed", "retrying", "reserved", "failed", "delivered")


def add_many(database: Database, prefix: str, count: int, **changes: Any) -> list[str]:
    ids = [f"{prefix} {number}" for number in range(count)]
    add(database, *(make_message(task_id, **changes) for task_id in ids))
    return ids


def finish(database: Database, task_id: str, ago: float = 0.0, **values: Any) -> None:
    ended = {"scheduled_at": FAR_FUTURE, "attempts": 1, "finished_at": hours_from_now(-ago)}
    change(database, task_id, **ended | values)


def retry_later(database: Database, task_id: str, **values: Any) -> None:
    waits = {"scheduled_at": hours_from_now(0.1), "attempts": 3, "error": "Refused"}
    change(database, task_id, **waits | values)


def numbers(found: Backlog | BrokerBacklog) -> dict[str, int]:
    return {state: count.number for state, count in found.counts.items() if count.number}


def hours(age: Age) -> float | None:
    return None if age.duration is None else round(age.duration / HOUR, 2)


def test_each_broker_has_its_messages_counted_by_state(database: Database) -> None:
    add(database, make_message("reserved"))
    claim(database)
    add(database, *map(make_message, ("ready", "delayed", "retrying", "failed", "delivered")))
    change(database, "delayed", scheduled_at=hours_from_now(1), deliver_at=hours_from_now(1))
    retry_later(database, "retrying")
    finish(database, "failed", error="Refused")
    finish(database, "delivered")
    add(database, make_message("other", broker="warehouse"))
    found = look(database)
    assert {each.broker: numbers(each) for each in found.brokers} == {
        "shop": dict.fromkeys(NAMES, 1),
        "warehouse": {"ready": 1},
    }
    assert numbers(found) == dict.fromkeys(NAMES, 1) | {"ready": 2}
    assert found.pending == Count(number=5)


def test_nothing_stored_is_nothing_found(database: Database) -> None:
    found = look(database, brokers=["shop", "warehouse"])
    assert (numbers(found), found.pending, found.age) == ({}, Count(number=0), Age())
    assert [(each.broker, each.is_known) for each in found.brokers] == [
        ("shop", True),
        ("warehouse", True),
    ]


@pytest.mark.parametrize("state", ["ready", "reserved", "retrying"])
def test_the_oldest_due_message_counts_whatever_became_of_its_attempts(
    state: str, database: Database
) -> None:
    add(database, make_message("old"))
    if state == "reserved":
        claim(database)
    if state == "retrying":
        retry_later(database, "old")
    change(database, "old", created_at=hours_from_now(-2))
    add(database, make_message("new"))
    found = look(database)
    assert found.counts[state].number >= 1
    assert (hours(found.age), found.age.is_exact) == (2, True)


@pytest.mark.parametrize(
    ("deliver_at", "age"),
    [(None, 5), (-3, 3), (-8, 5), (1, None)],
    ids=["no delay", "its delay has passed", "was due when it was stored", "still delayed"],
)
def test_time_spent_in_an_intended_delay_is_no_age(
    deliver_at: float | None, age: float | None, database: Database
) -> None:
    add(database, make_message("a"))
    intended = None if deliver_at is None else hours_from_now(deliver_at)
    change(database, "a", created_at=hours_from_now(-5), deliver_at=intended)
    assert hours(look(database).age) == age


@pytest.mark.parametrize("error", [None, "Refused"], ids=["delivered", "failed"])
def test_what_is_finished_has_no_age(error: str | None, database: Database) -> None:
    add(database, make_message("a"))
    finish(database, "a", error=error, created_at=hours_from_now(-5))
    assert look(database).age == Age()


def test_each_broker_has_its_own_age(database: Database) -> None:
    add(database, make_message("a"), make_message("b", broker="warehouse"))
    change(database, "a", created_at=hours_from_now(-1))
    change(database, "b", created_at=hours_from_now(-2))
    found = look(database)
    assert {each.broker: hours(each.age) for each in found.brokers} == {"shop": 1, "warehouse": 2}
    assert hours(found.age) == 2


def test_more_than_the_bound_is_at_least_so_many(database: Database) -> None:
    add_many(database, "a", 8)
    add_many(database, "later", 3)
    for number in range(3):
        retry_later(database, f"later {number}")
    counts = look(database, bound=5).counts
    assert counts["ready"] == Count(number=5, is_exact=False)
    assert counts["retrying"] == Count(number=3)
    assert (str(counts["ready"]), str(counts["retrying"])) == ("5+", "3")


@pytest.mark.parametrize("bound", [5, 10], ids=["by the bound", "by a tenth of it"])
def test_an_outage_shows_the_right_age_however_many_retry(bound: int, database: Database) -> None:
    ids = add_many(database, "a", 20)
    for task_id in ids:
        retry_later(database, task_id, created_at=hours_from_now(-1))
    # Tried most often, it waits longest: it is last in the order of the attempts.
    retry_later(database, ids[0], created_at=hours_from_now(-9), scheduled_at=hours_from_now(0.2))
    found = look(database, bound=bound)
    assert found.counts["retrying"] == Count(number=bound, is_exact=False)
    assert (hours(found.age), found.age.is_exact) == (9, True)


def test_an_age_behind_more_than_the_bound_is_at_least_so_much(database: Database) -> None:
    kept, waiting = add_many(database, "kept", 6), add_many(database, "a", 7)
    for task_id in kept:
        finish(database, task_id, created_at=hours_from_now(-9))
    for task_id in waiting:
        retry_later(database, task_id, created_at=hours_from_now(-1))
    retry_later(database, waiting[-1], created_at=hours_from_now(-2), scheduled_at=hours_from_now(0.2))
    found = look(database, bound=5)
    assert (hours(found.age), found.age.is_exact) == (1, False)
    assert (hours(look(database).age), look(database).age.is_exact) == (2, True)


def test_the_newest_of_many_finished_messages_are_looked_at(database: Database) -> None:
    ids = add_many(database, "old", 6)
    for task_id in ids:
        finish(database, task_id)
    add(database, make_message("new"))
    finish(database, "new", error="Refused")
    counts = look(database, bound=3).counts
    assert counts["failed"] == Count(number=1, is_exact=False)
    assert counts["delivered"] == Count(number=2, is_exact=False)


@pytest.mark.parametrize(
    ("limit", "pending", "is_busy"),
    [
        (12, Count(number=12, is_exact=False), True),
        (20, Count(number=20, is_exact=False), True),
        (21, Count(number=20), False),
    ],
)
def test_a_maximum_is_decided_on_a_count_that_stops_at_it(
    limit: int, pending: Count, is_busy: bool, database: Database
) -> None:
    add_many(database, "a", 10)
    add_many(database, "w", 10, broker="warehouse")
    add(database, make_message("kept"))
    finish(database, "kept")
    found = look(database, bound=5, thresholds=Thresholds(pending=limit))
    assert (found.pending, found.is_busy) == (pending, is_busy)


@pytest.mark.parametrize(("minutes", "is_busy"), [(59, True), (61, False)])
def test_an_age_is_reached_by_the_oldest_due_message(
    minutes: int, is_busy: bool, database: Database
) -> None:
    add(database, make_message("a"), make_message("b"))
    change(database, "a", created_at=hours_from_now(-1))
    limit = Thresholds(age=timedelta(minutes=minutes))
    assert look(database, thresholds=limit).is_busy is is_busy


def test_without_thresholds_nothing_is_busy(database: Database) -> None:
    add_many(database, "a", 3)
    assert look(database).is_busy is False


def test_due_messages_of_brokers_that_nobody_knows_are_told_of(database: Database) -> None:
    brokers = ("shop", "old", "later", "finished", "other")
    add(database, *(make_message(name, broker=name) for name in brokers))
    change(database, "later", scheduled_at=hours_from_now(1), deliver_at=hours_from_now(1))
    finish(database, "finished")
    about = {"host": "web-1", "pid": 77, "app": "other"}
    database.run(lambda connection: database.state.see_relay(connection, "r", about))
    found = look(database, brokers=["shop"])
    assert [each.broker for each in found.unknown] == ["old"]
    assert [relay.about for relay in found.running] == [about]
    assert look(database).unknown == []


def test_a_relay_that_was_killed_knows_no_broker(database: Database) -> None:
    add(database, make_message("a", broker="other"))
    about = {"host": "web-1", "pid": 77, "app": "other"}
    database.run(lambda connection: database.state.see_relay(connection, "r", about))
    t = database.tables.state
    with database.begin() as connection:
        stale = sa.update(t).where(t.c.name == "relay:r").values(seen_at=hours_from_now(-0.5))
        connection.execute(stale)
    found = look(database, brokers=["shop"])
    assert [each.broker for each in found.unknown] == ["other"]
    assert (len(found.relays), found.running) == (1, [])


def test_failing_queues_come_with_the_error_of_their_newest_message(database: Database) -> None:
    add_many(database, "r", 3, queue="receipts")
    add_many(database, "m", 1, queue="mail")
    add_many(database, "g", 3, queue="gone")
    for number in range(3):
        retry_later(database, f"r {number}", error=f"Refused {number}")
    retry_later(database, "m 0", error="x" * 5000, attempts=7)
    finish(database, "g 0", error="Given up", ago=0.5)
    finish(database, "g 1", error="Given up long ago", ago=2)
    found = look(database).failing
    assert [(each.queue, each.count.number, each.attempts) for each in found] == [
        ("receipts", 3, 3),
        ("gone", 1, 1),
        ("mail", 1, 7),
    ]
    assert [each.error for each in found] == ["Refused 2", "Given up", "x" * 500]
    assert {each.broker for each in found} == {"shop"}


def test_a_look_waits_for_nobody(database: Database) -> None:
    add_many(database, "a", 3)
    with database.begin() as connection:
        database.store.claim(connection, broker="shop", limit=3, lease=HOUR)
        assert look(database, thresholds=Thresholds(pending=2)).counts["ready"].number == 3


def test_a_table_of_any_name_is_looked_at(database_url: str) -> None:
    engine = sa.create_engine(database_url)
    made = Database("default", engine, "Shop_Outbox")
    install(made)
    add(made, make_message("a"))
    found = look(made)
    assert (found.pending.number, found.counters.last_id) == (1, 1)
    engine.dispose()
