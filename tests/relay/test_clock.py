"""A producer whose clock is wrong: only the database's clock says when a message is due."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from freezegun import freeze_time
from sqlalchemy.orm import Session

from celery_outbox import Outbox
from tests.relay.apps import relay_all, relay_once, rows, send
from tests.relay.conftest import OpenOutbox
from tests.relay.wire import task_ids
from tests.waiting import wait_until

OFF = [timedelta(minutes=-10), timedelta(minutes=10)]


@pytest.fixture
def outbox(open_outbox: OpenOutbox, database_url: str, redis_url: str) -> Outbox:
    """An outbox on each database in turn."""
    return open_outbox(redis_url, database_url)


@pytest.fixture(params=OFF, ids=["slow", "fast"])
def wrong_clock(request: pytest.FixtureRequest) -> freeze_time:
    """A clock that runs, ten minutes off."""
    return freeze_time(datetime.now(UTC) + request.param, tick=True)


def store(outbox: Outbox, wrong_clock: freeze_time, **options: object) -> str:
    bind = outbox.settings.databases["default"]
    assert isinstance(bind, sa.Engine)
    with wrong_clock, Session(bind) as session, session.begin():
        session.execute(sa.text("SELECT 1"))
        return send(outbox, **options)


def seconds_from_now(outbox: Outbox, column: str) -> float:
    database = outbox.databases["default"]
    with database.begin() as connection:
        now = connection.execute(sa.select(database.dialect.now())).scalar_one()
    (row,) = rows(outbox)
    return float((getattr(row, column) - now).total_seconds())


def test_a_task_without_delay_leaves_at_once(
    outbox: Outbox, wrong_clock: freeze_time, redis_url: str
) -> None:
    stored = store(outbox, wrong_clock)
    relay_once(outbox)
    assert task_ids(redis_url) == [stored]


def test_a_countdown_counts_by_the_databases_clock(outbox: Outbox, wrong_clock: freeze_time) -> None:
    store(outbox, wrong_clock, countdown=60, expires=120)
    assert seconds_from_now(outbox, "deliver_at") == pytest.approx(60, abs=20)
    assert seconds_from_now(outbox, "expires_at") == pytest.approx(120, abs=20)


@pytest.fixture
def waiting_outbox(open_outbox: OpenOutbox, database_url: str, tmp_path: object) -> Iterator[Outbox]:
    """An outbox whose broker takes nothing before its time."""
    yield open_outbox(f"sqla+sqlite:///{tmp_path}/broker.db", database_url)


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
def test_a_countdown_of_a_second_is_over_in_a_second(
    waiting_outbox: Outbox, wrong_clock: freeze_time
) -> None:
    began = time.monotonic()
    store(waiting_outbox, wrong_clock, countdown=1)
    relay_once(waiting_outbox)
    assert len(rows(waiting_outbox)) == 1
    wait_until(lambda: relay_all(waiting_outbox), 10)
    assert time.monotonic() - began >= 0.99


def test_a_clock_that_jumps_between_dispatch_and_commit_changes_nothing(
    outbox: Outbox, redis_url: str
) -> None:
    bind = outbox.settings.databases["default"]
    assert isinstance(bind, sa.Engine)
    with Session(bind) as session, session.begin():
        session.execute(sa.text("SELECT 1"))
        stored = send(outbox)
        with freeze_time(datetime.now(UTC) + timedelta(hours=1), tick=True):
            session.commit()
    relay_once(outbox)
    assert task_ids(redis_url) == [stored]
