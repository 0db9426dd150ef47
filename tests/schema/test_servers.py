"""Servers that cannot do the work, or may not: each is an error that says what to do."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery

from celery_outbox import Outbox
from celery_outbox.errors import ConfigurationError, DatabaseError, OutboxError, SchemaError
from celery_outbox.storage.database import Database
from celery_outbox.storage.examination import examine
from celery_outbox.storage.install import install
from tests.relay.apps import relay_once, relaying, rows_of, send
from tests.relay.wire import task_ids
from tests.servers import DatabaseServer
from tests.storage.rows import add, claim, ids, make_message
from tests.waiting import wait_until

STATEMENT = {"init_command": "SET SESSION binlog_format = STATEMENT"}
BINLOG = r"expected binlog_format ROW or MIXED, found STATEMENT.*Set binlog_format=ROW"

OLD = {
    "postgresql": ((11, 22), r"expected PostgreSQL 12 or later, found 11\.22\. Upgrade"),
    "mariadb": ((10, 5, 23), r"expected MariaDB 10\.6 or later, found 10\.5\.23\. Upgrade"),
    "sqlite": ((3, 34, 1), r"expected SQLite 3\.35 or later, found 3\.34\.1\. Upgrade"),
}


def database(engine: sa.Engine, name: str = "default") -> Database:
    return Database(name, engine, "celery_outbox")


@pytest.fixture
def make_engine() -> Iterator[Any]:
    """Make engines that are disposed of when the test ends."""
    made: list[sa.Engine] = []

    def make(url: str | sa.URL, **options: Any) -> sa.Engine:
        made.append(sa.create_engine(url, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.dispose()


def pretend(engine: sa.Engine, version: tuple[int, ...]) -> None:
    """Let SQLAlchemy believe that the server is of another version than it is."""
    with engine.connect():
        engine.dialect.server_version_info = version


@pytest.mark.parametrize("server", OLD)
def test_a_server_that_is_too_old_is_refused(
    server: str, request: pytest.FixtureRequest, make_engine: Any
) -> None:
    version, expected = OLD[server]
    engine = make_engine(request.getfixturevalue(f"{server}_url"))
    pretend(engine, version)
    old = database(engine, "billing")
    for work in (lambda: install(old), lambda: claim(old), lambda: add(old, make_message())):
        with pytest.raises(ConfigurationError, match=rf"^database 'billing': {expected}"):
            work()
    assert not sa.inspect(engine).has_table("celery_outbox")


def test_mysql_is_held_to_a_version_of_its_own(mariadb_url: str, make_engine: Any) -> None:
    engine = make_engine(mariadb_url)
    with engine.connect():
        engine.dialect.is_mariadb = False
        engine.dialect.server_version_info = (5, 7, 44)
    with pytest.raises(ConfigurationError, match=r"expected MySQL 8\.0 or later, found 5\.7\.44"):
        install(database(engine))


def test_a_server_is_looked_at_again_until_it_is_right(postgresql_url: str, make_engine: Any) -> None:
    engine = make_engine(postgresql_url)
    pretend(engine, (11,))
    upgraded = database(engine)
    with pytest.raises(ConfigurationError):
        install(upgraded)
    pretend(engine, (12, 1))
    install(upgraded)
    add(upgraded, make_message())
    assert ids(claim(upgraded)) == ["id-1"]


def test_a_binary_log_of_statements_is_detected_before_anything_fails(
    mariadb_url: str, make_engine: Any
) -> None:
    engine = make_engine(mariadb_url, connect_args=STATEMENT)
    sent: list[str] = []

    @sa.event.listens_for(engine, "before_cursor_execute")
    def note(connection: sa.Connection, cursor: object, statement: str, *rest: object) -> None:
        sent.append(statement.split()[0])

    for work in (install, claim, lambda each: add(each, make_message())):
        with pytest.raises(ConfigurationError, match=BINLOG):
            work(database(engine))
    assert not {"CREATE", "UPDATE", "INSERT"} & set(sent)


@pytest.mark.parametrize("good", ["ROW", "MIXED"])
def test_the_other_formats_of_the_binary_log_are_fine(
    good: str, mariadb_url: str, make_engine: Any
) -> None:
    command = {"init_command": f"SET SESSION binlog_format = {good}"}
    fine = database(make_engine(mariadb_url, connect_args=command))
    install(fine)
    add(fine, make_message())
    assert ids(claim(fine)) == ["id-1"]


def test_a_binary_log_that_changes_later_is_named_too(mariadb_url: str, make_engine: Any) -> None:
    engine = make_engine(mariadb_url)
    changed = database(engine)
    install(changed)

    @sa.event.listens_for(engine, "checkout")
    def change(driver: Any, record: object, proxy: object) -> None:
        driver.cursor().execute("SET SESSION binlog_format = STATEMENT")

    with pytest.raises(ConfigurationError, match=BINLOG):
        add(changed, make_message())


def test_a_relay_names_the_setting_once_and_empties_its_other_databases(
    mariadb_url: str,
    sqlite_url: str,
    redis_url: str,
    make_engine: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = make_engine(mariadb_url, connect_args=STATEMENT)
    good = make_engine(sqlite_url)
    install(database(good))
    app = Celery("shop", broker=redis_url, set_as_current=False)
    outbox = Outbox(app, databases={"broken": broken, "good": good})
    asked: list[str] = []

    @sa.event.listens_for(broken, "before_cursor_execute")
    def note(connection: sa.Connection, cursor: object, statement: str, *rest: object) -> None:
        asked.append(statement)

    with caplog.at_level(logging.INFO, "celery_outbox"), relaying(outbox):
        first = send(outbox, outbox_database="good")
        wait_until(lambda: task_ids(redis_url) == [first], message="the first delivery")
        second = send(outbox, outbox_database="good")
        wait_until(lambda: len(task_ids(redis_url)) == 2, message="the second delivery")
        wait_until(lambda: len(asked) >= 9, message="the third try")
    assert sorted(task_ids(redis_url)) == sorted([first, second])
    said = [record.getMessage() for record in caplog.records if "'broken'" in record.getMessage()]
    assert len(said) == 1
    assert "binlog_format" in said[0]
    app.close()


def test_a_relay_that_meets_an_older_table_leaves_it_alone_and_says_so(
    sqlite_url: str, redis_url: str, make_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(sqlite_url)
    app = Celery("shop", broker=redis_url, set_as_current=False)
    outbox = Outbox(app, databases={"default": engine})
    outbox.install()
    stored = send(outbox)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE celery_outbox_state SET value = '0'"))
    relay_once(outbox)
    assert task_ids(redis_url) == []
    assert [(row.task_id, row.attempts) for row in rows_of(database(engine))] == [(stored, 0)]
    assert "expected schema version 1, found 0" in caplog.text
    assert "schema migrate" in caplog.text
    app.close()


def test_columns_that_are_not_there_are_named_with_what_to_do(engine: sa.Engine) -> None:
    old = database(engine)
    install(old)
    statement = "ALTER TABLE celery_outbox RENAME COLUMN queue TO channel"
    if engine.dialect.name == "mysql":
        statement = "ALTER TABLE celery_outbox RENAME COLUMN `queue` TO channel"
    with engine.begin() as connection:
        connection.execute(sa.text(statement))
    with pytest.raises(SchemaError, match=r"queue.*schema check` says what differs.*schema migrate`"):
        claim_with_a_message_that_is_there(old)


def claim_with_a_message_that_is_there(old: Database) -> None:
    with old.begin() as connection:
        old.store.add(connection, [make_message()])


@pytest.fixture
def readers(request: pytest.FixtureRequest) -> sa.URL:
    """A URL of an installed database, for a user who may only read it."""
    url: sa.URL = request.getfixturevalue(f"{request.param}_readers")
    return url


@pytest.fixture
def postgresql_readers(postgresql_url: str, make_engine: Any) -> sa.URL:
    engine: sa.Engine = make_engine(postgresql_url)
    install(database(engine))
    add(database(engine), make_message())
    role = f"reader_{engine.url.database}"
    with engine.begin() as connection:
        connection.execute(sa.text(f"CREATE ROLE {role} LOGIN"))
        for table in ("celery_outbox", "celery_outbox_state"):
            connection.execute(sa.text(f"GRANT SELECT ON {table} TO {role}"))
    return engine.url.set(username=role)


@pytest.fixture
def mariadb_readers(mariadb: DatabaseServer, mariadb_url: str, make_engine: Any) -> sa.URL:
    engine: sa.Engine = make_engine(mariadb_url)
    install(database(engine))
    add(database(engine), make_message())
    return engine.url.set(username=mariadb_user(mariadb, engine, "SELECT", make_engine))


def mariadb_user(server: DatabaseServer, engine: sa.Engine, rights: str, make_engine: Any) -> str:
    """Make a user with some rights in the engine's database; only root may give any."""
    socket = server.processes[0].log.parent / "socket"
    root = make_engine(f"mysql+pymysql://root@localhost/mysql?unix_socket={socket}")
    name = engine.url.database
    with root.begin() as connection:
        connection.execute(sa.text(f"CREATE USER 'u_{name}'@'%' IDENTIFIED BY 'secret'"))
        connection.execute(sa.text(f"GRANT {rights} ON {name}.* TO 'u_{name}'@'%'"))
    return f"u_{name}"


