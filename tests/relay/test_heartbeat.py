"""The row by which each running relay is seen: there while it runs, fresh, and gone afterwards."""

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from celery_outbox.errors import SchemaError
from celery_outbox.relay.heartbeat import Heartbeat
from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
from celery_outbox.storage.state import RelayRow
from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.relay.apps import make_outbox, relay_once, relaying, send
from tests.relay.commands import environment, outbox_command, running
from tests.relay.wire import task_ids
from tests.storage.rows import make_message
from tests.waiting import wait_until

QUICK = timedelta(seconds=0.05)
ZONES = {
    "postgresql": {"options": "-c timezone=Asia/Kolkata"},
    "mariadb": {"init_command": "SET time_zone = '+05:30'"},
}


@pytest.fixture
def database(request: pytest.FixtureRequest, database_url: str) -> Database:
    """An installed database, empty."""
    engine = sa.create_engine(database_url)
    request.addfinalizer(engine.dispose)
    database = Database("default", engine, "celery_outbox")
    install(database)
    return database


def relays(database: Database) -> list[RelayRow]:
    return list(database.read(database.state.relays))


def set_version(database: Database, version: int) -> None:
    with database.begin() as connection:
        database.state.set_version(connection, version)


def age(database: Database, seconds: float) -> None:
    """Let every relay have been seen that much earlier."""
    t = database.tables.state
    seen = database.dialect.shifted(t.c.seen_at, sa.literal(-seconds))
    with database.begin() as connection:
        connection.execute(sa.update(t).where(t.c.name.startswith("relay:")).values(seen_at=seen))


def test_a_running_relay_says_where_it_runs(database: Database) -> None:
    began = int(time.time())
    with Heartbeat([database]) as heartbeat:
        heartbeat.begin(database)
        (relay,) = relays(database)
    assert relay.is_running
    assert relay.about["pid"] == os.getpid()
    assert relay.about["host"]
    assert began <= relay.about["since"] <= time.time()


def test_a_relay_that_has_ended_leaves_no_row(database: Database) -> None:
    with Heartbeat([database]) as heartbeat:
        heartbeat.begin(database)
        assert len(relays(database)) == 1
    assert relays(database) == []


def test_the_row_is_refreshed_while_a_batch_takes_its_time(database: Database) -> None:
    with Heartbeat([database], every=QUICK) as heartbeat:
        heartbeat.begin(database)
        age(database, 300)
        wait_until(lambda: [relay.is_running for relay in relays(database)] == [True])


def test_a_row_that_somebody_deleted_comes_back(database: Database) -> None:
    with Heartbeat([database], every=QUICK) as heartbeat:
        heartbeat.begin(database)
        with database.begin() as connection:
            connection.execute(
                sa.delete(database.tables.state).where(database.tables.state.c.name != "schema")
            )
        wait_until(lambda: len(relays(database)) == 1)


def test_each_relay_has_a_row_of_its_own(database: Database) -> None:
    with Heartbeat([database]) as one, Heartbeat([database]) as other:
        one.begin(database)
        other.begin(database)
        one.begin(database)
        assert len({relay.name for relay in relays(database)}) == 2


def test_a_killed_relay_counts_for_a_minute_and_is_forgotten_after_an_hour(
    database: Database,
) -> None:
    with database.begin() as connection:
        database.state.see_relay(connection, "killed", {"host": "web-1", "pid": 7})
    age(database, 50)
    assert [relay.is_running for relay in relays(database)] == [True]
    age(database, 15)
    assert [relay.is_running for relay in relays(database)] == [False]
    with Heartbeat([database]) as heartbeat:
        heartbeat.begin(database)
    assert [relay.name for relay in relays(database)] == ["killed"]
    age(database, 3600)
    with Heartbeat([database]) as heartbeat:
        heartbeat.begin(database)
    assert relays(database) == []


@pytest.mark.parametrize("server", ZONES)
def test_a_relay_is_seen_now_whatever_the_time_zones(
    server: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(f"{server}_url")
    india = sa.create_engine(url, connect_args=ZONES[server])
    here = sa.create_engine(url)
    one, other = (Database("default", engine, "celery_outbox") for engine in (india, here))
    install(one)
    with Heartbeat([one]) as heartbeat:
        heartbeat.begin(one)
        for each in (one, other):
            (relay,) = relays(each)
            assert timedelta(0) <= relay.seen_ago < timedelta(seconds=20)
    india.dispose()
    here.dispose()


def test_a_migration_under_the_feet_of_a_relay_stops_its_work(database: Database) -> None:
    with Heartbeat([database], every=QUICK) as heartbeat:
        heartbeat.begin(database)
        set_version(database, 2)

        def is_refused() -> bool:
            try:
                heartbeat.begin(database)
            except SchemaError as error:
                return "found 2" in str(error)
            return False

        wait_until(is_refused)
        set_version(database, 1)
        heartbeat.begin(database)


def test_a_database_in_memory_has_no_row_of_its_relay(redis_url: str) -> None:
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
    outbox = make_outbox(redis_url, engine)
    stored = send(outbox)
    relay_once(outbox)
    assert task_ids(redis_url) == [stored]
    assert relays(outbox.databases["default"]) == []
    outbox.app.close()
    engine.dispose()


def test_a_database_that_hangs_does_not_keep_a_relay_from_ending(
    postgresql_url: str, tcp_proxy: Callable[[str, int], TcpProxy]
) -> None:
    url = sa.make_url(postgresql_url)
    proxy = tcp_proxy(HOST, url.port or 0)
    engine = sa.create_engine(url.set(port=proxy.port))
    hanging = Database("default", engine, "celery_outbox")
    install(hanging)
    with Heartbeat([hanging]) as heartbeat:
        heartbeat.begin(hanging)
        proxy.stall()
        began = time.monotonic()
    assert time.monotonic() - began < 5
    proxy.resume()
    wait_until(lambda: not relays(hanging), message="the late removal")
    engine.dispose()


def test_the_relay_command_has_a_row_until_it_is_told_to_stop(
    database: Database, database_url: str, redis_url: str, tmp_path: Path
) -> None:
    env = environment(broker=redis_url, database=database_url)
    with running(outbox_command("relay", "--sleep", "1h"), tmp_path, env) as relay:
        wait_until(lambda: relays(database), 20, "the relay's row")
        assert [each.about["pid"] for each in relays(database)] == [relay.popen.pid]
        relay.send(signal.SIGTERM)
        assert relay.wait() == 0
    assert relays(database) == []


def test_a_row_of_a_relay_is_small_and_has_no_secrets(database: Database) -> None:
    with Heartbeat([database]) as heartbeat:
        heartbeat.begin(database)
        with database.begin() as connection:
            t = database.tables.state
            values = connection.execute(sa.select(t.c.value).where(t.c.name != "schema")).scalars()
            assert [set(json.loads(value)) for value in values] == [{"host", "pid", "since"}]


def test_a_relay_in_a_thread_of_a_worker_is_seen_like_any_other(
    sqlite_url: str, redis_url: str
) -> None:
    engine = sa.create_engine(sqlite_url)
    outbox = make_outbox(redis_url, engine)
    database = outbox.databases["default"]
    with relaying(outbox):
        wait_until(lambda: [relay.is_running for relay in relays(database)] == [True])
        with database.begin() as connection:
            database.store.add(connection, [make_message("seen")])
        wait_until(lambda: database.read(database.store.count)["ready"] == 0)
    assert relays(database) == []
    outbox.app.close()
    engine.dispose()
