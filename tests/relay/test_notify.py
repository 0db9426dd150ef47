"""How a relay is woken by the commits of others: at once, again after each outage, never in vain."""

import itertools
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from celery_outbox import Outbox
from celery_outbox.relay.listener import Listener
from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.relay.apps import relaying, send
from tests.relay.wire import task_ids
from tests.servers import DatabaseServer
from tests.storage.rows import add, make_message
from tests.waiting import wait_until

TABLE = "celery_outbox"
NAME = "celery_outbox listener"
LOST = "The database 'default' does not notify"
BACK = "The database 'default' notifies"
OpenDatabase = Callable[..., Database]


class Bell:
    """Counts how often each database has rung."""

    def __init__(self) -> None:
        self.rung: list[str] = []

    def __call__(self, database: Database) -> None:
        self.rung.append(database.name)

    def wait(self, count: int, name: str = "default") -> None:
        wait_until(lambda: self.rung.count(name) >= count, 20, f"ring {count}", interval=0.005)


@pytest.fixture
def open_database() -> Iterator[OpenDatabase]:
    """Open databases on engines of their own, the tables installed."""
    engines: list[sa.Engine] = []

    def open_(url: str | sa.URL, name: str = "default", **options: Any) -> Database:
        engines.append(sa.create_engine(url, **options))
        database = Database(name, engines[-1], TABLE)
        install(database)
        return database

    yield open_
    for engine in engines:
        engine.dispose()


@pytest.fixture
def database(open_database: OpenDatabase, postgresql_url: str) -> Database:
    return open_database(postgresql_url)


@pytest.fixture
def proxy(postgresql_url: str, tcp_proxy: Callable[[str, int], TcpProxy]) -> TcpProxy:
    return tcp_proxy(HOST, sa.make_url(postgresql_url).port or 0)


@pytest.fixture
def behind_proxy(proxy: TcpProxy, database: Database, open_database: OpenDatabase) -> Database:
    """The same database, reached by a wire that can break."""
    return open_database(database.url.set(port=proxy.port))


@pytest.fixture
def bell() -> Bell:
    return Bell()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """What the listener has logged at a level, the beginnings; what is said again counts once."""
    caplog.set_level(logging.DEBUG, (listener := "celery_outbox.relay.listener"))

    def found(level: int = logging.DEBUG) -> list[str]:
        said = [text for *where, text in caplog.record_tuples if where == [listener, level]]
        return [line for line, _ in itertools.groupby(said, lambda text: text.partition(" this")[0])]

    return found


def listeners(database: Database) -> list[sa.Row[Any]]:
    """Return the sessions of listeners, as PostgreSQL shows them."""
    asked = sa.text(
        "SELECT pid, client_port, state FROM pg_stat_activity WHERE application_name = :name"
    )
    with database.begin() as connection:
        return list(connection.execute(asked, {"name": NAME}).all())


def terminate(database: Database) -> None:
    """Have PostgreSQL end every listener's session."""
    ending = sa.text(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = :name"
    )
    with database.begin() as connection:
        assert connection.execute(ending, {"name": NAME}).scalars().all() == [True]


def listening_thread() -> threading.Thread:
    (thread,) = (each for each in threading.enumerate() if each.name == NAME)
    return thread


def test_a_commit_rings_at_once(database: Database, bell: Bell) -> None:
    with Listener([database], bell):
        bell.wait(1)
        for number in range(5):
            add(database, make_message())
            began = time.monotonic()
            bell.wait(2 + number)
            assert time.monotonic() - began < 1
    assert bell.rung == ["default"] * 6


def test_commits_that_come_together_ring_together(database: Database) -> None:
    rung: list[Database] = []
    has_begun, may_go_on = threading.Event(), threading.Event()

    def ring(database: Database) -> None:
        rung.append(database)
        has_begun.set()
        may_go_on.wait(10)

    with Listener([database], ring):
        assert has_begun.wait(10)
        for _ in range(50):
            add(database, make_message())
        may_go_on.set()
        wait_until(lambda: len(rung) > 1)
        (session,) = listeners(database)
        assert session.state == "idle"
    assert len(rung) < 10


def test_each_database_rings_for_itself(
    database: Database, open_database: OpenDatabase, postgresql: DatabaseServer, bell: Bell
) -> None:
    other = open_database(postgresql.create_database(), "other")
    with Listener([database, other], bell):
        bell.wait(1)
        bell.wait(1, "other")
        add(other, make_message())
        bell.wait(2, "other")
        add(database, make_message())
        bell.wait(2)
    assert sorted(bell.rung) == ["default", "default", "other", "other"]


