"""Migrations: from an old table to this version, interrupted and resumed, and when they are refused."""

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from celery_outbox.errors import DatabaseError, SchemaError
from celery_outbox.relay.heartbeat import Heartbeat
from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
from celery_outbox.storage.migrate import Migration, Progress, Step, migrate
from celery_outbox.storage.state import MigrationMark
from tests.schema.described import described
from tests.schema.old import COPY, DROP, MIGRATIONS, STEPS, make_old_table
from tests.storage.rows import add, change, claim, ids, make_message, rows

ROOT = Path(__file__).parents[2]


@pytest.fixture
def database(engine: sa.Engine) -> Database:
    """A database with 25 messages in a table of version 0."""
    make_old_table(engine, rows=25)
    return Database("default", engine, "celery_outbox")


def assert_is_migrated(database: Database) -> None:
    """Every message is there, in a table that an install finds right, and can be claimed."""
    assert install(database) == []
    assert database.read(database.state.version) == 1
    assert database.read(database.state.migration) is None
    stored = rows(database)
    assert [row.task_id for row in stored] == [f"old {number}" for number in range(1, 26)]
    assert {row.queue for row in stored} == {"letters"}
    assert len(ids(claim(database))) == 25
    add(database, make_message("new"))
    assert ids(claim(database)) == ["new"]


def test_an_old_table_becomes_a_current_one_with_its_messages(database: Database) -> None:
    assert migrate(database, migrations=MIGRATIONS) == ["migrated the table from version 0 to 1"]
    assert_is_migrated(database)


def test_a_migrated_table_has_the_indexes_of_a_new_one(database: Database, engine: sa.Engine) -> None:
    migrate(database, migrations=MIGRATIONS)
    assert described(engine)["celery_outbox"]["indexes"] == [
        ("ix_celery_outbox_claim", ["broker", "scheduled_at", "id"], False),
        ("ix_celery_outbox_task_id", ["task_id"], False),
    ]


def test_columns_and_indexes_of_the_users_own_survive_a_migration(
    database: Database, engine: sa.Engine
) -> None:
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE celery_outbox ADD COLUMN tenant VARCHAR(20)"))
        connection.execute(sa.text("CREATE INDEX ix_tenant ON celery_outbox (tenant)"))
        connection.execute(sa.text("UPDATE celery_outbox SET tenant = 'seven'"))
    migrate(database, migrations=MIGRATIONS)
    with engine.connect() as connection:
        tenants = connection.execute(sa.text("SELECT DISTINCT tenant FROM celery_outbox")).scalars()
        assert list(tenants) == ["seven"]
    indexes = described(engine)["celery_outbox"]["indexes"]
    assert ("ix_tenant", ["tenant"], False) in indexes


def test_a_second_migration_changes_nothing(database: Database, engine: sa.Engine) -> None:
    migrate(database, migrations=MIGRATIONS)
    before, stored = described(engine), rows(database)
    assert migrate(database, migrations=MIGRATIONS) == []
    assert described(engine) == before
    assert rows(database) == stored


def test_a_current_table_is_not_even_repaired(engine: sa.Engine) -> None:
    database = Database("default", engine, "celery_outbox")
    install(database)
    with engine.begin() as connection:
        next(iter(database.tables.created[0].indexes)).drop(connection)
    before = described(engine)
    assert migrate(database) == []
    assert described(engine) == before


def test_a_missing_table_is_installed(engine: sa.Engine) -> None:
    database = Database("default", engine, "celery_outbox")
    assert migrate(database) == ["installed the table"]
    assert install(database) == []
    add(database, make_message())
    assert ids(claim(database)) == ["id-1"]


def test_progress_tells_each_step_and_how_many_rows_are_copied(database: Database) -> None:
    seen: list[tuple[str, int, int]] = []
    migrate(database, migrations=MIGRATIONS, progress=lambda *report: seen.append(report))
    assert seen == [
        ("add columns", 0, 1),
        ("add columns", 1, 1),
        ("copy the queue", 0, 1),
        ("copy the queue", 0, 25),
        ("copy the queue", 10, 25),
        ("copy the queue", 20, 25),
        ("copy the queue", 25, 25),
        ("copy the queue", 1, 1),
        ("drop a column", 0, 1),
        ("drop a column", 1, 1),
    ]


