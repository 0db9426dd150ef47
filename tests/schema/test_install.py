"""Installing: again, by many at once; and what is said where it was not done."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from celery_outbox.errors import DatabaseError, SchemaError
from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
from tests.schema.described import described
from tests.storage.rows import add, claim, ids, make_message, rows

ROOT = Path(__file__).parents[2]
INSTALL = """
import multiprocessing
import sys
import sqlalchemy as sa
from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install

sa.create_engine(sys.argv[1])  # imports the driver, once for all
forking = multiprocessing.get_context("fork")
together = forking.Barrier(10)

def run():
    database = Database("default", sa.make_url(sys.argv[1]), "celery_outbox")
    together.wait(timeout=30)
    install(database)

processes = [forking.Process(target=run) for _ in range(10)]
for process in processes:
    process.start()
for process in processes:
    process.join()
sys.exit(any(process.exitcode for process in processes))
"""


def test_install_creates_both_tables_with_their_indexes(engine: sa.Engine) -> None:
    install(Database("default", engine, "celery_outbox"))
    made = described(engine)
    columns = {column[0] for column in made["celery_outbox"]["columns"]}
    assert columns >= {"id", "broker", "task_id", "message", "body", "scheduled_at"}
    assert made["celery_outbox"]["indexes"] == [
        ("ix_celery_outbox_claim", ["broker", "scheduled_at", "id"], False),
        ("ix_celery_outbox_task_id", ["task_id"], False),
    ]
    assert made["celery_outbox_state"]["key"] == ["name"]


def test_a_second_install_changes_nothing(engine: sa.Engine) -> None:
    database = Database("default", engine, "celery_outbox")
    install(database)
    add(database, make_message())
    before, stored = described(engine), rows(database)
    assert install(database) == []
    assert described(engine) == before
    assert rows(database) == stored


def test_a_second_install_sends_nothing_that_changes_a_table(engine: sa.Engine) -> None:
    database = Database("default", engine, "celery_outbox")
    install(database)
    sent: list[str] = []

    @sa.event.listens_for(engine, "before_cursor_execute")
    def note(connection: sa.Connection, cursor: object, statement: str, *rest: object) -> None:
        sent.append(statement.split()[0].upper())

    install(database)
    assert set(sent) <= {"SELECT", "SHOW", "PRAGMA", "BEGIN", "SET", "DESCRIBE"}


def test_ten_processes_may_install_at_once(database_url: str) -> None:
    install_ten_times_at_once(database_url)
    engine = sa.create_engine(database_url)
    with engine.connect() as connection:
        versions = connection.execute(sa.text("SELECT name, value FROM celery_outbox_state"))
        assert [tuple(row) for row in versions] == [("schema", "1")]
    engine.dispose()


def test_ten_processes_may_repair_at_once(engine: sa.Engine, database_url: str) -> None:
    install(Database("default", engine, "celery_outbox"))
    before = described(engine)
    on = " ON celery_outbox" if engine.dialect.name == "mysql" else ""
    with engine.begin() as connection:
        connection.execute(sa.text(f"DROP INDEX ix_celery_outbox_claim{on}"))
        connection.execute(sa.text("CREATE INDEX ix_celery_outbox_claim ON celery_outbox (broker)"))
        connection.execute(sa.text(f"DROP INDEX ix_celery_outbox_task_id{on}"))
    install_ten_times_at_once(database_url)
    assert described(engine) == before


def install_ten_times_at_once(url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INSTALL, url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("server", ["postgresql", "mariadb"])
def test_many_may_install_at_once_whatever_the_isolation_level_of_their_engine(
    server: str, level: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(f"{server}_url")
    engine = sa.create_engine(url, isolation_level=level, pool_size=4)
    together = threading.Barrier(4)

    def run() -> None:
        database = Database("default", engine, "celery_outbox")
        together.wait(timeout=10)
        install(database)

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(run) for _ in range(4)]
    assert [future.exception() for future in futures] == [None] * 4
    with engine.connect() as connection:
        assert connection.get_isolation_level() == level
    engine.dispose()


def test_the_lock_of_an_install_outlasts_what_it_protects(mariadb_url: str) -> None:
    engine, other = sa.create_engine(mariadb_url), sa.create_engine(mariadb_url)
    seen: list[int] = []

    @sa.event.listens_for(engine, "before_cursor_execute")
    def look(connection: sa.Connection, cursor: object, statement: str, *rest: object) -> None:
        if "release_lock" in statement.lower():
            with other.connect() as looking:
                count = sa.text("SELECT count(*) FROM celery_outbox_state")
                seen.append(looking.execute(count).scalar_one())

    install(Database("default", engine, "celery_outbox"))
    assert seen == [1]
    engine.dispose()
    other.dispose()


def test_a_missing_table_is_named_with_the_command_that_makes_it(engine: sa.Engine) -> None:
    database = Database("billing", engine, "celery_outbox")
    with pytest.raises(SchemaError) as caught:
        claim(database)
    text = str(caught.value)
    assert "'billing'" in text
    assert "'celery_outbox' and 'celery_outbox_state'" in text
    assert "celery-outbox -A your_app schema install" in text
    with pytest.raises(SchemaError, match="schema install"):
        add(database, make_message())


@pytest.mark.parametrize("server", ["postgresql", "mariadb"])
def test_an_unreachable_database_is_an_error_without_the_password(
    server: str, request: pytest.FixtureRequest
) -> None:
    url = sa.make_url(request.getfixturevalue(f"{server}_url"))
    engine = sa.create_engine(url.set(password="hunter2", port=1))
    database = Database("billing", engine, "celery_outbox")
    with pytest.raises(DatabaseError) as caught:
        claim(database)
    assert "'billing'" in str(caught.value)
    assert "hunter2" not in f"{caught.value} {database!r}"


def test_two_tables_of_one_database_are_apart(engine: sa.Engine) -> None:
    one = Database("one", engine, "outbox_one")
    two = Database("two", engine, "outbox_two")
    install(one)
    install(two)
    add(one, make_message("in one"))
    assert ids(claim(two)) == []
    assert ids(claim(one)) == ["in one"]