@pytest.mark.parametrize("kind", ["sqlite", "mariadb"])
def test_databases_that_notify_nobody_are_left_out(
    kind: str, database: Database, open_database: OpenDatabase, request: pytest.FixtureRequest
) -> None:
    other = open_database(request.getfixturevalue(f"{kind}_url"), "other")
    bell = Bell()
    with Listener([other, database], bell):
        bell.wait(1)
        assert listening_thread().is_alive()
        add(other, make_message())
        add(database, make_message())
        bell.wait(2)
    assert bell.rung == ["default"] * 2


def test_nobody_listens_when_notifying_is_turned_off(postgresql_url: str, bell: Bell) -> None:
    silent = Database("silent", sa.create_engine(postgresql_url), TABLE, notify=False)
    with Listener([silent], bell):
        assert NAME not in {each.name for each in threading.enumerate()}


def test_a_session_that_was_terminated_is_replaced(
    database: Database, bell: Bell, lines: Callable[..., list[str]]
) -> None:
    with Listener([database], bell):
        bell.wait(1)
        terminate(database)
        bell.wait(2)
        add(database, make_message())
        bell.wait(3)
    assert lines() == [BACK, LOST, BACK]


def test_what_was_committed_during_an_outage_rings_when_it_is_over(
    database: Database,
    behind_proxy: Database,
    proxy: TcpProxy,
    bell: Bell,
    lines: Callable[..., list[str]],
) -> None:
    with Listener([behind_proxy], bell):
        bell.wait(1)
        proxy.refuse()
        proxy.cut()
        wait_until(lambda: LOST in lines())
        add(database, make_message())
        proxy.listen()
        bell.wait(2)
        add(database, make_message())
        bell.wait(3)
    assert lines()[-2:] == [LOST, BACK]


def test_a_long_outage_is_left_to_others_to_log_however_often_it_tries(
    open_database: OpenDatabase, postgresql_url: str, bell: Bell, lines: Callable[..., list[str]]
) -> None:
    url = sa.make_url(postgresql_url).set(drivername="postgresql")
    refused: list[float] = []
    is_away = threading.Event()

    def connect() -> Any:
        if is_away.is_set():
            refused.append(time.monotonic())
            raise psycopg.OperationalError("nobody at home")
        return psycopg.connect(url.render_as_string(hide_password=False))

    database = open_database(postgresql_url, creator=connect)
    with Listener([database], bell):
        bell.wait(1)
        terminating = psycopg.connect(url.render_as_string(hide_password=False), autocommit=True)
        is_away.set()
        terminating.execute(
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = '{NAME}'"
        )
        terminating.close()
        wait_until(lambda: len(refused) >= 5, 20)
        is_away.clear()
        bell.wait(2)
    assert lines()[-2:] == [LOST, BACK]
    assert lines(logging.INFO) == []
    first, *_, last = [later - earlier for earlier, later in itertools.pairwise(refused)]
    assert last > 2 * first


def test_a_database_that_is_away_at_the_start_rings_once_it_is_there(
    behind_proxy: Database, proxy: TcpProxy, bell: Bell, lines: Callable[..., list[str]]
) -> None:
    proxy.refuse()
    with Listener([behind_proxy], bell):
        wait_until(lambda: LOST in lines())
        assert bell.rung == []
        proxy.listen()
        bell.wait(1)
    assert lines()[-2:] == [LOST, BACK]


def test_a_pool_whose_only_connection_is_taken_is_not_asked(
    open_database: OpenDatabase, postgresql_url: str, bell: Bell
) -> None:
    database = open_database(postgresql_url, pool_size=1, max_overflow=0, pool_timeout=1)
    with database.begin() as connection, Listener([database], bell):
        bell.wait(1)
        database.store.add(connection, [make_message()])
        connection.commit()
        bell.wait(2)
    add(database, make_message())


def test_the_events_and_arguments_of_the_engine_hold_for_its_connection_too(
    database: Database, bell: Bell
) -> None:
    url = database.url
    engine = sa.create_engine(url, connect_args={"options": "-c statement_timeout=4711"})
    seen: list[Any] = []

    @sa.event.listens_for(engine, "connect")
    def begin(connection: Any, record: object) -> None:
        seen.append(
            connection.execute("SHOW statement_timeout").fetchone()
        )  # leaves a transaction open

    with Listener([Database("default", engine, TABLE)], bell):
        bell.wait(1)
        (session,) = listeners(database)
        assert session.state == "idle"
        add(database, make_message())
        bell.wait(2)
    assert seen == [("4711ms",)]
    engine.dispose()