@pytest.mark.parametrize("readers", ["postgresql", "mariadb"], indirect=True)
def test_a_missing_right_is_named_with_those_that_are_needed(readers: sa.URL, make_engine: Any) -> None:
    reader = database(make_engine(readers))
    for work in (claim, lambda each: add(each, make_message())):
        with pytest.raises(DatabaseError, match=r"a right is missing.*SELECT, INSERT, UPDATE"):
            work(reader)


@pytest.mark.parametrize("readers", ["postgresql", "mariadb"], indirect=True)
def test_who_may_not_create_a_table_is_told_what_is_needed(readers: sa.URL, make_engine: Any) -> None:
    other = Database("default", make_engine(readers), "another_outbox")
    with pytest.raises(DatabaseError, match=r"a right is missing.*to install and to migrate"):
        install(other)


@pytest.mark.parametrize("readers", ["postgresql", "mariadb"], indirect=True)
def test_who_may_only_read_finds_nothing_to_install(readers: sa.URL, make_engine: Any) -> None:
    assert install(database(make_engine(readers))) == []


@pytest.mark.parametrize("readers", ["postgresql", "mariadb"], indirect=True)
def test_a_check_says_what_its_user_may_not_look_at(readers: sa.URL, make_engine: Any) -> None:
    found = examine(database(make_engine(readers)))
    assert found.faults == []
    assert "may not look" in dict(found.facts)["oldest transaction"]


