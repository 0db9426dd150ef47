"""outbox.using: the caller names the transaction, and nothing is searched for."""

import logging
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from werkzeug.local import LocalProxy

from celery_outbox.errors import OptionError, TransactionError
from tests.capture.shop import (
    TRACKING_LOGGER,
    MakeEngine,
    OutOfStockError,
    Shop,
    insert_order,
    tasks,
)


def session(engine: sa.Engine) -> Any:
    return Session(engine)


def begun_session(engine: sa.Engine) -> Any:
    opened = Session(engine)
    opened.begin()
    return opened


def session_without_autobegin(engine: sa.Engine) -> Any:
    return Session(engine, autobegin=False)


def scoped(engine: sa.Engine) -> Any:
    return scoped_session(sessionmaker(engine))


def proxy(engine: sa.Engine) -> Any:
    opened = Session(engine)
    return LocalProxy(lambda: opened)


def connection(engine: sa.Engine) -> Any:
    return engine.connect()


def begun_connection(engine: sa.Engine) -> Any:
    opened = engine.connect()
    opened.begin()
    return opened


def session_on_connection(engine: sa.Engine) -> Any:
    return Session(engine.connect())


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize(
    "kind",
    [
        session,
        begun_session,
        session_without_autobegin,
        scoped,
        proxy,
        connection,
        begun_connection,
        session_on_connection,
    ],
    ids=lambda kind: kind.__name__,
)
def test_every_kind_of_transaction_may_be_named(shop: Shop, kind: Any, end: str) -> None:
    subject = kind(shop.engine)
    with shop.outbox.using(subject):
        shop.send("a")
        insert_order(subject, 1)
        shop.send("b")
    before = shop.tasks
    getattr(subject, end)()
    if isinstance(getattr(subject, "bind", None), sa.Connection):
        subject.bind.close()
    subject.close()
    expected = ([1], ["a", "b"]) if end == "commit" else ([], [])
    assert before == []
    assert (shop.orders, shop.tasks) == expected


def test_it_chooses_among_several_open_transactions(shop: Shop) -> None:
    with begun_session(shop.engine) as first, begun_session(shop.engine) as second:
        with shop.outbox.using(second):
            shop.send("second")
        with shop.outbox.using(first):
            shop.send("first")
        first.commit()
        second.rollback()
    assert shop.tasks == ["first"]


def test_the_inner_of_two_is_in_force_and_the_outer_comes_back(two_shop: Shop) -> None:
    main, billing = two_shop.engines.values()
    with begun_session(main) as first, begun_session(billing) as second:
        with two_shop.outbox.using(first):
            two_shop.send("1")
            with pytest.raises(OutOfStockError), two_shop.outbox.using(second):
                two_shop.send("2")
                raise OutOfStockError
            two_shop.send("3")
        first.commit()
        second.commit()
    assert (tasks(main), tasks(billing)) == (["1", "3"], ["2"])


def test_after_the_block_the_transaction_is_searched_for_again(sqlite_shop: Shop) -> None:
    with Session(sqlite_shop.engine) as unused, sqlite_shop.outbox.using(unused):
        pass
    with pytest.raises(TransactionError):
        sqlite_shop.send("a")


def test_what_it_names_beats_what_is_visible(two_shop: Shop) -> None:
    main, billing = two_shop.engines.values()
    with begun_session(main) as visible, Session(billing) as named:
        with two_shop.outbox.using(named):
            two_shop.send("a")
        visible.commit()
        named.commit()
    assert (tasks(main), tasks(billing)) == ([], ["a"])


def test_savepoints_inside_the_block_are_respected(shop: Shop) -> None:
    with Session(shop.engine) as opened, shop.outbox.using(opened):
        shop.order_and_send(opened, 1)
        with pytest.raises(OutOfStockError), opened.begin_nested():
            shop.order_and_send(opened, 2)
            raise OutOfStockError
        opened.commit()
    assert (shop.orders, shop.tasks) == ([1], ["1"])


