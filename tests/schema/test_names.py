"""Names of tables: which are taken, how they are folded, and that what is derived from them differs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from celery import Celery

from celery_outbox import Outbox
from celery_outbox.errors import ConfigurationError, SchemaError
from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
from celery_outbox.storage.names import Names
from tests.schema.described import described
from tests.storage.rows import add, claim, ids, make_message

WORDS = ["order", "SELECT", "user", "table", "manual", "qualify"]


@pytest.mark.parametrize(
    "name",
    ["Celery_Outbox", "_x9", "t" * 58, "t" * 60, "t" * 63, *WORDS],
    ids=lambda name: f"{len(name)} characters" if len(name) > 50 else name,
)
def test_a_table_may_have_any_valid_name(engine: sa.Engine, name: str) -> None:
    database = Database("default", engine, name)
    install(database)
    assert install(database) == []
    add(database, make_message())
    assert ids(claim(database)) == ["id-1"]


def test_every_name_is_quoted(engine: sa.Engine) -> None:
    sent: list[str] = []

    @sa.event.listens_for(engine, "before_cursor_execute")
    def note(connection: sa.Connection, cursor: object, statement: str, *rest: object) -> None:
        sent.append(statement)

    database = Database("default", engine, "celery_outbox")
    install(database)
    add(database, make_message())
    claim(database)
    written = [
        each
        for each in sent
        if each.lstrip().upper().startswith(("CREATE", "INSERT", "UPDATE", "ALTER"))
    ]
    assert len(written) >= 5
    quote = "`" if engine.dialect.name == "mysql" else '"'
    for statement in written:
        assert f"{quote}celery_outbox" in statement
        assert " celery_outbox" not in statement


def test_postgresql_folds_the_name_as_it_folds_every_unquoted_one(postgresql_url: str) -> None:
    engine = sa.create_engine(postgresql_url)
    install(Database("default", engine, "Celery_OUTBOX"))
    add(Database("default", engine, "celery_outbox"), make_message())
    with engine.connect() as connection:
        query = sa.text("SELECT count(*) FROM Celery_OUTBOX")
        assert connection.execute(query).scalar() == 1
    engine.dispose()


def test_two_tables_whose_long_names_begin_alike_lie_in_one_database(engine: sa.Engine) -> None:
    one = Database("one", engine, "t" * 62 + "a")
    two = Database("two", engine, "t" * 62 + "b")
    install(one)
    install(two)
    add(one, make_message("in one"))
    assert (install(one), install(two)) == ([], [])
    assert ids(claim(two)) == []
    assert ids(claim(one)) == ["in one"]


@pytest.mark.parametrize("backend", ["postgresql", "mysql", "sqlite"])
@pytest.mark.parametrize("length", range(50, 64))
def test_names_of_any_length_stay_apart_and_within_the_limit(backend: str, length: int) -> None:
    names = [Names.of("t" * (length - 1) + last, backend) for last in "ab"]
    derived = [
        str(name)
        for each in names
        for name in (each.messages, each.state, each.claim_index, each.task_id_index)
    ]
    assert len(set(derived)) == 8
    assert max(map(len, derived)) <= 63


def test_a_name_that_sqlite_keeps_for_itself_is_refused(sqlite_url: str) -> None:
    app = Celery("shop", set_as_current=False)
    outbox = Outbox(app, databases={"default": sqlite_url}, table="SQLite_outbox")
    with pytest.raises(
        ConfigurationError, match=r"SQLite does not keep for itself, got 'SQLite_outbox'"
    ):
        outbox.install()


@pytest.fixture(params=["postgresql", "mariadb", "sqlite"])
def engine_with_schema(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[sa.Engine, str]]:
    """An engine, and a schema that is not the engine's own; on SQLite an attached database."""
    engine = sa.create_engine(request.getfixturevalue(f"{request.param}_url"))
    schema = "queue" if request.param == "sqlite" else f"{engine.url.database}_queue"
    if request.param == "sqlite":
        attach(engine, tmp_path / "queue.db", schema)
    else:
        with engine.begin() as connection:
            connection.execute(sa.text(f"CREATE SCHEMA {schema}"))
    yield engine, schema
    engine.dispose()


def attach(engine: sa.Engine, file: Path, schema: str) -> None:
    @sa.event.listens_for(engine, "connect")
    def attach_database(driver: sa.engine.interfaces.DBAPIConnection, record: object) -> None:
        driver.cursor().execute(f"ATTACH DATABASE '{file}' AS {schema}")


def test_a_table_may_lie_in_a_schema(engine_with_schema: tuple[sa.Engine, str]) -> None:
    engine, schema = engine_with_schema
    database = Database("default", engine, f"{schema}.celery_outbox")
    install(database)
    before = described(engine, schema=schema)
    assert install(database) == []
    assert described(engine, schema=schema) == before
    assert len(before["celery_outbox"]["indexes"]) == 2
    add(database, make_message())
    assert ids(claim(database)) == ["id-1"]
    inspector = sa.inspect(engine)
    assert inspector.has_table("celery_outbox", schema=schema)
    assert inspector.has_table("celery_outbox_state", schema=schema)
    assert not inspector.has_table("celery_outbox")


def test_an_index_of_a_table_in_a_schema_is_rebuilt(
    engine_with_schema: tuple[sa.Engine, str],
) -> None:
    engine, schema = engine_with_schema
    database = Database("default", engine, f"{schema}.celery_outbox")
    install(database)
    before = described(engine, schema=schema)
    index = next(each for each in database.tables.created[0].indexes if len(each.columns) > 1)
    with engine.begin() as connection:
        index.drop(connection)
        name, table = f"{schema}.{index.name}", "celery_outbox"
        if engine.dialect.name != "sqlite":
            name, table = str(index.name), f"{schema}.celery_outbox"
        connection.execute(sa.text(f"CREATE INDEX {name} ON {table} (broker)"))
    assert install(database) == [f"rebuilt the index {index.name}"]
    assert described(engine, schema=schema) == before


def test_a_schema_that_does_not_exist_is_named_with_what_to_do(postgresql_url: str) -> None:
    engine = sa.create_engine(postgresql_url)
    database = Database("default", engine, "no_such.celery_outbox")
    with pytest.raises(SchemaError, match=r"(?s)schema .no_such. does not exist.*Create it"):
        install(database)
    engine.dispose()
