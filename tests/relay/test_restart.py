"""``celery-outbox restart``: running relays of the app end, others and later ones go on."""

import logging
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from celery import Celery
from click.testing import CliRunner, Result

from celery_outbox import Outbox
from celery_outbox.cli import outbox as commands
from celery_outbox.errors import SchemaError
from celery_outbox.policy import RetryPolicy
from celery_outbox.relay.heartbeat import Heartbeat
from celery_outbox.relay.loop import Relay, RelayOptions
from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
from tests.processes import HOST, unused_port
from tests.proxy import TcpProxy
from tests.relay import fakes
from tests.relay.apps import make_outbox, rows, send
from tests.relay.commands import environment, outbox_command, run, running
from tests.relay.conftest import MakeDatabase
from tests.storage.rows import BROKER, add, make_message
from tests.waiting import wait_until

QUICK = timedelta(seconds=0.05)
#: Longer than a relay takes to see the mark.
SOON = 8


def ask(database: Database, app: str = "shop") -> None:
    database.run(lambda connection: database.state.ask_restart(connection, app))


def pids(outbox: Outbox) -> set[int]:
    database = outbox.databases["default"]
    return {each.about["pid"] for each in database.read(database.state.relays)}


def call(databases: dict[str, sa.Engine]) -> Result:
    app = Celery("shop", broker="redis://localhost:1/0", set_as_current=False)
    Outbox(app, databases=databases)
    result = CliRunner().invoke(commands, ["restart"], obj=SimpleNamespace(app=app))
    app.close()
    return result


@pytest.mark.parametrize("server", ["sqlite", "postgresql"])
def test_relays_of_the_app_end_and_others_and_later_ones_go_on(
    server: str, request: pytest.FixtureRequest, redis_url: str, tmp_path: Path
) -> None:
    url = request.getfixturevalue(f"{server}_url")
    engine = sa.create_engine(url)
    shop = make_outbox(redis_url, engine)
    other = make_outbox(redis_url, engine, main="other")
    mine = environment(broker=redis_url, database=url)
    theirs = environment(broker=redis_url, database=url, settings={"name": "other"})
    command = outbox_command("relay", "--sleep", "0.1s")
    with running(command, tmp_path, mine) as old, running(command, tmp_path, theirs) as foreign:
        wait_until(lambda: len(pids(shop)) == 2, 30, "both relays")
        done = run(outbox_command("restart"), mine)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "default: 1 running relay ends within seconds\n"
        assert old.wait(timeout=SOON) == 0, old.output
        assert pids(shop) == {foreign.popen.pid}
        with running(command, tmp_path, mine) as new:
            wait_until(lambda: new.popen.pid in pids(shop), 30, "the new relay")
            send(shop)
            send(other)
            wait_until(lambda: not rows(shop), 15, "deliveries by both")
            assert run(outbox_command("restart"), mine).returncode == 0
            assert new.wait(timeout=SOON) == 0, new.output
        assert foreign.popen.poll() is None, foreign.output
        foreign.send(signal.SIGTERM)
        assert foreign.wait() == 0
    for each in (shop, other):
        each.app.close()
    engine.dispose()


def test_a_relay_that_begins_after_the_mark_sees_only_the_next_one(make_database: MakeDatabase) -> None:
    database = make_database()
    ask(database)
    restarted = threading.Event()
    with Heartbeat([database], app="shop", on_restart=restarted.set, every=QUICK) as heartbeat:
        heartbeat.begin(database)
        ask(database, "other")
        with database.begin() as connection:
            connection.execute(
                sa.delete(database.tables.state).where(
                    database.tables.state.c.name.startswith("relay:")
                )
            )
        # It has looked for the mark before it is seen again.
        wait_until(lambda: database.read(database.state.relays))
        assert not restarted.is_set()
        ask(database)
        assert restarted.wait(SOON)


def test_a_mark_left_while_the_heartbeat_was_refused_is_seen(make_database: MakeDatabase) -> None:
    database = make_database()
    restarted = threading.Event()
    with Heartbeat([database], app="shop", on_restart=restarted.set, every=QUICK) as heartbeat:
        heartbeat.begin(database)
        with database.begin() as connection:  # a migration, and the restart after it
            database.state.set_version(connection, 2)
            database.state.ask_restart(connection, "shop")
        assert restarted.wait(SOON)


def test_a_mark_left_just_before_a_database_is_begun_anew_is_seen(make_database: MakeDatabase) -> None:
    database = make_database()
    restarted = threading.Event()
    often = timedelta(seconds=0.5)
    with Heartbeat([database], app="shop", on_restart=restarted.set, every=often) as heartbeat:

        def is_refused() -> bool:
            try:
                heartbeat.begin(database)
            except SchemaError:
                return True
            return False

        heartbeat.begin(database)
        with database.begin() as connection:
            database.state.set_version(connection, 2)
        wait_until(is_refused)
        with database.begin() as connection:
            database.state.set_version(connection, 1)
            database.state.ask_restart(connection, "shop")
        heartbeat.begin(database)
        assert restarted.wait(SOON)


