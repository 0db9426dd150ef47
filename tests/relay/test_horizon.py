"""From which time on a relay looks for messages: delivered ones cost nothing, late ones are found."""

import statistics
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from freezegun import freeze_time

from celery_outbox import Outbox
from celery_outbox.relay.horizon import SHARE, Horizon
from celery_outbox.signals import outbox_published
from tests.processes import HOST
from tests.relay.apps import make_relay, relaying, rows
from tests.relay.conftest import OpenOutbox
from tests.relay.test_databases import MakeProxy
from tests.relay.wire import task_ids
from tests.storage.rows import add, change, hours_from_now, make_message
from tests.waiting import wait_until

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def test_everything_is_looked_at_first_and_again_after_its_share_of_the_time() -> None:
    horizon = Horizon()
    with freeze_time(NOW) as clock:

        def look() -> bool:
            clock.tick(0.5)
            return False

        assert horizon.since is None
        horizon.take(horizon.since, look)
        horizon.claimed(NOW)
        assert horizon.since == NOW
        clock.tick(0.5 * SHARE - 0.1)
        horizon.take(horizon.since, look)  # no whole look: it changes nothing
        assert horizon.since is None


def test_a_claim_of_nothing_leaves_the_horizon_where_it_was() -> None:
    horizon = Horizon()
    with freeze_time(NOW) as clock:
        horizon.take(None, lambda: clock.tick(1))
        horizon.claimed(NOW)
        horizon.claimed(None)
        assert horizon.since == NOW


def test_a_whole_look_is_owed_when_only_a_part_was_found_empty() -> None:
    horizon = Horizon()
    with freeze_time(NOW) as clock:
        assert horizon.owed is None
        assert horizon.is_empty(None, lambda: bool(clock.tick(1))) is True
        assert horizon.owed is None
        horizon.claimed(NOW)
        assert horizon.is_empty(horizon.since, lambda: True) is True
        assert horizon.owed == timedelta(seconds=SHARE)
        clock.tick(3 * SHARE)
        assert horizon.owed == timedelta(0)
        assert horizon.is_empty(horizon.since, lambda: True) is True
        assert horizon.owed is None


class Behind:
    """Lets a message become ready behind those that a relay has just published."""

    def __init__(self, outbox: Outbox) -> None:
        self.database = outbox.databases["default"]
        bind = outbox.settings.databases["default"]
        assert isinstance(bind, sa.Engine)
        self.late = bind.connect()
        self.database.store.add(self.late, [make_message("late")])
        add(self.database, make_message("lapsed"))
        lease = {"lease_until": hours_from_now(1), "claim_token": "dead"}
        change(self.database, "lapsed", attempts=1, **lease)

    def happen(self, sender: object, **_: Any) -> None:
        if self.late.in_transaction():
            self.late.commit()
            change(self.database, "lapsed", lease_until=hours_from_now(-1))


