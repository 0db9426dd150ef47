"""Retry policies: whose holds for a message, what is written of it, and when it has been used up."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from celery_outbox import Outbox
from celery_outbox.errors import OptionError
from celery_outbox.policy import LONGEST_DELAY, MOST_ATTEMPTS
from tests.relay.apps import make_due, relay_once, rows, send
from tests.relay.conftest import OpenOutbox
from tests.relay.wire import task_ids
from tests.storage.rows import change, hours_from_now

HOUR = 3600
#: A wait that the policy of the relay's own settings would never lead to.
LONG = {"base_delay": 3 * HOUR, "max_delay": 3 * HOUR}


def corrupt(outbox: Outbox, task_id: str | None = None) -> None:
    """Let the delivery of messages fail."""
    change(outbox.databases["default"], task_id, message="corrupt")


def waits(outbox: Outbox) -> list[timedelta]:
    """How far ahead of the database's clock the next attempts are."""
    database = outbox.databases["default"]
    with database.begin() as connection:
        now = connection.execute(sa.select(database.dialect.now())).scalar_one()
    return [row.scheduled_at - now for row in rows(outbox)]


def states(outbox: Outbox) -> Mapping[str, int]:
    """How many messages there are in each state, of those that have any."""
    database = outbox.databases["default"]
    return {state: count for state, count in database.read(database.store.count).items() if count}


def test_the_policy_of_the_settings_holds_for_messages_without_one(
    open_outbox: OpenOutbox, redis_url: str, database_url: str
) -> None:
    outbox = open_outbox(redis_url, database_url, retry=LONG)
    send(outbox)
    corrupt(outbox)
    relay_once(outbox)
    (wait,) = waits(outbox)
    assert timedelta(hours=1.4) < wait <= timedelta(hours=3)


@pytest.mark.parametrize("way", ["call", "task"])
def test_the_policy_of_a_dispatch_beats_the_settings_of_the_relay(
    way: str, open_outbox: OpenOutbox, redis_url: str, database_url: str
) -> None:
    outbox = open_outbox(redis_url, database_url)
    task = outbox.app.tasks["shop.add"]
    if way == "task":
        task.outbox_retry = LONG
        task.apply_async((1, 2), via_outbox=True)
    else:
        task.apply_async((1, 2), via_outbox=True, outbox_retry=LONG)
    corrupt(outbox)
    relay_once(outbox)
    (wait,) = waits(outbox)
    assert timedelta(hours=1.4) < wait <= timedelta(hours=3)


def test_a_message_that_used_up_its_attempts_is_kept_as_failed_with_its_error(
    open_outbox: OpenOutbox, redis_url: str, database_url: str
) -> None:
    outbox = open_outbox(redis_url, database_url)
    send(outbox, outbox_retry={"max_attempts": 3})
    send(outbox, outbox_retry={"max_attempts": None})
    corrupt(outbox)
    for _ in range(3):
        make_due(outbox)
        relay_once(outbox)
    failed, endless = rows(outbox)
    assert failed.attempts == endless.attempts == 3
    assert "Error" in failed.error
    assert failed.finished_at is not None
    assert endless.finished_at is None
    assert states(outbox) == {"failed": 1, "retrying": 1}


def test_attempts_that_died_with_their_relay_count_and_are_followed_by_one_more(
    open_outbox: OpenOutbox, redis_url: str, sqlite_url: str
) -> None:
    outbox = open_outbox(redis_url, sqlite_url)
    sent = [send(outbox, outbox_retry={"max_attempts": 2}) for _ in range(2)]
    corrupt(outbox, sent[1])
    change(outbox.databases["default"], attempts=7, lease_until=hours_from_now(-1), claim_token="dead")
    relay_once(outbox)
    assert task_ids(redis_url) == sent[:1]
    assert states(outbox) == {"failed": 1}


@pytest.mark.parametrize("attempts", [2**31, 2**62 - 1, 2**63 - 1])
def test_no_count_of_attempts_is_too_high_for_a_claim_nor_for_what_follows(
    attempts: int, open_outbox: OpenOutbox, redis_url: str, database_url: str
) -> None:
    outbox = open_outbox(redis_url, database_url)
    policies: list[Any] = [None, {"max_attempts": MOST_ATTEMPTS}, {"max_attempts": 9}]
    bad = [send(outbox, outbox_retry=policy) for policy in policies]
    corrupt(outbox)
    good = send(outbox)
    change(outbox.databases["default"], attempts=attempts)
    relay_once(outbox)
    assert task_ids(redis_url) == [good]
    assert [row.task_id for row in rows(outbox) if row.attempts in {attempts, attempts + 1}] == bad
    at_the_top = attempts == MOST_ATTEMPTS
    assert states(outbox) == {"failed": 1 + at_the_top, "retrying": 2 - at_the_top}
    assert min(waits(outbox)) > timedelta(minutes=4)


