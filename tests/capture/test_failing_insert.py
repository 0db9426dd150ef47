"""When the outbox cannot be written, the caller's commit fails and leaves nothing half done."""

from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from celery_outbox.errors import SchemaError
from tests.capture.shop import FurnishedEngine, Listen, OpenShop, Order, Shop, insert_order


@pytest.fixture
def open_narrow(furnished_engine: FurnishedEngine, open_shop: OpenShop) -> Iterator[OpenShop]:
    """Open a shop whose only connection everybody gets in turn; its table is repaired in the end."""
    opened: list[Shop] = []

    def open_(kind: str) -> Shop:
        engine = furnished_engine(kind, pool_size=1, max_overflow=0)
        opened.append(open_shop({"default": engine}))
        return opened[-1]

    yield open_
    for shop in opened:
        repair(shop)


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def narrow_shop(request: pytest.FixtureRequest, open_narrow: OpenShop) -> Shop:
    return open_narrow(request.param)


def drop_table(shop: Shop) -> None:
    in_between(shop, "DROP TABLE celery_outbox")


def refuse_rows(shop: Shop) -> None:
    refuse = {
        "sqlite": "CREATE TRIGGER full BEFORE INSERT ON celery_outbox "
        "BEGIN SELECT RAISE(ABORT, 'refused'); END",
    }.get(shop.engine.name, "ALTER TABLE celery_outbox ADD CONSTRAINT full CHECK (attempts > 0)")
    in_between(shop, refuse.replace("full", "refused"))


def repair(shop: Shop) -> None:
    in_between(shop, "DROP TABLE IF EXISTS celery_outbox")
    shop.outbox.install()


def in_between(shop: Shop, statement: str) -> None:
    witness = sa.create_engine(shop.engine.url, poolclass=sa.NullPool)
    patience = {"postgresql": "SET lock_timeout = '5s'", "mysql": "SET lock_wait_timeout = 5"}
    with witness.begin() as connection:
        if shop.engine.name in patience:
            connection.execute(sa.text(patience[shop.engine.name]))
        connection.execute(sa.text(statement))


BREAKS = [(drop_table, SchemaError), (refuse_rows, DBAPIError)]
every_break = pytest.mark.parametrize(
    ("break_table", "error"), BREAKS, ids=["missing-table", "refused-row"]
)
BreakTable = Callable[[Shop], None]


@every_break
@pytest.mark.parametrize("cleanup", ["rollback", "close"])
def test_the_commit_of_a_session_fails_whole(
    narrow_shop: Shop, break_table: BreakTable, error: type[Exception], cleanup: str
) -> None:
    with Session(narrow_shop.engine) as session:
        session.begin()
        narrow_shop.send("lost")
        break_table(narrow_shop)
        session.add(Order(id=1))
        with pytest.raises(error, match="celery_outbox"):
            session.commit()
        getattr(session, cleanup)()
        repair(narrow_shop)
        narrow_shop.order_and_send(session, 2)
        session.commit()
    assert (narrow_shop.orders, narrow_shop.tasks) == ([2], ["2"])


@every_break
def test_the_connection_of_a_failed_commit_carries_no_old_work(
    narrow_shop: Shop, break_table: BreakTable, error: type[Exception]
) -> None:
    with Session(narrow_shop.engine) as session:
        session.begin()
        narrow_shop.send("lost")
        break_table(narrow_shop)
        insert_order(session, 1)
        with pytest.raises(error):
            session.commit()
    with narrow_shop.engine.begin() as connection:
        insert_order(connection, 2)
    assert narrow_shop.orders == [2]


@every_break
def test_a_session_that_commits_its_connection_by_hand_fails_whole(
    narrow_shop: Shop, break_table: BreakTable, error: type[Exception]
) -> None:
    with Session(narrow_shop.engine) as session:
        session.begin()
        narrow_shop.send("lost")
        break_table(narrow_shop)
        insert_order(session, 1)
        with pytest.raises(error):
            session.connection().commit()
    with narrow_shop.engine.begin() as connection:
        insert_order(connection, 2)
    assert narrow_shop.orders == [2]