@pytest.fixture(params=["postgresql", "mariadb"])
def outbox(request: pytest.FixtureRequest, open_outbox: OpenOutbox, redis_url: str) -> Outbox:
    return open_outbox(redis_url, request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def behind(outbox: Outbox) -> Iterator[Behind]:
    made = Behind(outbox)
    outbox_published.connect(made.happen)
    yield made
    outbox_published.disconnect(made.happen)
    made.late.close()


@pytest.mark.parametrize("mode", ["runs", "stops when empty"])
def test_what_becomes_ready_behind_a_delivery_is_found_before_the_relay_rests(
    mode: str, outbox: Outbox, behind: Behind, redis_url: str
) -> None:
    add(behind.database, *map(make_message, ["a", "b", "c"]))
    if mode == "runs":
        with relaying(outbox, sleep=timedelta(hours=1)):
            wait_until(lambda: not rows(outbox), message="the late ones")
    else:
        make_relay(outbox, stop_when_empty=True).run()
    assert task_ids(redis_url)[:3] == ["a", "b", "c"]
    assert sorted(task_ids(redis_url)[3:]) == ["lapsed", "late"]


def test_an_open_transaction_makes_no_claim_read_more(
    open_outbox: OpenOutbox, redis_url: str, postgresql_url: str
) -> None:
    outbox = open_outbox(redis_url, postgresql_url)
    database, bind = outbox.databases["default"], outbox.settings.databases["default"]
    counts: list[int] = []

    def count(connection: sa.Connection, cursor: Any, statement: str, *rest: Any) -> None:
        if statement.startswith("WITH picked"):
            look = connection.connection.cursor()
            look.execute(
                "SELECT sum(pg_stat_get_xact_blocks_fetched(to_regclass(name))) FROM unnest(ARRAY["
                "'celery_outbox', 'celery_outbox_pkey', 'ix_celery_outbox_claim']) name"
            )
            counts.extend(int(total) for (total,) in look.fetchall())

    def blocks() -> list[int]:
        """What each claim has read so far."""
        return [after - before for before, after in zip(counts[::2], counts[1::2], strict=True)]

    sa.event.listen(bind, "before_cursor_execute", count)
    sa.event.listen(bind, "after_cursor_execute", count)
    old = sa.create_engine(postgresql_url).connect()
    old.execution_options(isolation_level="REPEATABLE READ").execute(sa.text("SELECT 1"))
    relay = make_relay(outbox, batch=50, stop_when_empty=True)
    delivering = threading.Thread(target=relay.run)
    for number in range(60):
        add(database, *(make_message(f"{number}-{each}", body=b"x" * 500) for each in range(50)))
    delivering.start()
    delivering.join(timeout=60)
    assert 60 <= len(blocks()) <= 63  # the last ones find nothing
    begin, end = statistics.median(blocks()[:10]), statistics.median(blocks()[-10:])
    assert end <= 2 * begin
    # And that is not so because there would be nothing to read.
    for since in (hours_from_now(0), None):
        with database.begin() as connection:
            made = database.store.claim(
                connection, broker="shop", limit=50, lease=timedelta(seconds=9), since=since
            )
            assert made.messages == []
    bounded, whole = blocks()[-2:]
    assert whole > 500 > 20 > bounded
    old.close()
    old.engine.dispose()


def test_a_delivery_updates_a_row_once(
    open_outbox: OpenOutbox, redis_url: str, postgresql_url: str
) -> None:
    outbox = open_outbox(redis_url, postgresql_url)
    add(outbox.databases["default"], *(make_message(f"{number}") for number in range(300)))
    make_relay(outbox, stop_when_empty=True).run()
    engine = sa.create_engine(postgresql_url, isolation_level="AUTOCOMMIT")
    query = sa.text(
        "SELECT n_tup_ins, n_tup_upd, n_tup_hot_upd, n_tup_del FROM pg_stat_user_tables "
        "WHERE relname = 'celery_outbox'"
    )
    with engine.connect() as connection:
        # The sessions that wrote report at their end at the latest.
        outbox.databases["default"].read(lambda each: each.invalidate())
        counts = wait_until(
            lambda: [row for row in connection.execute(query) if row.n_tup_del == 300],
            message="the server's counts",
        )
    (row,) = counts
    assert (row.n_tup_ins, row.n_tup_upd, row.n_tup_del) == (300, 300, 300)
    assert row.n_tup_hot_upd > 200
    engine.dispose()


def test_a_database_that_is_down_is_not_asked_more_often_than_the_relay_sleeps(
    open_outbox: OpenOutbox, redis_url: str, postgresql_url: str, tcp_proxy: MakeProxy
) -> None:
    url = sa.make_url(postgresql_url)
    proxy = tcp_proxy(HOST, url.port or 0)
    behind = url.set(port=proxy.port).render_as_string(hide_password=False)
    outbox = open_outbox(redis_url, behind, notify=False)  # a listener asks, too
    bind, tries = outbox.settings.databases["default"], list[float]()

    @sa.event.listens_for(bind, "do_connect")
    def note(*_: Any) -> None:
        tries.append(time.monotonic())

    add(outbox.databases["default"], make_message())
    with relaying(outbox, sleep=timedelta(seconds=0.2)):
        wait_until(lambda: task_ids(redis_url), message="the first delivery")
        proxy.refuse()
        proxy.cut()
        before = len(tries)
        wait_until(lambda: len(tries) >= before + 6, message="more attempts")
        assert tries[-1] - tries[before] >= 0.2 * 4