def test_a_server_that_ends_idle_sessions_keeps_the_listener(
    database: Database, bell: Bell, lines: Callable[..., list[str]]
) -> None:
    with database.begin() as connection:
        if database.dialect.server_version(connection) < (14,):
            pytest.skip("PostgreSQL 14 and later end idle sessions")
        name = connection.execute(sa.text("SELECT current_database()")).scalar_one()
        connection.execute(sa.text(f"ALTER DATABASE {name} SET idle_session_timeout = '200ms'"))
    with Listener([database], bell):
        bell.wait(1)
        url = database.url.set(drivername="postgresql").render_as_string(hide_password=False)
        idle = psycopg.connect(url, application_name="idle")
        asked = sa.text("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'idle'")
        wait_until(lambda: database.run(lambda connection: connection.execute(asked).scalar() == 0))
        assert len(listeners(database)) == 1
        idle.close()
    assert lines() == [BACK]


def test_a_firewall_that_forgets_idle_connections_is_noticed(database: Database, bell: Bell) -> None:
    table = Path("/proc/net/tcp")
    if not table.exists():
        pytest.skip("what a socket waits for can be seen on Linux only")

    def keep_alive_ticks() -> set[int]:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
        timers = [row[5].split(":") for row in rows if row[1].endswith(f":{session.client_port:04X}")]
        return {int(ticks, 16) for kind, ticks in timers if int(kind) == 2}

    with Listener([database], bell):
        bell.wait(1)
        (session,) = listeners(database)
        (ticks,) = wait_until(keep_alive_ticks)
    assert ticks <= 31 * 100


def test_signals_are_left_to_the_main_thread(database: Database, bell: Bell) -> None:
    status = Path("/proc/self/task")
    if not status.exists():
        pytest.skip("the signals that a thread blocks can be seen on Linux only")
    with Listener([database], bell):
        bell.wait(1)
        text = (status / str(listening_thread().native_id) / "status").read_text()
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    (blocked,) = (line.split()[1] for line in text.splitlines() if line.startswith("SigBlk"))
    assert int(blocked, 16) >> (signal.SIGTERM - 1) & 1


def test_it_ends_at_once_while_it_waits(database: Database, bell: Bell) -> None:
    with Listener([database], bell):
        bell.wait(1)
        thread, began = listening_thread(), time.monotonic()
    assert time.monotonic() - began < 0.5
    assert not thread.is_alive()
    wait_until(lambda: listeners(database) == [])


def test_it_ends_soon_while_the_database_hangs(
    behind_proxy: Database, proxy: TcpProxy, bell: Bell
) -> None:
    proxy.stall()
    before = proxy.accepted
    with Listener([behind_proxy], bell):
        wait_until(lambda: proxy.accepted > before)
        thread, began = listening_thread(), time.monotonic()
    assert time.monotonic() - began < 2
    proxy.cut()
    proxy.resume()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert bell.rung == []


def test_it_ends_at_once_while_it_pauses_before_it_tries_again(
    behind_proxy: Database, proxy: TcpProxy, bell: Bell, lines: Callable[..., list[str]]
) -> None:
    proxy.refuse()
    with Listener([behind_proxy], bell):
        wait_until(lines)
        thread, began = listening_thread(), time.monotonic()
    assert time.monotonic() - began < 0.5
    assert not thread.is_alive()


def test_a_pooler_that_holds_notifications_back_is_noticed(
    pgbouncer_url: str, caplog: pytest.LogCaptureFixture, bell: Bell, lines: Callable[..., list[str]]
) -> None:
    database = Database("default", sa.make_url(pgbouncer_url), TABLE)
    install(database)
    with Listener([database], bell):
        wait_until(lambda: lines(logging.INFO))
    assert "PgBouncer in transaction mode" in caplog.text
    assert bell.rung == []


def test_a_relay_delivers_at_once_however_long_it_sleeps(
    open_outbox: Callable[..., Outbox], postgresql_url: str, redis_url: str
) -> None:
    outbox = open_outbox(redis_url, postgresql_url)
    database = outbox.databases["default"]
    with relaying(outbox, sleep=timedelta(hours=1)):
        wait_until(lambda: listeners(database))
        sent = [send(outbox)]
        wait_until(lambda: task_ids(redis_url) == sent, interval=0.005)