@pytest.mark.parametrize(
    ("step", "when"),
    [
        ("add columns", "before"),
        ("add columns", "after"),
        ("copy the queue", "within"),
        ("copy the queue", "after"),
        ("drop a column", "before"),
        ("drop a column", "after"),
    ],
)
def test_a_killed_migration_goes_on_when_it_is_run_again(
    step: str, when: str, database: Database, database_url: str
) -> None:
    killed = subprocess.run(
        [sys.executable, "-m", "tests.schema.dying", database_url, step, when],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with pytest.raises(SchemaError, match=r"schema migrate`"):
        install(database)
    migrate(database, migrations=MIGRATIONS)
    assert_is_migrated(database)


def test_a_migration_that_fails_leaves_nothing_behind_where_a_transaction_can_hold_it(
    database: Database, engine: sa.Engine
) -> None:
    before = described(engine)

    def fail(database: Database, connection: sa.Connection, progress: Progress) -> None:
        connection.execute(sa.text("SELECT no_such_column FROM celery_outbox"))

    broken = Migration(source=0, steps=[*STEPS, Step(name="fail", run=fail)])
    with pytest.raises((DatabaseError, SchemaError), match="no_such_column"):
        migrate(database, migrations=[broken])
    if database.dialect.has_transactional_ddl:
        assert described(engine) == before
        assert database.read(database.state.migration) is None
    else:
        mark = database.read(database.state.migration)
        assert mark is not None
        assert mark.done == ["0: add columns", "0: copy the queue", "0: drop a column"]
    migrate(database, migrations=MIGRATIONS)
    assert_is_migrated(database)


def test_steps_that_were_done_before_an_interruption_are_not_repeated(mariadb_url: str) -> None:
    engine = sa.create_engine(mariadb_url)
    database = Database("default", engine, "celery_outbox")
    make_old_table(engine, rows=25)
    migrate_until(database, COPY.name)
    seen: list[str] = []
    migrate(database, migrations=MIGRATIONS, progress=lambda step, *rest: seen.append(step))
    assert set(seen) == {COPY.name, DROP.name}
    assert_is_migrated(database)
    engine.dispose()


def migrate_until(database: Database, name: str) -> None:
    def interrupt(*given: Any) -> None:
        raise KeyboardInterrupt

    steps = [Step(name=name, run=interrupt) if step.name == name else step for step in STEPS]
    with pytest.raises(KeyboardInterrupt):
        migrate(database, migrations=[Migration(source=0, steps=steps)])


def test_two_migrations_at_once_do_the_work_once(engine: sa.Engine, database: Database) -> None:
    other = Database("other", engine, "celery_outbox")
    together = threading.Barrier(2)

    def run(which: Database) -> list[str]:
        together.wait(timeout=10)
        return migrate(which, migrations=MIGRATIONS)

    with ThreadPoolExecutor(2) as pool:
        done = sorted(pool.map(run, [database, other]))
    assert done == [[], ["migrated the table from version 0 to 1"]]
    assert_is_migrated(database)


def test_a_running_relay_refuses_a_migration(database: Database, engine: sa.Engine) -> None:
    database.run(
        lambda connection: database.state.see_relay(connection, "r", {"host": "web-1", "pid": 77})
    )
    before = described(engine)
    with pytest.raises(
        SchemaError,
        match=r"expected no running relay, found 1: web-1, process 77, seen \d s ago.*--force",
    ):
        migrate(database, migrations=MIGRATIONS)
    assert described(engine) == before
    migrate(database, migrations=MIGRATIONS, force=True)
    assert_is_migrated(database)


def test_a_relay_that_ended_or_was_killed_a_minute_ago_refuses_nothing(database: Database) -> None:
    t, clock = database.tables.state, database.dialect.clock()
    a_minute_ago = database.dialect.shifted(clock, sa.literal(-61.0))
    with database.begin() as connection:
        database.state.see_relay(connection, "killed", {"host": "web-1"})
        database.state.see_relay(connection, "ended", {"host": "web-1"})
        database.state.remove_relay(connection, "ended")
        connection.execute(sa.update(t).where(t.c.name == "relay:killed").values(seen_at=a_minute_ago))
    migrate(database, migrations=MIGRATIONS)
    assert_is_migrated(database)


def test_a_real_relay_refuses_a_migration_as_long_as_it_runs(database: Database) -> None:
    # As a relay of the old version would have written it.
    with database.begin() as connection:
        database.state.set_version(connection, 1)
    with Heartbeat([database]) as heartbeat:
        heartbeat.begin(database)
        with database.begin() as connection:
            database.state.set_version(connection, 0)
        with pytest.raises(SchemaError, match="expected no running relay, found 1"):
            migrate(database, migrations=MIGRATIONS)
    migrate(database, migrations=MIGRATIONS)
    assert_is_migrated(database)


def test_a_newer_table_is_refused(engine: sa.Engine) -> None:
    database = Database("default", engine, "celery_outbox")
    install(database)
    with database.begin() as connection:
        database.state.set_version(connection, 2)
    with pytest.raises(SchemaError, match=r"expected schema version 1, found 2.*--upgrade"):
        migrate(database)


def test_a_migration_that_a_newer_version_began_is_refused(engine: sa.Engine) -> None:
    database = Database("default", engine, "celery_outbox")
    install(database)
    with database.begin() as connection:
        database.state.mark(connection, MigrationMark(source=1, target=2))
    with pytest.raises(SchemaError, match=r"migration from 1 to 2.*celery-outbox that began it"):
        migrate(database)


def test_a_version_from_which_no_way_leads_here_is_refused(database: Database) -> None:
    with pytest.raises(SchemaError, match=r"found 0, which this celery-outbox does not know"):
        migrate(database, migrations=[])
    assert len(described(database_engine(database))["celery_outbox"]["columns"]) == 18


def database_engine(database: Database) -> sa.Engine:
    with database.begin() as connection:
        return connection.engine


def test_a_migration_whose_steps_forget_a_column_is_an_error_and_not_taken_for_done(
    database: Database,
) -> None:
    forgetful = [Migration(source=0, steps=[DROP])]
    with pytest.raises(SchemaError, match=r"'queue' of 'celery_outbox': expected .*, found none"):
        migrate(database, migrations=forgetful)
    assert database.read(database.state.version) == 0


def test_a_lease_and_the_attempts_of_a_message_survive_a_migration(
    engine: sa.Engine, database: Database
) -> None:
    with engine.begin() as connection:
        connection.execute(
            sa.text("UPDATE celery_outbox SET attempts = 3, error = 'no' WHERE task_id = 'old 7'")
        )
    migrate(database, migrations=MIGRATIONS)
    (row,) = [row for row in rows(database) if row.task_id == "old 7"]
    assert (row.attempts, row.error) == (3, "no")
    change(database, "old 7", attempts=0, error=None)
    assert_is_migrated(database)
