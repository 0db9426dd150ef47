"""Settling: what becomes of a claimed row, and that only its owner can say so."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from celery_outbox.policy import RetryPolicy
from celery_outbox.storage.database import Database
from celery_outbox.storage.schema import FAR_FUTURE
from celery_outbox.storage.store import Failure
from tests.storage.rows import (
    HOUR,
    add,
    change,
    claim,
    claim_one,
    fail,
    hours_from_now,
    ids,
    make_message,
    rows,
)

Settle = Callable[[Database, sa.Connection, str, int], int]

SETTLES: Mapping[str, Settle] = {
    "accept": lambda db, connection, token, row: db.store.accept(connection, token, [row], keep=False),
    "keep": lambda db, connection, token, row: db.store.accept(connection, token, [row], keep=True),
    "defer": lambda db, connection, token, row: db.store.defer(connection, token, [row]),
    "release": lambda db, connection, token, row: db.store.release(connection, token, [row]),
    "fail": lambda db, connection, token, row: db.store.fail(
        connection, token, {row: Failure(error="late", delay=HOUR)}
    ),
    "give_up": lambda db, connection, token, row: db.store.fail(
        connection, token, {row: Failure(error="late", delay=None)}
    ),
}


def settle(database: Database, how: str, token: str, row_id: int) -> int:
    return database.run(lambda connection: SETTLES[how](database, connection, token, row_id))


@pytest.mark.parametrize("how", SETTLES)
def test_a_settle_counts_the_rows_that_were_still_its_own(database: Database, how: str) -> None:
    add(database, make_message())
    token, message = claim_one(database)
    assert settle(database, how, token, message.id) == 1


@pytest.mark.parametrize("next_owner", ["goes on", *SETTLES])
def test_a_late_settle_touches_nothing_of_what_the_next_owner_did(
    database: Database, next_owner: str
) -> None:
    add(database, make_message())
    late, message = claim_one(database)
    change(database, lease_until=hours_from_now(-1))
    token, _ = claim_one(database)
    if next_owner in SETTLES:
        settle(database, next_owner, token, message.id)
    before = rows(database)
    assert [settle(database, how, late, message.id) for how in SETTLES] == [0] * len(SETTLES)
    assert rows(database) == before


@pytest.mark.parametrize("how", SETTLES)
def test_a_second_settle_of_the_same_batch_touches_nothing(database: Database, how: str) -> None:
    add(database, make_message())
    token, message = claim_one(database)
    settle(database, "release", token, message.id)
    before = rows(database)
    assert settle(database, how, token, message.id) == 0
    assert rows(database) == before


def test_accepted_messages_are_deleted_and_no_others(database: Database) -> None:
    add(database, *(make_message(name) for name in ("a", "b", "c")))
    made = claim(database)
    row_ids = {message.task_id: message.id for message in made.messages}
    with database.begin() as connection:
        accepted = [row_ids["a"], row_ids["c"]]
        assert database.store.accept(connection, made.token, accepted, keep=False) == 2
    assert [row.task_id for row in rows(database)] == ["b"]


def test_kept_messages_stay_as_delivered_out_of_the_claims_way(database: Database) -> None:
    add(database, make_message())
    token, message = claim_one(database)
    change(database, error="the first attempt failed")
    settle(database, "keep", token, message.id)
    (row,) = rows(database)
    assert (row.scheduled_at, row.error, row.claim_token) == (FAR_FUTURE, None, None)
    assert abs(row.finished_at - datetime.now(UTC)) < timedelta(minutes=1)
    assert ids(claim(database)) == []


def test_a_release_gives_the_attempt_back_and_leaves_the_message_ready(database: Database) -> None:
    add(database, make_message())
    before = rows(database)
    token, message = claim_one(database)
    settle(database, "release", token, message.id)
    assert rows(database) == before
    assert claim_one(database)[1].attempts == 1


def test_a_deferral_gives_the_attempt_back_and_waits_for_the_intended_time(
    database: Database,
) -> None:
    add(database, make_message(countdown=7200.0, lead=10800.0))
    token, message = claim_one(database)
    settle(database, "defer", token, message.id)
    (row,) = rows(database)
    assert (row.attempts, row.claim_token, row.lease_until) == (0, None, None)
    assert row.scheduled_at == row.deliver_at
    assert ids(claim(database)) == []


def test_attempts_are_counted_by_claims(database: Database) -> None:
    add(database, make_message())
    counted = []
    for _ in range(3):
        token, message = claim_one(database)
        counted.append(message.attempts)
        fail(database, token, message.id, "no", timedelta(0))
    assert counted == [1, 2, 3]


def test_a_failed_message_waits_for_its_next_attempt_with_its_error(database: Database) -> None:
    add(database, make_message())
    token, message = claim_one(database)
    fail(database, token, message.id, "Refused: full", timedelta(seconds=900.5))
    (row,) = rows(database)
    assert (row.error, row.attempts, row.claim_token, row.finished_at) == (
        "Refused: full",
        1,
        None,
        None,
    )
    wait = (row.scheduled_at - datetime.now(UTC)).total_seconds()
    assert wait == pytest.approx(900, abs=20)
    assert ids(claim(database)) == []


def test_a_message_given_up_is_kept_as_failed_with_its_error(database: Database) -> None:
    add(database, make_message())
    token, message = claim_one(database)
    fail(database, token, message.id, "Refused", delay=None)
    (row,) = rows(database)
    assert (row.error, row.scheduled_at, row.attempts) == ("Refused", FAR_FUTURE, 1)
    assert row.finished_at is not None
    assert ids(claim(database)) == []


def test_failures_of_both_kinds_in_one_batch_are_counted_together(database: Database) -> None:
    add(database, *(make_message(f"{number}") for number in range(6)))
    made = claim(database)
    failures = {
        message.id: Failure(error=f"error {index}", delay=HOUR if index % 2 else None)
        for index, message in enumerate(made.messages)
    }
    with database.begin() as connection:
        assert database.store.fail(connection, made.token, failures) == 6
    assert [row.error for row in rows(database)] == [f"error {index}" for index in range(6)]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("a NUL \0 inside", "a NUL"),
        ("a lone surrogate \ud800 inside", "a lone surrogate"),
        ("every plane: é ह 漢 \U0001f600", "every plane: é ह 漢 \U0001f600"),
        ("x" * 1_000_000, "x" * 1000),
        ("%s %(name)s :name ? $1", "%s %(name)s :name ? $1"),
    ],
    ids=["nul", "surrogate", "unicode", "megabyte", "placeholders"],
)
@pytest.mark.parametrize("delay", [HOUR, None], ids=["again", "last"])
def test_every_error_text_can_be_recorded(
    database: Database, text: str, kept: str, delay: timedelta | None
) -> None:
    add(database, make_message())
    token, message = claim_one(database)
    assert fail(database, token, message.id, text, delay) == 1
    (row,) = rows(database)
    assert row.error.startswith(kept)
    assert len(row.error) <= 10_000


def test_a_message_brings_its_own_retry_policy(database: Database) -> None:
    policy = RetryPolicy(
        max_attempts=7, base_delay=timedelta(milliseconds=250), max_delay=timedelta(days=3)
    )
    add(database, make_message("own", retry=policy), make_message("none"))
    endless = RetryPolicy(max_attempts=None, base_delay=HOUR, max_delay=HOUR)
    add(database, make_message("endless", retry=endless))
    assert [message.retry for message in claim(database).messages] == [policy, None, endless]