def test_the_policy_is_stored_to_the_microsecond_and_at_its_limits(
    open_outbox: OpenOutbox, redis_url: str, database_url: str
) -> None:
    outbox = open_outbox(redis_url, database_url)
    micro = timedelta(microseconds=1)
    send(outbox, outbox_retry={"base_delay": micro, "max_delay": timedelta(seconds=1) + micro})
    send(outbox, outbox_retry={"max_attempts": MOST_ATTEMPTS, "max_delay": LONGEST_DELAY})
    send(outbox)
    assert [(row.max_attempts, row.base_delay, row.max_delay) for row in rows(outbox)] == [
        (None, 1, 1_000_001),
        (MOST_ATTEMPTS, 1_000_000, LONGEST_DELAY // micro),
        (None, None, None),
    ]


def test_the_longest_of_all_delays_can_be_waited_for(
    open_outbox: OpenOutbox, redis_url: str, database_url: str
) -> None:
    outbox = open_outbox(redis_url, database_url)
    send(outbox, outbox_retry={"base_delay": LONGEST_DELAY, "max_delay": LONGEST_DELAY})
    corrupt(outbox)
    relay_once(outbox)
    (wait,) = waits(outbox)
    assert LONGEST_DELAY * 0.49 < wait <= LONGEST_DELAY


WRITTEN_BY_HAND: list[dict[str, Any]] = [
    {"base_delay": 0, "max_delay": 0},
    {"base_delay": -5, "max_delay": 10},
    {"base_delay": 10, "max_delay": None},
    {"base_delay": None, "max_delay": 10},
    {"base_delay": 10, "max_delay": 5},
    {"base_delay": 2**63 - 1, "max_delay": 2**63 - 1},
    {"base_delay": 10, "max_delay": 10, "max_attempts": -1},
]


def test_a_policy_that_is_none_gives_way_to_that_of_the_settings(
    open_outbox: OpenOutbox, redis_url: str, database_url: str
) -> None:
    outbox = open_outbox(redis_url, database_url, retry=LONG)
    for columns in WRITTEN_BY_HAND:
        change(outbox.databases["default"], send(outbox), **columns)
    corrupt(outbox)
    good = send(outbox)
    relay_once(outbox)
    assert task_ids(redis_url) == [good]
    assert states(outbox) == {"retrying": len(WRITTEN_BY_HAND)}
    assert min(waits(outbox)) > timedelta(hours=1.4)


def test_what_a_call_leaves_out_of_its_policy_is_the_apps(
    open_outbox: OpenOutbox, redis_url: str, sqlite_url: str
) -> None:
    of_app = {"max_attempts": 9, "base_delay": 2, "max_delay": "1h"}
    outbox = open_outbox(redis_url, sqlite_url, retry=of_app)
    send(outbox, outbox_retry={"max_attempts": 3})
    send(outbox, outbox_retry={"max_attempts": None, "base_delay": 5})
    second = 1_000_000
    assert [(row.max_attempts, row.base_delay, row.max_delay) for row in rows(outbox)] == [
        (3, 2 * second, 3600 * second),
        (None, 5 * second, 3600 * second),
    ]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (3, r"outbox_retry: expected a mapping .*, got 3\. Write for example"),
        ({"max_attempts": "3"}, r"outbox_retry\['max_attempts'\]: expected None or a whole number"),
        ({"max_attempts": 2**63}, r"at most 9223372036854775807, got 9223372036854775808"),
        ({"max_delay": "4000d"}, r"outbox_retry: expected 0 < base_delay <= max_delay <= 3650 days"),
        ({"base_delay": 700}, r"left out is the app's, by default 1 second, or 600 for max_delay"),
    ],
    ids=str,
)
def test_a_wrong_policy_is_refused_at_the_call_and_nothing_is_stored(
    policy: Any, expected: str, open_outbox: OpenOutbox, redis_url: str, sqlite_url: str
) -> None:
    outbox = open_outbox(redis_url, sqlite_url)
    with pytest.raises(OptionError, match=expected):
        send(outbox, outbox_retry=policy)
    assert rows(outbox) == []


@pytest.mark.parametrize("column", ["message", "body"])
@pytest.mark.parametrize("garbage", ["'edited by hand'", "''", "17", "X'FF00'"])
def test_garbage_written_by_sql_blocks_no_neighbour(
    column: str, garbage: str, open_outbox: OpenOutbox, redis_url: str, sqlite_url: str
) -> None:
    outbox = open_outbox(redis_url, sqlite_url)
    bad, *good = [send(outbox) for _ in range(4)]
    with outbox.databases["default"].begin() as connection:
        connection.execute(
            sa.text(f"UPDATE celery_outbox SET {column} = {garbage} WHERE task_id = :id"), {"id": bad}
        )
    relay_once(outbox)
    assert set(task_ids(redis_url)) >= set(good)
    assert {row.task_id for row in rows(outbox)} <= {bad}
