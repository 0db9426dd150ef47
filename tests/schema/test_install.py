"""Installing: again, by many at once, under many names; and what is said where it was not done."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from celery_outbox.errors import DatabaseError, SchemaError
from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
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


def described(engine: sa.Engine, table: str, schema: str | None = None) -> tuple[object, object]:
    inspector = sa.inspect(engine)
    columns = {column["name"]: str(column["type"]) for column in inspector.get_columns(table, schema)}
    indexes = {index["name"]: index["column_names"] for index in inspector.get_indexes(table, schema)}
    return columns, indexes


def test_install_creates_both_tables_with_their_indexes(engine: sa.Engine) -> None:
    install(Database("default", engine, "celery_outbox"))
    columns, indexes = described(engine, "celery_outbox")
    assert set(columns) >= {"id", "broker", "task_id", "message", "body", "scheduled_at"}  # type: ignore[call-overload]
    assert indexes == {
        "ix_celery_outbox_claim": ["broker", "scheduled_at", "id"],
        "ix_celery_outbox_task_id": ["task_id"],
    }
    assert sa.inspect(engine).has_table("celery_outbox_state")


def test_a_second_install_changes_nothing(engine: sa.Engine) -> None:
    database = Database("default", engine, "celery_outbox")
    install(database)
    add(database, make_message())
    before, stored = described(engine, "celery_outbox"), rows(database)
    install(database)
    assert described(engine, "celery_outbox") == before
    assert rows(database) == stored


def test_a_missing_index_comes_back(engine: sa.Engine) -> None:
    database = Database("default", engine, "celery_outbox")
    install(database)
    before = described(engine, "celery_outbox")
    with engine.begin() as connection:
        next(iter(database.tables.created[0].indexes)).drop(connection)
    install(database)
    assert described(engine, "celery_outbox") == before


def test_columns_and_indexes_of_the_users_own_are_left_alone(engine: sa.Engine) -> None:
    database = Database("default", engine, "celery_outbox")
    install(database)
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE celery_outbox ADD COLUMN tenant VARCHAR(20)"))
        connection.execute(sa.text("CREATE INDEX ix_tenant ON celery_outbox (tenant)"))
    before = described(engine, "celery_outbox")
    install(database)
    add(database, make_message())
    assert described(engine, "celery_outbox") == before
    assert ids(claim(database)) == ["id-1"]


def test_ten_processes_may_install_at_once(database_url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INSTALL, database_url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    engine = sa.create_engine(database_url)
    with engine.connect() as connection:
        versions = connection.execute(sa.text("SELECT name, value FROM celery_outbox_state"))
        assert [tuple(row) for row in versions] == [("schema", "1")]
    engine.dispose()


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


def test_a_table_of_another_version_is_refused(engine: sa.Engine) -> None:
    database = Database("default", engine, "celery_outbox")
    install(database)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE celery_outbox_state SET value = '99'"))
    with pytest.raises(SchemaError, match=r"expected schema version 1, found 99, which a newer"):
        install(database)


def test_a_missing_table_is_named_with_the_command_that_makes_it(engine: sa.Engine) -> None:
    database = Database("billing", engine, "celery_outbox")
    with pytest.raises(SchemaError) as caught:
        claim(database)
    text = str(caught.value)
    assert "'billing'" in text
    assert "'celery_outbox'" in text
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


@pytest.mark.parametrize("name", ["Celery_Outbox", "ORDER", "order", "_x9", "t" * 50])
def test_a_table_may_have_any_valid_name(engine: sa.Engine, name: str) -> None:
    database = Database("default", engine, name)
    install(database)
    install(database)
    add(database, make_message())
    assert ids(claim(database)) == ["id-1"]


def test_postgresql_folds_the_name_as_it_folds_every_unquoted_one(postgresql_url: str) -> None:
    engine = sa.create_engine(postgresql_url)
    install(Database("default", engine, "Celery_OUTBOX"))
    add(Database("default", engine, "celery_outbox"), make_message())
    with engine.connect() as connection:
        query = sa.text("SELECT count(*) FROM Celery_OUTBOX")
        assert connection.execute(query).scalar() == 1
    engine.dispose()


@pytest.fixture(params=["postgresql", "mariadb"])
def engine_with_schema(request: pytest.FixtureRequest) -> Iterator[tuple[sa.Engine, str]]:
    """An engine, and a schema of its server that is not the engine's own."""
    url = request.getfixturevalue(f"{request.param}_url")
    engine = sa.create_engine(url)
    schema = f"{engine.url.database}_queue"
    with engine.begin() as connection:
        connection.execute(sa.text(f"CREATE SCHEMA {schema}"))
    yield engine, schema
    engine.dispose()


def test_a_table_may_lie_in_a_schema(engine_with_schema: tuple[sa.Engine, str]) -> None:
    engine, schema = engine_with_schema
    database = Database("default", engine, f"{schema}.celery_outbox")
    install(database)
    install(database)
    add(database, make_message())
    assert ids(claim(database)) == ["id-1"]
    inspector = sa.inspect(engine)
    assert inspector.has_table("celery_outbox", schema=schema)
    assert inspector.has_table("celery_outbox_state", schema=schema)
    assert not inspector.has_table("celery_outbox")


def test_two_tables_of_one_database_are_apart(engine: sa.Engine) -> None:
    one = Database("one", engine, "outbox_one")
    two = Database("two", engine, "outbox_two")
    install(one)
    install(two)
    add(one, make_message("in one"))
    assert ids(claim(two)) == []
    assert ids(claim(one)) == ["in one"]
