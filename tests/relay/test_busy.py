"""Others in the way: tried again a few times, and then the database is left alone for now."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import kombu.pools
import pytest
import sqlalchemy as sa
from celery import Celery

from celery_outbox import Outbox
from celery_outbox.errors import DatabaseError
from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
from tests.relay.apps import make_outbox, relay_once, relaying, rows, rows_of
from tests.relay.wire import task_ids
from tests.storage.rows import add, claim, make_message
from tests.waiting import wait_until

#: Connections that hardly wait for a lock.
IMPATIENT: dict[str, dict[str, Any]] = {
    "postgresql": {"options": "-c lock_timeout=100"},
    "mysql": {"init_command": "SET innodb_lock_wait_timeout = 1"},
    "sqlite": {"timeout": 0},
}


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    """The outbox's engine."""
    backend = sa.make_url(database_url).get_backend_name()
    engine = sa.create_engine(database_url, connect_args=IMPATIENT[backend])
    yield engine
    engine.dispose()


@pytest.fixture
def application(database_url: str) -> Iterator[sa.Connection]:
    """A connection that may lock what the outbox needs."""
    engine = sa.create_engine(database_url)
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def lock(connection: sa.Connection, *row_ids: int) -> None:
    """Lock rows; on SQLite, everything."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    else:
        chosen = ", ".join(map(str, row_ids))
        query = f"SELECT id FROM celery_outbox WHERE id IN ({chosen}) FOR UPDATE"
        connection.execute(sa.text(query)).all()


def installed(engine: sa.Engine) -> Database:
    database = Database("default", engine, "celery_outbox")
    install(database)
    return database


def failures_of(engine: sa.Engine, then: Callable[[], object]) -> list[str]:
    """Collect the errors of statements; do something after each."""
    errors: list[str] = []

    @sa.event.listens_for(engine, "handle_error")
    def note(context: Any) -> None:
        errors.append(str(context.original_exception))
        then()

    return errors


def test_a_lock_that_is_let_go_of_is_overcome(engine: sa.Engine, application: sa.Connection) -> None:
    database = installed(engine)
    add(database, make_message("a"), make_message("b"))
    made = claim(database)
    numbers = [message.id for message in made.messages]
    lock(application, *numbers)
    errors = failures_of(engine, application.rollback)
    accepting = partial(database.store.accept, token=made.token, ids=numbers, keep=False)
    assert database.run(accepting) == 2
    assert len(errors) == 1


def test_a_lock_that_stays_is_an_error_after_a_few_tries(
    engine: sa.Engine, application: sa.Connection
) -> None:
    database = installed(engine)
    add(database, make_message("a"))
    made = claim(database)
    (message,) = made.messages
    lock(application, message.id)
    errors = failures_of(engine, lambda: None)
    with pytest.raises(DatabaseError, match=r"'default': others were in the way for too long"):
        database.run(partial(database.store.accept, token=made.token, ids=[message.id], keep=False))
    assert len(errors) == 4


WAITING = {
    "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'",
    "mysql": "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
}


def wait_for_waiters(engine: sa.Engine, count: int) -> None:
    """Wait until so many transactions wait for locks."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        query = sa.text(WAITING[engine.dialect.name])
        # InnoDB says what it said before to whoever asks more often.
        wait_until(lambda: connection.execute(query).scalar() == count, interval=0.15)


@pytest.mark.parametrize("server", ["postgresql", "mariadb"])
def test_a_deadlock_is_tried_again(server: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(f"{server}_url")
    # On PostgreSQL the one gives up that looks for deadlocks while there is one.
    early, late = ({"options": f"-c deadlock_timeout={each}"} for each in ("50ms", "1min"))
    engine, others = (
        sa.create_engine(url, connect_args=each if server == "postgresql" else {})
        for each in (early, late)
    )
    database = installed(engine)
    add(database, *(make_message(f"{number}") for number in range(50)))
    made = claim(database, 3)
    numbers = [message.id for message in made.messages]
    errors = failures_of(engine, lambda: None)
    settle = partial(database.store.accept, token=made.token, ids=numbers, keep=False)
    with others.connect() as one, others.connect() as other, ThreadPoolExecutor(2) as pool:
        lock(one, numbers[1])
        lock(other, numbers[2])
        # InnoDB gives up the transaction that has changed less.
        other.execute(sa.text(f"UPDATE celery_outbox SET attempts = 1 WHERE id > {numbers[2]}"))
        settling = pool.submit(database.run, settle)
        wait_for_waiters(others, 1)
        locking = pool.submit(lock, other, numbers[0])
        wait_for_waiters(others, 2)
        one.rollback()
        locking.result(timeout=20)
        other.rollback()
        assert settling.result(timeout=20) == 3
    assert len(errors) == 1
    assert "eadlock" in errors[0]
    others.dispose()
    engine.dispose()


@pytest.fixture
def outbox(engine: sa.Engine, redis_url: str) -> Iterator[Outbox]:
    made = make_outbox(redis_url, engine)
    yield made
    made.app.close()
    kombu.pools.reset()


def test_a_relay_whose_settling_is_held_up_says_so_and_settles_later(
    outbox: Outbox,
    engine: sa.Engine,
    application: sa.Connection,
    redis_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    database = outbox.databases["default"]
    add(database, make_message("held"))
    (row,) = rows(outbox)

    @sa.event.listens_for(engine, "before_cursor_execute")
    def hold(connection: sa.Connection, cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("DELETE") and not application.in_transaction():
            if engine.dialect.name == "sqlite":
                connection.connection.rollback()  # there, only one can hold anything
            lock(application, row.id)

    with relaying(outbox):
        wait_until(lambda: "others were in the way" in caplog.text, message="the trouble in the log")
        application.rollback()
        sa.event.remove(engine, "before_cursor_execute", hold)
        add(database, make_message("next"))
        wait_until(lambda: "next" in task_ids(redis_url), message="the next delivery")
        wait_until(lambda: not rows(outbox), message="both settlements")
    assert task_ids(redis_url) == ["held", "next"]
    assert caplog.text.count("cannot be used, trying again") == 1
    assert "can be used again" in caplog.text


def test_a_busy_database_holds_up_no_other(
    tmp_path: Path, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    app = Celery("shop", broker=redis_url, set_as_current=False)
    engines = {
        name: sa.create_engine(f"sqlite:///{tmp_path / name}.db", connect_args={"timeout": seconds})
        for name, seconds in (("busy", 0), ("free", 30))
    }
    outbox = Outbox(app, databases=engines)
    outbox.install()
    add(outbox.databases["busy"], make_message("late"))
    blocker = sa.create_engine(engines["busy"].url)
    with blocker.connect() as connection:
        lock(connection)
        with relaying(outbox):
            for number in range(3):
                add(outbox.databases["free"], make_message(f"{number}"))
                wait_until(lambda: not rows_of(outbox.databases["free"]), message="a delivery")
            assert len(task_ids(redis_url)) == 3
            wait_until(lambda: "'busy' cannot be used" in caplog.text, message="the outage")
            connection.rollback()
            wait_until(lambda: "late" in task_ids(redis_url), message="the late delivery")
    assert caplog.text.count("The database 'busy' cannot be used, trying again") == 1
    assert "The database 'busy' can be used again" in caplog.text
    relay_once(outbox)
    assert len(task_ids(redis_url)) == 4
    app.close()
    kombu.pools.reset()
    for engine in (*engines.values(), blocker):
        engine.dispose()
