"""Times: the database's clock alone counts, to fractions of a second, in every time zone."""

import time
from datetime import UTC, datetime, timedelta, timezone

import pytest
import sqlalchemy as sa

from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
from tests.storage.rows import (
    BROKER,
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
from tests.waiting import wait_until

#: Of reading two clocks one after the other on a busy machine.
SLACK = timedelta(seconds=20)
INDIA = timezone(timedelta(hours=5, minutes=30))


def is_now(instant: datetime) -> bool:
    return abs(instant - datetime.now(UTC)) < SLACK


def test_a_message_without_delay_is_ready_at_once_and_has_no_intended_time(
    database: Database,
) -> None:
    add(database, make_message())
    (row,) = rows(database)
    assert is_now(row.scheduled_at)
    assert is_now(row.created_at)
    assert (row.deliver_at, row.expires_at) == (None, None)


def test_every_message_can_be_claimed_the_moment_it_is_committed(database: Database) -> None:
    for number in range(30):
        add(database, make_message(f"{number}"))
        assert ids(claim(database)) == [f"{number}"]


def test_an_explicit_delay_of_zero_is_kept_apart_from_none(database: Database) -> None:
    add(database, make_message(countdown=0.0))
    (row,) = rows(database)
    assert row.deliver_at is not None
    assert is_now(row.deliver_at)
    assert ids(claim(database)) == ["id-1"]


def test_a_delay_keeps_its_fractions(database: Database) -> None:
    add(database, make_message(countdown=0.3))
    (row,) = rows(database)
    waits = (row.deliver_at - row.created_at).total_seconds()
    assert waits == pytest.approx(0.3, abs=0.1)
    assert abs(row.scheduled_at - row.deliver_at) < timedelta(milliseconds=100)


def test_a_delay_of_less_than_a_second_is_waited_for(database: Database) -> None:
    began = time.monotonic()
    add(database, make_message(countdown=0.3))
    assert ids(claim(database)) == []
    wait_until(lambda: ids(claim(database)) == ["id-1"], timeout=5)
    assert time.monotonic() - began >= 0.29


def test_what_a_message_waited_in_memory_counts_towards_its_delay(database: Database) -> None:
    made_at = time.monotonic() - 100
    add(database, make_message(made_at=made_at, countdown=400.0, expires_in=700.0))
    (row,) = rows(database)
    assert (row.deliver_at - row.created_at).total_seconds() == pytest.approx(300, abs=20)
    assert (row.expires_at - row.created_at).total_seconds() == pytest.approx(600, abs=20)


def test_an_absolute_time_is_kept_to_the_microsecond(database: Database) -> None:
    eta = datetime(2051, 3, 28, 2, 30, 59, 123456, tzinfo=INDIA)
    add(database, make_message(eta=eta, lead=600.0))
    (row,) = rows(database)
    assert row.deliver_at == eta
    early = row.deliver_at - row.scheduled_at
    assert abs(early - timedelta(seconds=600)) < timedelta(milliseconds=2)


def test_a_time_long_past_does_not_push_a_message_in_front(database: Database) -> None:
    add(database, make_message("first"))
    add(database, make_message("overdue", eta=datetime(2001, 1, 1, tzinfo=UTC)))
    assert ids(claim(database)) == ["first", "overdue"]


@pytest.mark.parametrize("days", [400, 36_500])
def test_a_long_delay_is_kept(database: Database, days: int) -> None:
    add(database, make_message(countdown=days * 86400.0))
    (row,) = rows(database)
    assert abs(row.deliver_at - row.created_at - timedelta(days=days)) < SLACK
    assert ids(claim(database)) == []


def test_a_claim_tells_how_long_is_left(database: Database) -> None:
    add(
        database,
        make_message("late", countdown=-90.5, expires_in=-30.25),
        make_message("early", countdown=600.0, lead=3600.0, expires_in=1200.5),
    )
    late, early = claim(database).messages
    assert late.due_in == pytest.approx(-90.5, abs=5)
    assert late.expires_in == pytest.approx(-30.25, abs=5)
    assert early.due_in == pytest.approx(600, abs=20)
    assert early.expires_in == pytest.approx(1200.5, abs=20)


ZONES = {
    "postgresql": {"options": "-c timezone=Asia/Kolkata"},
    "mariadb": {"init_command": "SET time_zone = '+05:30'"},
}


@pytest.mark.parametrize("server", ZONES)
def test_times_are_right_in_a_session_with_another_time_zone(
    server: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(f"{server}_url")
    engine = sa.create_engine(url, connect_args=ZONES[server])
    database = Database("default", engine, "celery_outbox")
    install(database)
    eta = datetime.now(INDIA) + HOUR
    add(
        database,
        make_message("now"),
        make_message("countdown", countdown=3600.0, expires_in=7200.0),
        make_message("eta", eta=eta),
    )
    now, countdown, absolute = rows(database)
    assert is_now(now.created_at)
    assert is_now(now.scheduled_at)
    assert is_now(countdown.deliver_at - HOUR)
    assert is_now(countdown.scheduled_at - HOUR)
    assert is_now(countdown.expires_at - 2 * HOUR)
    assert absolute.deliver_at == eta
    assert is_now(absolute.scheduled_at - HOUR)
    made = claim(database, lease=HOUR)
    assert ids(made) == ["now"]
    assert is_now(rows(database)[0].lease_until - HOUR)
    fail(database, made.token, made.messages[0].id, "no", HOUR)
    assert is_now(rows(database)[0].scheduled_at - HOUR)
    engine.dispose()


@pytest.mark.parametrize("server", ZONES)
def test_producer_and_relay_may_use_different_time_zones(
    server: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(f"{server}_url")
    producers = sa.create_engine(url, connect_args=ZONES[server])
    relays = sa.create_engine(url)
    producer = Database("default", producers, "celery_outbox")
    relay = Database("default", relays, "celery_outbox")
    install(producer)
    add(producer, make_message("now"), make_message("later", countdown=60.0))
    assert ids(claim(relay)) == ["now"]
    assert ids(claim(producer)) == []
    producers.dispose()
    relays.dispose()


@pytest.mark.parametrize(
    ("created", "deliver", "waited"),
    [(-2, None, 2), (-3, -1, 1), (-1, -3, 1), (-1, 0.5, -0.5)],
    ids=["no delay", "a delay that is over", "a time that had passed at the dispatch", "taken early"],
)
def test_a_claim_tells_how_long_a_message_has_waited_beyond_its_delay(
    database: Database, created: float, deliver: float | None, waited: float
) -> None:
    add(database, make_message())
    intended = None if deliver is None else hours_from_now(deliver)
    change(database, created_at=hours_from_now(created), deliver_at=intended)
    _, message = claim_one(database)
    assert message.waited == pytest.approx(waited * 3600, abs=SLACK.total_seconds())


@pytest.mark.parametrize(
    ("scheduled", "leased", "ready_for"),
    [(-2, None, 2), (-2, -1, 1), (-1, -2, 1), (-2, 1, None), (1, None, None)],
    ids=["never taken", "lease lapsed", "tried again since its lease", "reserved", "delayed"],
)
def test_a_message_is_ready_since_it_is_due_and_in_nobodys_hands(
    database: Database, scheduled: float, leased: float | None, ready_for: float | None
) -> None:
    add(database, make_message())
    lease = None if leased is None else hours_from_now(leased)
    change(database, scheduled_at=hours_from_now(scheduled), lease_until=lease)
    found = database.read(lambda connection: database.store.ready_for(connection, BROKER))
    if ready_for is None:
        assert found is None
    else:
        assert found == pytest.approx(ready_for * 3600, abs=SLACK.total_seconds())
    assert database.read(lambda connection: database.store.ready_for(connection, "other")) is None