READ_ONLY = r"expected a database that can be written, found it read-only.*primary server"


def test_a_read_only_postgresql_is_named(postgresql_url: str, make_engine: Any) -> None:
    install(database(make_engine(postgresql_url)))
    options = {"options": "-c default_transaction_read_only=on"}
    replica = database(make_engine(postgresql_url, connect_args=options))
    assert_is_named_as_read_only(replica)
    assert "default_transaction_read_only" in examine(replica).faults[0]


def test_a_read_only_sqlite_file_is_named(sqlite_url: str, make_engine: Any) -> None:
    install(database(make_engine(sqlite_url)))
    path = sa.make_url(sqlite_url).database
    replica = database(make_engine(f"sqlite:///file:{path}?mode=ro&uri=true"))
    assert_is_named_as_read_only(replica)


def test_a_read_only_mariadb_is_named(
    mariadb: DatabaseServer, mariadb_url: str, make_engine: Any
) -> None:
    engine = make_engine(mariadb_url)
    install(database(engine))
    user = mariadb_user(mariadb, engine, "ALL", make_engine)
    replica = database(make_engine(engine.url.set(username=user)))
    with engine.begin() as connection:
        connection.execute(sa.text("SET GLOBAL read_only = ON"))
    try:
        assert_is_named_as_read_only(replica)
        assert "read_only" in examine(replica).faults[0]
    finally:
        with engine.begin() as connection:
            connection.execute(sa.text("SET GLOBAL read_only = OFF"))


def assert_is_named_as_read_only(replica: Database) -> None:
    with pytest.raises(DatabaseError, match=READ_ONLY):
        add(replica, make_message())
    assert install(replica) == []
    missing = Database("default", replica_engine(replica), "another_outbox")
    with pytest.raises(OutboxError, match=READ_ONLY):
        install(missing)


def replica_engine(replica: Database) -> sa.Engine:
    return replica.read(lambda connection: connection.engine)


def test_a_directory_that_does_not_exist_is_an_error_of_the_database(
    tmp_path: Path, make_engine: Any
) -> None:
    missing = database(make_engine(f"sqlite:///{tmp_path / 'no' / 'such.db'}"))
    with pytest.raises(DatabaseError, match="unable to open database file"):
        install(missing)