def test_after_a_commit_inside_the_block_the_next_transaction_is_meant(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, TRACKING_LOGGER)
    with Session(shop.engine) as opened, shop.outbox.using(opened):
        shop.send("1")
        opened.commit()
        shop.send("2")
        opened.rollback()
        shop.send("3")
        opened.commit()
        shop.send("4")
    assert shop.tasks == ["1", "3"]
    assert [each.name for each in caplog.records] == [TRACKING_LOGGER]


@pytest.mark.parametrize("name", ["main", None])
def test_the_database_of_the_named_transaction_may_be_named_too(
    two_shop: Shop, name: str | None
) -> None:
    with Session(two_shop.engine) as opened:
        with two_shop.outbox.using(opened):
            two_shop.send("a", outbox_database=name)
        opened.commit()
    assert two_shop.tasks == ["a"]


def test_another_database_than_that_of_the_named_transaction_is_refused(two_shop: Shop) -> None:
    main, billing = two_shop.engines.values()
    with Session(main) as opened:
        with two_shop.outbox.using(opened), pytest.raises(TransactionError, match="'billing'"):
            two_shop.send("a", outbox_database="billing")
        with two_shop.outbox.using(opened), pytest.raises(OptionError, match="'nowhere'"):
            two_shop.send("a", outbox_database="nowhere")
        opened.commit()
    assert (tasks(main), tasks(billing)) == ([], [])


def test_a_transaction_on_an_engine_that_is_not_configured_is_refused(
    sqlite_shop: Shop, make_engine: MakeEngine, other_url: str
) -> None:
    refused = pytest.raises(TransactionError, match="not configured")
    with Session(make_engine(other_url)) as stranger:
        with sqlite_shop.outbox.using(stranger), refused:
            sqlite_shop.send("a")
        stranger.commit()
    assert sqlite_shop.tasks == []


def test_an_unbound_session_is_refused(sqlite_shop: Shop) -> None:
    with Session() as unbound, sqlite_shop.outbox.using(unbound), pytest.raises(TransactionError):
        sqlite_shop.send("a")
    assert sqlite_shop.tasks == []


def test_a_closed_connection_is_refused(sqlite_shop: Shop) -> None:
    closed = sqlite_shop.engine.connect()
    closed.close()
    with pytest.raises(TransactionError), sqlite_shop.outbox.using(closed):
        sqlite_shop.send("a")
    assert sqlite_shop.tasks == []


def test_autocommit_is_refused_there_too(shop: Shop) -> None:
    autocommit = shop.engine.execution_options(isolation_level="AUTOCOMMIT")
    with autocommit.connect() as opened:
        with shop.outbox.using(opened), pytest.raises(TransactionError, match="AUTOCOMMIT"):
            shop.send("a")
        opened.rollback()
    assert shop.tasks == []


@pytest.mark.parametrize("kind", ["none", "text", "engine", "class", "maker", "dbapi", "order"])
def test_what_is_no_transaction_is_refused_at_once(sqlite_shop: Shop, kind: str) -> None:
    engine = sqlite_shop.engine
    subjects = {
        "none": lambda: None,
        "text": lambda: "session",
        "engine": lambda: engine,
        "class": lambda: Session,
        "maker": lambda: sessionmaker(engine),
        "dbapi": engine.raw_connection,
        "order": lambda: object(),
    }
    block = sqlite_shop.outbox.using(subjects[kind]())
    with pytest.raises(TransactionError, match="expected a Session"):
        block.__enter__()


def test_directly_sent_tasks_do_not_care(sqlite_shop: Shop) -> None:
    sqlite_shop.app.conf.broker_url = "memory://"
    with Session(sqlite_shop.engine) as opened, sqlite_shop.outbox.using(opened):
        sqlite_shop.send("direct", via_outbox=False)
        opened.commit()
    assert sqlite_shop.tasks == []
