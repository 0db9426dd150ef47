"""Claiming: which rows, in which order, for how long, and by how many relays at once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import sqlalchemy as sa

from celery_outbox.storage.database import Database
from tests.storage.rows import (
    BROKER,
    LEASE,
    add,
    change,
    claim,
    claim_one,
    hours_from_now,
    ids,
    make_message,
    rows,
)
from tests.waiting import wait_until


def test_a_claim_returns_the_message_that_was_stored(database: Database) -> None:
    stored = make_message(body=b"\x00\xff body", queue="reports")
    add(database, stored)
    _, message = claim_one(database)
    assert (message.task_id, message.task_name, message.broker, message.queue) == (
        "id-1",
        "shop.add",
        BROKER,
        "reports",
    )
    assert (message.envelope, message.body) == (stored.envelope, b"\x00\xff body")
    assert (message.due_in, message.expires_in, message.retry) == (None, None, None)
    assert message.attempts == 1


def test_messages_are_claimed_in_the_order_of_their_due_time_then_of_their_ids(
    database: Database,
) -> None:
    add(database, *(make_message(name) for name in ("c", "a", "b", "d")))
    change(database, scheduled_at=hours_from_now(-1))
    change(database, "b", scheduled_at=hours_from_now(-3))
    change(database, "d", scheduled_at=hours_from_now(-2))
    assert ids(claim(database)) == ["b", "d", "c", "a"]


def test_a_small_claim_takes_those_that_have_been_due_longest(database: Database) -> None:
    add(database, *(make_message(f"{number}") for number in range(5)))
    for number in range(5):
        change(database, f"{number}", scheduled_at=hours_from_now(-1 - number))
    assert ids(claim(database, 2)) == ["4", "3"]
    assert ids(claim(database, 2)) == ["2", "1"]
    assert ids(claim(database, 2)) == ["0"]


def test_a_claim_takes_no_more_than_its_limit(database: Database) -> None:
    add(database, *(make_message(f"{number}") for number in range(30)))
    assert len(claim(database, 7).messages) == 7


def test_only_messages_of_the_broker_asked_for_are_claimed(database: Database) -> None:
    add(database, make_message("mine"), make_message("theirs", broker="billing"))
    assert ids(claim(database)) == ["mine"]
    assert ids(claim(database, broker="billing")) == ["theirs"]


def test_a_delayed_message_is_not_claimed_before_its_time(database: Database) -> None:
    add(database, make_message("later", countdown=3600.0), make_message("now"))
    assert ids(claim(database)) == ["now"]


def test_a_delayed_message_may_leave_as_early_as_its_lead_allows(database: Database) -> None:
    add(
        database,
        make_message("near", countdown=600.0, lead=900.0),
        make_message("far", countdown=3600.0, lead=900.0),
    )
    made = claim(database)
    assert ids(made) == ["near"]
    assert made.messages[0].due_in == pytest.approx(600, abs=20)


def test_a_reserved_message_is_not_claimed_again(database: Database) -> None:
    add(database, make_message())
    claim(database)
    assert ids(claim(database)) == []


def test_a_message_with_a_lapsed_lease_is_claimed_again_under_a_new_token(
    database: Database,
) -> None:
    add(database, make_message())
    first, _ = claim_one(database)
    change(database, lease_until=hours_from_now(-1))
    second, message = claim_one(database)
    assert second != first
    assert message.attempts == 2


def test_the_lease_is_counted_by_the_clock_of_the_database(database: Database) -> None:
    add(database, make_message())
    claim(database, lease=timedelta(seconds=0.4))
    wait_until(lambda: ids(claim(database)) == ["id-1"], timeout=5)
    (row,) = rows(database)
    assert row.lease_until - row.created_at > LEASE


@pytest.mark.parametrize("attempts", [2**62, 2**63 - 1])
def test_a_huge_count_of_attempts_blocks_no_claim(database: Database, attempts: int) -> None:
    add(database, make_message("tired"), make_message("fresh"))
    change(database, "tired", attempts=attempts)
    assert ids(claim(database)) == ["tired", "fresh"]
    assert [row.attempts for row in rows(database)] == [attempts, 1]


def test_finished_messages_are_never_claimed(database: Database) -> None:
    add(database, make_message("kept"))
    made = claim(database)
    with database.begin() as connection:
        row_ids = [message.id for message in made.messages]
        database.store.accept(connection, made.token, row_ids, keep=True)
    assert ids(claim(database)) == []


def test_a_claim_that_is_rolled_back_reserves_nothing(database: Database) -> None:
    add(database, make_message())
    with pytest.raises(KeyboardInterrupt), database.begin() as connection:
        database.store.claim(connection, broker=BROKER, limit=10, lease=LEASE)
        raise KeyboardInterrupt
    _, message = claim_one(database)
    assert message.attempts == 1


def test_claimers_at_once_never_get_the_same_row(database: Database) -> None:
    add(database, *(make_message(f"{number}") for number in range(60)))
    together = threading.Barrier(4)

    def take() -> list[str]:
        together.wait(timeout=10)
        return [task_id for _ in range(3) for task_id in ids(claim(database, 5))]

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(take) for _ in range(4)]
        taken = [task_id for future in futures for task_id in future.result()]
    assert sorted(taken) == sorted(f"{number}" for number in range(60))


@pytest.mark.parametrize("server", ["postgresql", "mariadb"])
def test_a_second_claimer_gets_other_rows_while_the_first_transaction_is_open(
    server: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(f"{server}_url")
    engine = sa.create_engine(url)
    database = Database("default", engine, "celery_outbox")
    database.tables.metadata.create_all(engine)
    add(database, *(make_message(f"{number:03}") for number in range(250)))
    with database.begin() as connection:
        first = database.store.claim(connection, broker=BROKER, limit=100, lease=LEASE)
        second = claim(database, 100)
        third = claim(database, 100)
    assert [len(each.messages) for each in (first, second, third)] == [100, 100, 50]
    assert ids(second) == [f"{number:03}" for number in range(100, 200)]
    engine.dispose()


@pytest.mark.parametrize("server", ["postgresql", "mariadb"])
def test_a_message_that_commits_after_later_ones_is_not_passed_over(
    server: str, request: pytest.FixtureRequest
) -> None:
    engine = sa.create_engine(request.getfixturevalue(f"{server}_url"))
    database = Database("default", engine, "celery_outbox")
    database.tables.metadata.create_all(engine)
    with engine.connect() as slow, engine.connect() as undone:
        database.store.add(slow, [make_message("slow")])
        database.store.add(undone, [make_message("undone")])
        add(database, make_message("quick"))
        assert ids(claim(database)) == ["quick"]
        undone.rollback()
        slow.commit()
    assert ids(claim(database)) == ["slow"]
    engine.dispose()


def test_an_open_claim_does_not_hold_up_the_applications_inserts(mariadb_url: str) -> None:
    engine = sa.create_engine(mariadb_url)
    database = Database("default", engine, "celery_outbox")
    database.tables.metadata.create_all(engine)
    add(database, *(make_message(f"{number}") for number in range(20)))
    with database.begin() as claiming, engine.connect() as application:
        database.store.claim(claiming, broker=BROKER, limit=10, lease=LEASE)
        application.execute(sa.text("SET innodb_lock_wait_timeout = 1"))
        database.store.add(application, [make_message("new")])
        application.commit()
    assert len(rows(database)) == 21
    engine.dispose()
