"""What relays and operators lock: the rows that they change, and nothing of the application's."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import sqlalchemy as sa

from celery_outbox.storage.database import Database
from celery_outbox.storage.desk import Desk
from celery_outbox.storage.install import install
from celery_outbox.storage.store import Claim
from tests.benchmarks.filling import Pattern, fill
from tests.storage.rows import BROKER, HOUR, LEASE, add, change, claim, ids, make_message
from tests.storage.test_settle import SETTLES
from tests.waiting import wait_until

PATIENCE = {
    "postgresql": {"options": "-c lock_timeout=500"},
    "mysql": {"init_command": "SET innodb_lock_wait_timeout = 1"},
}


@pytest.fixture(params=["postgresql", "mariadb"])
def impatient(request: pytest.FixtureRequest) -> Iterator[Database]:
    """An installed database, whose connections hardly wait for a lock."""
    url = sa.make_url(request.getfixturevalue(f"{request.param}_url"))
    engine = sa.create_engine(url, connect_args=PATIENCE[url.get_backend_name()])
    database = Database("default", engine, "celery_outbox")
    install(database)
    yield database
    engine.dispose()


@pytest.fixture
def application(impatient: Database) -> Iterator[sa.Connection]:
    """A connection of the application's, on an engine of its own."""
    engine = sa.create_engine(impatient.url)
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def settle_all(made: Claim, how: str, database: Database, connection: sa.Connection) -> int:
    """Settle a whole batch in one way."""
    numbers = [message.id for message in made.messages]
    if how in {"accept", "keep"}:
        store = database.store
        return store.accept(connection, made.token, numbers, keep=how == "keep")
    if how in {"defer", "release"}:
        settle = getattr(database.store, how)
        return int(settle(connection, made.token, numbers))
    return sum(SETTLES[how](database, connection, made.token, number) for number in numbers)


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("how", SETTLES)
def test_what_the_application_has_not_committed_holds_up_no_relay(
    how: str, count: int, impatient: Database, application: sa.Connection
) -> None:
    impatient.store.add(application, [make_message("uncommitted")])
    add(impatient, *(make_message(f"{number}") for number in range(count)))
    impatient.store.add(application, [make_message("uncommitted too")])
    made = claim(impatient)
    assert len(made.messages) == count
    assert impatient.run(partial(settle_all, made, how, impatient)) == count
    application.rollback()


@pytest.mark.parametrize("how", SETTLES)
def test_two_relays_that_settle_at_once_do_not_wait_for_each_other(
    how: str, impatient: Database
) -> None:
    add(impatient, *(make_message(f"{number}") for number in range(20)))
    first, second = claim(impatient, 10), claim(impatient, 10)
    with impatient.begin() as connection:
        assert settle_all(first, how, impatient, connection) == 10
        assert impatient.run(partial(settle_all, second, how, impatient)) == 10


@pytest.mark.parametrize("what", ["revive", "prune", "forget"])
def test_what_an_operator_does_waits_for_no_insert_either(
    what: str, impatient: Database, application: sa.Connection
) -> None:
    impatient.store.add(application, [make_message("uncommitted")])
    add(impatient, *(make_message(f"{number}") for number in range(5)))
    change(impatient, attempts=1)
    desk = Desk(impatient)
    numbers = [message.id for message in impatient.read(partial(desk.messages, limit=9))]
    work: dict[str, Callable[[sa.Connection], int]] = {
        "revive": partial(desk.revive, ids=numbers),
        "prune": partial(desk.prune, ids=numbers, state="delivered", older_than=HOUR),
        "forget": partial(desk.forget, ids=numbers),
    }
    assert impatient.run(work[what]) == {"revive": 5, "prune": 0, "forget": 5}[what]
    application.rollback()


@pytest.mark.parametrize("others", [0, 5000])
def test_a_claim_locks_exactly_the_rows_that_it_takes(others: int, mariadb_url: str) -> None:
    engine = sa.create_engine(mariadb_url)
    database = Database("default", engine, "celery_outbox")
    install(database)
    fill(database, Pattern(broker=BROKER, message="x", body=b"x"), delayed=others, finished=others)
    add(database, *(make_message(f"{number:03}") for number in range(250)))
    with engine.begin() as connection:
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        made = database.store.claim(connection, broker=BROKER, limit=100, lease=LEASE)
        assert ids(made) == [f"{number:03}" for number in range(100)]
        assert locked_rows(database) == 100
        assert ids(claim(database)) == [f"{number:03}" for number in range(100, 200)]
    engine.dispose()


def test_a_claim_that_finds_nothing_locks_nothing(mariadb_url: str) -> None:
    engine = sa.create_engine(mariadb_url)
    database = Database("default", engine, "celery_outbox")
    install(database)
    fill(database, Pattern(broker=BROKER, message="x", body=b"x"), delayed=5000)
    with engine.begin() as connection:
        made = database.store.claim(connection, broker=BROKER, limit=100, lease=LEASE)
        assert made.messages == []
        assert locked_rows(database) == 0
    engine.dispose()


def locked_rows(database: Database) -> int:
    """The rows that InnoDB says to be locked by all transactions of the database's server."""
    # It says what it said before to whoever asks twice within a tenth of a second.
    query = sa.text("SELECT sum(trx_rows_locked) AS locked FROM information_schema.innodb_trx")
    with database.begin() as connection:
        return int(wait_until(lambda: connection.execute(query).all(), interval=0.15)[0].locked or 0)