def test_a_database_that_hangs_keeps_no_other_from_restarting_its_relays(
    make_database: MakeDatabase, postgresql_url: str, tcp_proxy: Callable[[str, int], TcpProxy]
) -> None:
    url = sa.make_url(postgresql_url)
    proxy = tcp_proxy(HOST, url.port or 0)
    hanging = make_database(url.set(port=proxy.port).render_as_string(hide_password=False))
    good = make_database()
    restarted = threading.Event()
    with Heartbeat([hanging, good], app="shop", on_restart=restarted.set, every=QUICK) as heartbeat:
        heartbeat.begin(hanging)
        heartbeat.begin(good)
        proxy.stall()
        ask(good)
        assert restarted.wait(SOON)
    proxy.resume()
    wait_until(lambda: not hanging.read(hanging.state.relays), message="the late removal")


def test_a_batch_under_way_is_finished_also_when_a_signal_comes_on_top(
    make_database: MakeDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "celery_outbox")
    databases = [make_database(), make_database()]
    gate, broker = fakes.Gate(), fakes.Broker()
    broker.answer = gate.accept
    add(databases[0], make_message("under way"))
    options = RelayOptions(lease=timedelta(minutes=5), retry=RetryPolicy(), sleep=QUICK)
    it = fakes.Running(Relay(databases, {BROKER: broker}, options, name="shop"))
    wait_until(lambda: gate.waiting, message="the batch")
    for database in databases:
        wait_until(partial(database.read, database.state.relays), message="the relay's row")
        ask(database)
    wait_until(lambda: "asked for a restart" in caplog.text, SOON, "the restart")
    it.relay.stop()
    gate.open()
    it.wait()
    assert (it.error, it.result, it.relay.is_abandoned) == (None, True, False)
    assert databases[0].read(databases[0].store.count)["ready"] == 0


def test_two_restarts_at_once_are_one(make_database: MakeDatabase, postgresql_url: str) -> None:
    database = make_database(postgresql_url)
    locks = sa.text(
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    failures: list[Exception] = []

    def ask_too() -> None:
        try:
            ask(database)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            failures.append(error)

    late = threading.Thread(target=ask_too)
    with database.begin() as connection:
        database.state.ask_restart(connection, "shop")
        late.start()
        wait_until(lambda: database.read(lambda other: other.execute(locks).scalar()))
        first = database.state.restart(connection, "shop")
    late.join(timeout=10)
    assert failures == []
    second = database.read(lambda connection: database.state.restart(connection, "shop"))
    assert second not in {None, first}


def test_a_database_that_is_down_is_reported_and_the_others_are_done(tmp_path: Path) -> None:
    down = sa.create_engine(f"postgresql+psycopg://shop:hunter2@{HOST}:{unused_port()}/shop")
    up = sa.create_engine(f"sqlite:///{tmp_path}/up.db")
    database = Database("up", up, "celery_outbox")
    install(database)
    result = call({"down": down, "up": up})
    assert result.exit_code == 1
    assert result.stdout == "up: no relay is running\n"
    assert result.stderr.startswith("Error: database 'down': ")
    assert "hunter2" not in result.output
    assert database.read(lambda connection: database.state.restart(connection, "shop"))
    up.dispose()


def test_killed_relays_and_those_of_others_do_not_count(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    database = Database("default", engine, "celery_outbox")
    install(database)
    t = database.tables.state
    with database.begin() as connection:
        for name, app in {"one": "shop", "two": "shop", "killed": "shop", "foreign": "other"}.items():
            database.state.see_relay(connection, name, {"app": app})
        seen = database.dialect.shifted(t.c.seen_at, sa.literal(-90.0))
        connection.execute(sa.update(t).where(t.c.name == "relay:killed").values(seen_at=seen))
    result = call({"default": engine})
    assert (result.exit_code, result.output) == (0, "default: 2 running relays end within seconds\n")
    engine.dispose()


def test_a_database_in_memory_has_no_relays_to_restart() -> None:
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
    result = call({"default": engine})
    assert result.exit_code == 0
    assert result.output == "default: in memory, where no other process can relay\n"
    engine.dispose()


def test_an_app_with_the_longest_name_can_be_restarted(make_database: MakeDatabase) -> None:
    database = make_database()
    ask(database, "n" * 191)
    names = database.read(lambda c: c.execute(sa.select(database.tables.state.c.name)).scalars().all())
    assert max(map(len, names)) <= 191
