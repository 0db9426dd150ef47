"""``schema check``: what it shows of each database, and when it ends with exit code 1."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from celery_outbox.relay.heartbeat import Heartbeat
from celery_outbox.storage.database import Database
from celery_outbox.storage.examination import Examination, examine
from celery_outbox.storage.install import install
from celery_outbox.storage.state import MigrationMark
from tests.processes import unused_port
from tests.relay.commands import outbox_command, run

PROJECT = "tests.schema.shop"
SECRET = "hunter2"


def environment(**databases: str) -> dict[str, str]:
    given = {"SHOP_BROKER": "redis://localhost:1/0", "SHOP_DATABASES": json.dumps(databases)}
    return {**os.environ, **given}


def check(
    *arguments: str, env: dict[str, str] | None = None, **databases: str
) -> subprocess.CompletedProcess[str]:
    command = outbox_command("schema", "check", *arguments, app=PROJECT)
    done = run(command, environment(**databases) | (env or {}))
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def database(engine: sa.Engine) -> Database:
    """A database with the table installed."""
    database = Database("default", engine, "celery_outbox")
    install(database)
    return database


def facts(found: Examination) -> dict[str, str]:
    return dict(found.facts)


def test_nothing_is_wrong_after_an_install(database: Database, database_url: str) -> None:
    done = check(default=database_url)
    assert (done.returncode, done.stderr) == (0, "")
    assert "celery_outbox, schema version 1" in done.stdout
    assert "nothing is wrong" in done.stdout
    assert "WRONG" not in done.stdout


def test_each_database_shows_table_server_settings_pool_relays_and_clock(database: Database) -> None:
    found = facts(examine(database))
    common = {"server", "clock", "table", "columns", "indexes", "relays", "pool"}
    of_its_own = {
        "postgresql": {"isolation", "time zone", "read only", "oldest transaction"},
        "mysql": {"isolation", "time zone", "read only", "binlog_format", "oldest transaction"},
        "sqlite": {"journal mode", "busy timeout"},
    }
    backend = database.url.get_backend_name()
    assert set(found) == common | of_its_own[backend]
    assert found["columns"] == "22, all as expected"
    assert found["indexes"] == "2 of 2 as expected"
    assert found["relays"] == "none running"
    assert re.fullmatch(r"\d\.\d\d s (ahead of|behind) this machine's", found["clock"])


def test_the_settings_are_those_of_the_server(postgresql_url: str, mariadb_url: str) -> None:
    options = "-c timezone=Asia/Kolkata -c default_transaction_isolation=serializable"
    command = "SET time_zone = '+05:30', tx_isolation = 'SERIALIZABLE', binlog_format = 'MIXED'"
    engines = [
        sa.create_engine(postgresql_url, connect_args={"options": options}),
        sa.create_engine(mariadb_url, connect_args={"init_command": command}),
    ]
    one, other = (facts(examine(Database("x", engine, "celery_outbox"))) for engine in engines)
    assert one["server"].startswith("PostgreSQL ")
    assert (one["isolation"], one["time zone"]) == ("serializable", "Asia/Kolkata")
    assert other["server"].startswith("MariaDB ")
    assert (other["isolation"], other["time zone"]) == ("SERIALIZABLE", "+05:30")
    assert other["binlog_format"] == "MIXED"
    for engine in engines:
        engine.dispose()


def test_sqlite_shows_its_journal_mode_and_busy_timeout(sqlite_url: str) -> None:
    engine = sa.create_engine(sqlite_url, connect_args={"timeout": 30})
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode=WAL")
    found = examine(Database("default", engine, "celery_outbox"))
    assert facts(found)["journal mode"] == "wal"
    assert facts(found)["busy timeout"] == "30000 ms"
    assert found.remarks == []
    engine.dispose()


def test_a_sqlite_engine_without_patience_is_wrong(sqlite_url: str) -> None:
    engine = sa.create_engine(sqlite_url, connect_args={"timeout": 0})
    database = Database("default", engine, "celery_outbox")
    install(database)
    (fault,) = examine(database).faults
    assert re.search(r"busy timeout of at least 1000 ms, found 0: .*\"timeout\": 30", fault)
    engine.dispose()


def test_a_server_that_cannot_do_the_work_is_wrong_and_shown_all_the_same(mariadb_url: str) -> None:
    engine = sa.create_engine(mariadb_url)
    database = Database("default", engine, "celery_outbox")
    install(database)
    engine.dispose()
    command = {"init_command": "SET SESSION binlog_format = STATEMENT"}
    engine = sa.create_engine(mariadb_url, connect_args=command)
    found = examine(Database("default", engine, "celery_outbox"))
    (fault,) = found.faults
    assert "expected binlog_format ROW or MIXED, found STATEMENT" in fault
    assert facts(found)["binlog_format"] == "STATEMENT"
    assert facts(found)["table"] == "celery_outbox, schema version 1"
    engine.dispose()


def test_a_missing_table_is_wrong(database_url: str) -> None:
    done = check(default=database_url)
    assert done.returncode == 1
    assert re.search(
        r"WRONG: expected the table 'celery_outbox', found none\. Run `.*install`", done.stdout
    )


WRONG: dict[str, tuple[str, str]] = {
    "older": ("UPDATE celery_outbox_state SET value = '0'", r"found 0\. .*schema migrate`"),
    "newer": ("UPDATE celery_outbox_state SET value = '9'", r"found 9, which a newer"),
    "a column less": (
        "ALTER TABLE celery_outbox DROP COLUMN finished_at",
        r"'finished_at' of 'celery_outbox': expected .*, found none",
    ),
    "no state table": (
        "DROP TABLE celery_outbox_state",
        r"the table celery_outbox_state is missing\. Run `.* schema install`",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_table_that_is_not_right_is_wrong(wrong: str, database: Database, engine: sa.Engine) -> None:
    statement, expected = WRONG[wrong]
    with engine.begin() as connection:
        connection.execute(sa.text(statement))
    (fault,) = examine(database).faults
    assert re.search(expected, fault)


def test_indexes_that_are_missing_or_differ_are_wrong(database: Database, engine: sa.Engine) -> None:
    claim, by_task = sorted(database.tables.created[0].indexes, key=lambda index: str(index.name))
    with engine.begin() as connection:
        claim.drop(connection)
        by_task.drop(connection)
        connection.execute(sa.text(f"CREATE INDEX {claim.name} ON celery_outbox (broker)"))
    found = examine(database)
    assert facts(found)["indexes"] == "0 of 2 as expected"
    (fault,) = found.faults
    assert f"the index {by_task.name} is missing; the index {claim.name} differs" in fault
    assert "schema install" in fault


def test_an_interrupted_migration_is_wrong(database: Database) -> None:
    with database.begin() as connection:
        database.state.mark(connection, MigrationMark(source=0, target=1))
    (fault,) = examine(database).faults
    assert "migration from 0 to 1 that was interrupted" in fault


def test_columns_of_the_users_own_are_named_and_not_wrong(
    database: Database, engine: sa.Engine
) -> None:
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE celery_outbox ADD COLUMN tenant VARCHAR(20)"))
    found = examine(database)
    assert found.faults == []
    assert facts(found)["columns"] == "22, all as expected; your own: tenant"


def test_a_table_without_a_version_is_worth_a_remark(database: Database, engine: sa.Engine) -> None:
    with engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM celery_outbox_state"))
    found = examine(database)
    assert found.faults == []
    assert "nobody has written down that the table is of version 1" in "".join(found.remarks)


def test_storage_parameters_that_lack_are_worth_a_remark(postgresql_url: str) -> None:
    engine = sa.create_engine(postgresql_url)
    database = Database("default", engine, "celery_outbox")
    install(database)
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE celery_outbox RESET (fillfactor)"))
    found = examine(database)
    assert found.faults == []
    assert "SET (fillfactor = 50)" in "".join(found.remarks)
    engine.dispose()


def test_running_relays_are_named_and_killed_ones_counted(database: Database) -> None:
    t = database.tables.state
    with Heartbeat([database]) as heartbeat:
        heartbeat.begin(database)
        with database.begin() as connection:
            database.state.see_relay(connection, "killed", {"host": "web-1", "pid": 7})
            long_ago = database.dialect.shifted(t.c.seen_at, sa.literal(-300.0))
            connection.execute(sa.update(t).where(t.c.name == "relay:killed").values(seen_at=long_ago))
        shown = facts(examine(database))["relays"]
    assert re.fullmatch(rf".+, process {os.getpid()}, seen \d+ s ago \(1 killed\)", shown)


@pytest.mark.parametrize(
    ("options", "concurrency", "expected"),
    [
        ({"pool_size": 2, "max_overflow": 1}, 3, []),
        ({"pool_size": 2, "max_overflow": 1}, 4, [r"expected a pool of at least 4 .*, found 3\."]),
        ({"pool_size": 0}, 100, []),
        ({"pool_size": 1, "max_overflow": -1}, 100, []),
        ({"poolclass": sa.NullPool}, 100, []),
        ({"poolclass": sa.StaticPool}, 2, [r"expected a pool of at least 2 .*, found 1\."]),
    ],
    ids=["enough", "too small", "no limit", "endless overflow", "no pool", "one connection"],
)
def test_the_pool_is_compared_with_the_threads_of_a_relay(
    options: dict[str, Any], concurrency: int, expected: list[str], sqlite_url: str
) -> None:
    engine = sa.create_engine(sqlite_url, **options)
    database = Database("default", engine, "celery_outbox")
    install(database)
    faults = examine(database, concurrency=concurrency).faults
    assert len(faults) == len(expected)
    for fault, pattern in zip(faults, expected, strict=True):
        assert re.search(pattern, fault)
    engine.dispose()


def test_the_command_takes_the_number_of_threads(sqlite_url: str) -> None:
    engine = sa.create_engine(sqlite_url)
    install(Database("default", engine, "celery_outbox"))
    engine.dispose()
    assert check(default=sqlite_url).returncode == 0
    done = check("--concurrency", "500", default=sqlite_url)
    assert done.returncode == 1
    assert "expected a pool of at least 500 connections for --concurrency 500" in done.stdout


@pytest.fixture(params=["postgresql", "mariadb"])
def busy(request: pytest.FixtureRequest) -> Iterator[Database]:
    """An installed database in which another session has a transaction open."""
    url = request.getfixturevalue(f"{request.param}_url")
    zone = {
        "postgresql": {"options": "-c timezone=Asia/Kolkata"},
        "mariadb": {"init_command": "SET time_zone = '+05:30'"},
    }[request.param]
    engine = sa.create_engine(url, connect_args=zone)
    database = Database("default", engine, "celery_outbox")
    install(database)
    with engine.connect() as connection:
        connection.execute(sa.text("SELECT count(*) FROM celery_outbox"))
        connection.execute(sa.text("DELETE FROM celery_outbox_state WHERE name = 'nobody'"))
        yield database
    engine.dispose()


def test_the_oldest_open_transaction_is_shown(busy: Database) -> None:
    shown = facts(examine(busy))["oldest transaction"]
    found = re.fullmatch(r"open for (\d+) s", shown)
    assert found is not None, shown
    assert int(found[1]) < 60


def test_a_transaction_that_was_prepared_and_forgotten_counts(postgresql_url: str) -> None:
    engine = sa.create_engine(postgresql_url)
    database = Database("default", engine, "celery_outbox")
    install(database)
    assert facts(examine(database))["oldest transaction"] == "none open"
    with engine.connect() as connection:
        prepared = connection.begin_twophase()
        connection.execute(sa.text("DELETE FROM celery_outbox"))
        prepared.prepare()
        assert facts(examine(database))["oldest transaction"].startswith("open for ")
        prepared.rollback()
    engine.dispose()


def test_a_database_that_is_down_does_not_hide_the_others(sqlite_url: str) -> None:
    engine = sa.create_engine(sqlite_url)
    install(Database("default", engine, "celery_outbox"))
    engine.dispose()
    down = f"postgresql+psycopg://shop:{SECRET}@127.0.0.1:{unused_port()}/shop"
    done = check(billing=down, default=sqlite_url)
    assert done.returncode == 1
    assert re.search(r"^billing  postgresql\+psycopg://shop:\*\*\*@", done.stdout, re.MULTILINE)
    assert re.search(r"WRONG: database 'billing': OperationalError", done.stdout)
    assert "celery_outbox, schema version 1" in done.stdout
    assert "nothing is wrong" in done.stdout
    assert SECRET not in done.stdout + done.stderr


@pytest.mark.parametrize("form", [["default"], ["--database", "default"]], ids=" ".join)
def test_one_database_may_be_named_in_two_forms(form: list[str], sqlite_url: str) -> None:
    engine = sa.create_engine(sqlite_url)
    install(Database("default", engine, "celery_outbox"))
    engine.dispose()
    done = check(*form, default=sqlite_url, billing="sqlite:////no/such/file.db")
    assert done.returncode == 0
    assert "default" in done.stdout
    assert "billing" not in done.stdout


def test_two_different_names_are_wrong_usage(sqlite_url: str) -> None:
    done = check("one", "--database", "other", default=sqlite_url)
    assert done.returncode == 2
    assert "Expected one database, got 'one' and 'other'" in done.stderr


def test_a_pipe_gets_whole_lines_without_colours(sqlite_url: str) -> None:
    done = check(default=sqlite_url, env={"COLUMNS": "30"})
    assert "\x1b" not in done.stdout
    assert any(len(line) > 80 for line in done.stdout.splitlines())


def test_a_narrow_terminal_gets_every_word(sqlite_url: str) -> None:
    wide = check(default=sqlite_url)
    terminal = {"COLUMNS": "30", "FORCE_COLOR": "1", "TERM": "xterm"}
    done = check(default=sqlite_url, env=terminal)
    assert "\x1b[" in done.stdout
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    assert max(map(len, text.splitlines())) <= 30
    assert without_clock(text) == without_clock(wide.stdout)


def without_clock(text: str) -> str:
    """Leave spaces and the clocks' difference out: it is another one each time."""
    return re.sub(r"clock\d\.\d\ds(aheadof|behind)", "", "".join(text.split()))


def test_a_reader_that_goes_away_is_no_traceback(sqlite_url: str) -> None:
    command = outbox_command("schema", "check", app=PROJECT)
    with subprocess.Popen(
        command,
        env=environment(default=sqlite_url),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert "Traceback" not in said