@every_break
def test_a_dispatch_on_a_connection_fails_at_the_call(
    narrow_shop: Shop, break_table: BreakTable, error: type[Exception]
) -> None:
    break_table(narrow_shop)
    with narrow_shop.engine.connect() as connection:
        insert_order(connection, 1)
        with pytest.raises(error, match="celery_outbox"):
            narrow_shop.send("lost")
        connection.rollback()
        insert_order(connection, 2)
        connection.commit()
    assert narrow_shop.orders == [2]


@every_break
@pytest.mark.parametrize("server", ["postgresql", "mariadb"])
@pytest.mark.parametrize("step", ["prepare", "commit"])
def test_a_two_phase_session_fails_whole(
    open_narrow: OpenShop, server: str, break_table: BreakTable, error: type[Exception], step: str
) -> None:
    shop = open_narrow(server)
    with Session(shop.engine, twophase=True) as session:
        session.begin()
        shop.send("lost")
        break_table(shop)
        insert_order(session, 1)
        with pytest.raises(error):
            getattr(session, step)()
        session.rollback()
        repair(shop)
        shop.order_and_send(session, 2)
        session.commit()
    with shop.engine.connect() as connection:
        assert connection.recover_twophase() == []
    assert (shop.orders, shop.tasks) == ([2], ["2"])


@every_break
def test_a_commit_listener_whose_task_cannot_be_stored_leaves_a_connection_clean(
    narrow_shop: Shop, listen: Listen, break_table: BreakTable, error: type[Exception]
) -> None:
    break_table(narrow_shop)
    is_armed = [True]

    def send_once(_: sa.Connection) -> None:
        if is_armed:
            is_armed.clear()
            narrow_shop.send("lost")

    listen(narrow_shop.engine, "commit", send_once)
    with narrow_shop.engine.connect() as connection:
        insert_order(connection, 1)
        with pytest.raises(error):
            connection.commit()
        connection.rollback()
        insert_order(connection, 2)
        connection.commit()
    assert narrow_shop.orders == [2]


def test_a_before_commit_listener_whose_task_cannot_be_stored_fails_the_commit(
    narrow_shop: Shop, listen: Listen
) -> None:
    drop_table(narrow_shop)
    with Session(narrow_shop.engine) as session:
        insert_order(session, 1)
        listen(session, "before_commit", lambda _: narrow_shop.send("lost"))
        with pytest.raises(SchemaError):
            session.commit()
        session.rollback()
    assert narrow_shop.orders == []


def test_the_error_of_a_missing_table_says_what_to_run(sqlite_shop: Shop) -> None:
    drop_table(sqlite_shop)
    with Session(sqlite_shop.engine) as session:
        session.begin()
        sqlite_shop.send("lost")
        with pytest.raises(SchemaError, match="schema install") as caught:
            session.commit()
    assert isinstance(caught.value.__cause__, DBAPIError)


def test_a_deadlock_at_the_commit_keeps_its_class(
    open_narrow: OpenShop,
) -> None:
    """Retrying a transaction rests on what the driver raised."""
    shop = open_narrow("postgresql")
    with shop.engine.begin() as connection:
        connection.execute(
            sa.text(
                "CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN RAISE EXCEPTION 'told to' USING ERRCODE = '40P01'; END $$"
            )
        )
        connection.execute(
            sa.text(
                "CREATE TRIGGER refused BEFORE INSERT ON celery_outbox "
                "FOR EACH ROW EXECUTE FUNCTION refuse()"
            )
        )
    with Session(shop.engine) as session:
        session.begin()
        shop.send("lost")
        with pytest.raises(DBAPIError) as caught:
            session.commit()
    assert getattr(caught.value.orig, "sqlstate", None) == "40P01"
