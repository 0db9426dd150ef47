"""The DDL that is printed for a DBA: offline, and what an install would have made."""

import re
import sqlite3
import subprocess
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from celery_outbox.cli import main
from celery_outbox.storage.database import Database
from celery_outbox.storage.ddl import create_statements
from celery_outbox.storage.install import install
from tests.relay.commands import PROJECT, environment, outbox_command, run
from tests.schema.described import described
from tests.storage.rows import add, claim, ids, make_message

BROKER = "redis://localhost:1/0"
#: Databases that nobody could connect to.
NOWHERE = {
    "postgresql": "postgresql+psycopg://nobody@localhost:1/none",
    "mysql": "mysql+pymysql://nobody@localhost:1/none",
    "mariadb": "mariadb+pymysql://nobody@localhost:1/none",
    "sqlite": "sqlite:////no/such/directory/none.db",
}


def printed(*arguments: str, database: str = NOWHERE["sqlite"], table: str = "celery_outbox") -> str:
    env = environment(broker=BROKER, database=database, settings={"table": table})
    done = run(outbox_command("schema", "sql", *arguments), env)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def script(dialect: str, table: str = "celery_outbox") -> str:
    """What the command prints for a dialect, without a process for it."""
    return "".join(f"{statement};\n\n" for statement in create_statements(table, dialect))


def test_the_command_prints_each_statement_with_a_semicolon() -> None:
    assert printed("--dialect", "postgresql") == script("postgresql")


@pytest.mark.parametrize("table", ["celery_outbox", "order", "t" * 63], ids=lambda name: name[:13])
def test_an_install_finds_nothing_to_change_in_what_the_statements_make(
    table: str, engine: sa.Engine
) -> None:
    dialect = engine.dialect.name
    with engine.begin() as connection:
        for statement in create_statements(table, dialect):
            connection.exec_driver_sql(statement)
    database = Database("default", engine, table)
    assert database.read(database.state.version) == 1
    assert install(database) == []
    add(database, make_message())
    assert ids(claim(database)) == ["id-1"]


def test_the_statements_make_what_an_install_makes(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        for statement in create_statements("celery_outbox", engine.dialect.name):
            connection.exec_driver_sql(statement)
    made = described(engine)
    database = Database("default", engine, "celery_outbox")
    database.tables.metadata.drop_all(engine)
    install(database)
    assert described(engine) == made


def test_the_text_as_a_whole_is_a_script_for_sqlite(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "made.db") as connection:
        connection.executescript(script("sqlite"))
    connection.close()
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'made.db'}")
    assert install(Database("default", engine, "celery_outbox")) == []
    engine.dispose()


def test_the_text_as_a_whole_is_a_script_for_psql(postgresql_url: str) -> None:
    url = sa.make_url(postgresql_url).set(drivername="postgresql")
    subprocess.run(
        ["psql", "-v", "ON_ERROR_STOP=1", "-q", url.render_as_string(hide_password=False)],
        input=script("postgresql"),
        text=True,
        check=True,
        timeout=30,
    )
    engine = sa.create_engine(postgresql_url)
    assert install(Database("default", engine, "celery_outbox")) == []
    engine.dispose()


def test_the_text_as_a_whole_is_a_script_for_mariadb(mariadb_url: str) -> None:
    url = sa.make_url(mariadb_url)
    subprocess.run(
        ["mariadb", f"-h{url.host}", f"-P{url.port}", "-uoutbox", "-psecret", str(url.database)],
        input=script("mariadb"),
        text=True,
        check=True,
        timeout=30,
    )
    engine = sa.create_engine(mariadb_url)
    assert install(Database("default", engine, "celery_outbox")) == []
    engine.dispose()


@pytest.mark.parametrize("dialect", NOWHERE)
def test_the_statements_are_printed_without_any_connection(dialect: str) -> None:
    # Without --dialect it is the database's own; nobody could connect to this one.
    text = printed(database=NOWHERE[dialect])
    assert text == script(dialect)
    assert len(re.findall(r"^CREATE TABLE ", text, flags=re.MULTILINE)) == 2
    assert len(re.findall(r"^CREATE INDEX ", text, flags=re.MULTILINE)) == 2


@pytest.mark.parametrize("dialect", NOWHERE)
def test_the_names_are_folded_and_quoted_as_the_database_wants_them(dialect: str) -> None:
    text = script(dialect, "Queue.Outbox")
    quote = "`" if dialect in {"mysql", "mariadb"} else '"'
    schema, table = ("queue", "outbox") if dialect == "postgresql" else ("Queue", "Outbox")
    assert f"CREATE TABLE {quote}{schema}{quote}.{quote}{table}{quote} (" in text
    assert f"{quote}ix_{table}_claim{quote}" in text


def test_the_names_are_those_of_the_settings() -> None:
    assert printed(table="Queue.Outbox") == script("sqlite", "Queue.Outbox")


def test_engine_character_set_and_storage_parameters_are_asked_for() -> None:
    for dialect in ("mysql", "mariadb"):
        text = script(dialect)
        assert text.count("ENGINE=InnoDB") == 2
        assert text.count("CHARSET=utf8mb4") == 2
    text = script("postgresql")
    assert "fillfactor = 50" in text
    assert "autovacuum_vacuum_scale_factor" in text
    assert "SET STORAGE EXTERNAL" in text


def test_an_unknown_dialect_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in environment(broker=BROKER, database=NOWHERE["sqlite"]).items():
        monkeypatch.setenv(key, value)
    done = CliRunner().invoke(main, ["-A", PROJECT, "schema", "sql", "--dialect", "oracle"])
    assert done.exit_code == 2
    assert "oracle" in done.output
