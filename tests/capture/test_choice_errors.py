"""Where the transaction is not certain, the call itself fails and nothing is stored anywhere."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from celery_outbox import Outbox
from celery_outbox.errors import ConfigurationError, OptionError, TransactionError
from tests.capture.shop import FurnishedEngine, MakeEngine, OpenShop, Shop, insert_order, tasks


def opened(engine: sa.Engine) -> Session:
    session = Session(engine)
    session.begin()
    return session


def test_two_sessions_on_one_database_are_both_listed(shop: Shop) -> None:
    with opened(shop.engine) as first, opened(shop.engine) as second:
        with pytest.raises(TransactionError, match="several") as caught:
            shop.send("a")
        first.commit()
        second.commit()
    assert str(caught.value).count(repr(shop.engine.url)) == 2
    assert shop.tasks == []


def test_a_second_session_is_noticed_between_two_dispatches(sqlite_shop: Shop) -> None:
    with opened(sqlite_shop.engine) as first:
        sqlite_shop.send("before")
        sqlite_shop.send("before, too")
        with opened(sqlite_shop.engine), pytest.raises(TransactionError, match="several"):
            sqlite_shop.send("beside")
        sqlite_shop.send("after")
        first.commit()
    assert sqlite_shop.tasks == ["before", "before, too", "after"]


def test_each_transaction_of_a_session_gets_its_own_tasks(sqlite_shop: Shop) -> None:
    with Session(sqlite_shop.engine) as session:
        for number in range(4):
            session.begin()
            sqlite_shop.send(f"{number}a")
            sqlite_shop.send(f"{number}b")
            session.commit() if number % 2 else session.rollback()
    assert sqlite_shop.tasks == ["1a", "1b", "3a", "3b"]


def test_naming_the_database_does_not_choose_between_two_sessions_on_it(sqlite_shop: Shop) -> None:
    refused = pytest.raises(TransactionError, match=r"outbox\.using")
    with opened(sqlite_shop.engine), opened(sqlite_shop.engine), refused:
        sqlite_shop.send("a", outbox_database="default")
    assert sqlite_shop.tasks == []


def test_a_session_beside_an_independent_connection_is_refused(sqlite_shop: Shop) -> None:
    with opened(sqlite_shop.engine), sqlite_shop.engine.connect() as connection:
        connection.begin()
        with pytest.raises(TransactionError, match="several"):
            sqlite_shop.send("a")
    assert sqlite_shop.tasks == []


def test_sessions_on_two_databases_are_both_named(two_shop: Shop) -> None:
    main, billing = two_shop.engines.values()
    with opened(main) as first, opened(billing) as second:
        with pytest.raises(TransactionError) as caught:
            two_shop.send("a")
        first.commit()
        second.commit()
    assert repr(main.url) in str(caught.value)
    assert repr(billing.url) in str(caught.value)
    assert (tasks(main), tasks(billing)) == ([], [])


def test_the_names_of_the_databases_to_choose_from_are_listed(two_shop: Shop) -> None:
    main, billing = two_shop.engines.values()
    with opened(main), opened(billing), pytest.raises(TransactionError, match=r"'main'.*'billing'"):
        two_shop.send("a")


@pytest.mark.parametrize("billing_ends", ["commit", "rollback"])
def test_a_named_database_takes_the_task_to_its_own_end(two_shop: Shop, billing_ends: str) -> None:
    main, billing = two_shop.engines.values()
    with opened(main) as first, opened(billing) as second:
        two_shop.send("a", outbox_database="billing")
        getattr(second, billing_ends)()
        first.commit()
    assert (tasks(main), tasks(billing)) == ([], ["a"] if billing_ends == "commit" else [])


def test_naming_a_database_without_a_transaction_while_another_has_one_is_refused(
    two_shop: Shop,
) -> None:
    main, billing = two_shop.engines.values()
    with opened(main) as session:
        with pytest.raises(TransactionError, match=r"'billing'.*'main'"):
            two_shop.send("a", outbox_database="billing")
        session.commit()
    assert (tasks(main), tasks(billing)) == ([], [])


def test_an_unknown_database_is_refused_with_the_known_names(two_shop: Shop) -> None:
    with opened(two_shop.engine) as session:
        with pytest.raises(OptionError, match="'main', 'billing', got 'bilings'"):
            two_shop.send("a", outbox_database="bilings")
        session.commit()
    assert two_shop.tasks == []


@pytest.mark.parametrize("name", ["", 7, ("main",)])
def test_a_database_name_that_is_none_is_refused(two_shop: Shop, name: object) -> None:
    with opened(two_shop.engine) as session:
        with pytest.raises(OptionError, match="outbox_database"):
            two_shop.send("a", outbox_database=name)
        session.commit()
    assert two_shop.tasks == []


@pytest.mark.parametrize("require", [True, False])
def test_a_transaction_on_an_engine_that_is_not_configured_is_refused(
    sqlite_engine: sa.Engine,
    open_shop: OpenShop,
    make_engine: MakeEngine,
    other_url: str,
    require: bool,
) -> None:
    shop = open_shop({"default": sqlite_engine}, require_transaction=require)
    with opened(make_engine(other_url)) as session:
        with pytest.raises(TransactionError, match="configured database"):
            shop.send("a")
        session.commit()
    assert shop.tasks == []


def test_a_transaction_on_another_engine_beside_the_configured_one_is_no_matter(
    sqlite_shop: Shop, make_engine: MakeEngine, other_url: str
) -> None:
    with opened(make_engine(other_url)), opened(sqlite_shop.engine) as session:
        sqlite_shop.order_and_send(session, 1)
        session.commit()
    assert (sqlite_shop.orders, sqlite_shop.tasks) == ([1], ["1"])


def test_no_transaction_is_an_error_where_one_is_required(sqlite_shop: Shop) -> None:
    with pytest.raises(TransactionError, match="outbox_require_transaction"):
        sqlite_shop.send("a")
    assert sqlite_shop.tasks == []


def test_a_session_that_has_not_begun_is_no_transaction(sqlite_shop: Shop) -> None:
    with Session(sqlite_shop.engine), pytest.raises(TransactionError):
        sqlite_shop.send("a")
    assert sqlite_shop.tasks == []


# AUTOCOMMIT: in_transaction() says true, but rollback undoes nothing.


@contextmanager
def on_connection(engine: sa.Engine) -> Iterator[Any]:
    with engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        connection.begin()
        yield connection


@contextmanager
def on_engine(engine: sa.Engine) -> Iterator[Any]:
    with engine.execution_options(isolation_level="AUTOCOMMIT").begin() as connection:
        yield connection


@contextmanager
def on_engine_of_session(engine: sa.Engine) -> Iterator[Any]:
    with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        session.begin()
        yield session


@contextmanager
def on_connection_of_session(engine: sa.Engine) -> Iterator[Any]:
    with Session(engine) as session:
        session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        yield session


@contextmanager
def on_another_engine(engine: sa.Engine) -> Iterator[Any]:
    other = sa.create_engine(engine.url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with Session(other) as session:
        session.begin()
        yield session


@contextmanager
def in_the_driver(engine: sa.Engine) -> Iterator[Any]:
    arguments = {"isolation_level": None} if engine.name == "sqlite" else {"autocommit": True}
    other = sa.create_engine(engine.url, connect_args=arguments, poolclass=sa.NullPool)
    with other.connect() as connection:
        connection.begin()
        yield connection


@contextmanager
def in_the_driver_of_a_session(engine: sa.Engine) -> Iterator[Any]:
    with in_the_driver(engine) as connection, Session(connection.engine) as session:
        connection.rollback()
        session.connection()
        yield session


@contextmanager
def bound_to_connection(engine: sa.Engine) -> Iterator[Any]:
    with on_connection(engine) as connection, Session(connection) as session:
        session.begin()
        yield session


AUTOCOMMITS = [
    on_connection,
    on_engine,
    on_engine_of_session,
    on_connection_of_session,
    on_another_engine,
    in_the_driver,
    in_the_driver_of_a_session,
    bound_to_connection,
]
Way = Callable[[sa.Engine], AbstractContextManager[Any]]


@pytest.mark.parametrize("way", AUTOCOMMITS, ids=lambda way: way.__name__)
def test_autocommit_is_refused_wherever_it_was_set(shop: Shop, way: Way) -> None:
    with way(shop.engine) as transaction:
        with pytest.raises(TransactionError, match="AUTOCOMMIT"):
            shop.send("a")
        transaction.rollback()
    assert shop.tasks == []


def test_autocommit_that_comes_after_the_dispatch_fails_the_commit(shop: Shop) -> None:
    with opened(shop.engine) as session:
        shop.send("a")
        session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        with pytest.raises(TransactionError, match="AUTOCOMMIT"):
            session.commit()
    assert shop.tasks == []


def test_autocommit_is_refused_at_configuration(
    shop_engine: sa.Engine, make_engine: MakeEngine, open_shop: OpenShop
) -> None:
    engine = make_engine(shop_engine.url, isolation_level="AUTOCOMMIT")
    with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        open_shop({"default": engine}).outbox.install()


# Transactions that cannot write


@pytest.mark.parametrize("kind", ["session", "connection", "engine"])
def test_a_read_only_transaction_is_refused(
    furnished_engine: FurnishedEngine, open_shop: OpenShop, kind: str
) -> None:
    shop = open_shop({"default": furnished_engine("postgresql")})
    read_only = shop.engine.execution_options(postgresql_readonly=True)
    with Session(shop.engine) as session, shop.engine.connect() as connection:
        if kind == "session":
            session.connection(execution_options={"postgresql_readonly": True})
        elif kind == "connection":
            connection.execution_options(postgresql_readonly=True).begin()
        else:
            session.bind = read_only
            session.begin()
        with pytest.raises(TransactionError, match="reading only"):
            shop.send("a")
    assert shop.tasks == []


@pytest.mark.parametrize("kind", ["session", "connection"])
@pytest.mark.parametrize("server", ["postgresql", "mariadb"])
def test_a_prepared_transaction_is_refused(
    furnished_engine: FurnishedEngine, open_shop: OpenShop, server: str, kind: str
) -> None:
    shop = open_shop({"default": furnished_engine(server)})
    with Session(shop.engine, twophase=True) as session, shop.engine.connect() as connection:
        if kind == "session":
            insert_order(session, 1)
            session.prepare()
        else:
            transaction = connection.begin_twophase()
            insert_order(connection, 1)
            transaction.prepare()
        with pytest.raises(TransactionError, match="prepare"):
            shop.send("a")
        (session if kind == "session" else connection).commit()
    assert (shop.orders, shop.tasks) == ([1], [])


# Options


@pytest.mark.parametrize("value", [1, 0, "yes", "", [], object()])
def test_via_outbox_is_true_false_or_none(sqlite_shop: Shop, value: object) -> None:
    with opened(sqlite_shop.engine) as session:
        with pytest.raises(OptionError, match="via_outbox"):
            sqlite_shop.send("a", via_outbox=value)
        session.commit()
    assert sqlite_shop.tasks == []


def test_a_database_together_with_off_is_refused_with_the_way_out(sqlite_shop: Shop) -> None:
    with opened(sqlite_shop.engine) as session:
        with pytest.raises(OptionError, match="outbox_database=None"):
            sqlite_shop.send("a", via_outbox=False, outbox_database="default")
        session.commit()
    assert sqlite_shop.tasks == []


def test_a_broker_connection_together_with_the_outbox_is_refused(sqlite_shop: Shop) -> None:
    with opened(sqlite_shop.engine) as session, sqlite_shop.app.connection_for_write() as broker:
        with pytest.raises(OptionError, match="connection"):
            sqlite_shop.send("a", connection=broker)
        session.commit()
    assert sqlite_shop.tasks == []


def test_after_a_refused_dispatch_the_transaction_goes_on(shop: Shop) -> None:
    with opened(shop.engine) as session:
        shop.order_and_send(session, 1)
        with pytest.raises(OptionError):
            shop.send("a", outbox_database="nowhere")
        with pytest.raises(Exception, match="serializ"):
            shop.app.tasks["shop.receipt"].apply_async((object(),), via_outbox=True)
        shop.order_and_send(session, 2)
        session.commit()
    assert (shop.orders, shop.tasks) == ([1, 2], ["1", "2"])


# Configuration


def same_engine(engine: sa.Engine) -> Any:
    return engine


def same_url(engine: sa.Engine) -> Any:
    return engine.url


def other_engine_with_its_url(engine: sa.Engine) -> Any:
    return sa.create_engine(engine.url)


def same_pool(engine: sa.Engine) -> Any:
    return engine.execution_options(logging_token="x")


@pytest.mark.parametrize(
    "duplicate",
    [same_engine, same_url, other_engine_with_its_url, same_pool],
    ids=lambda duplicate: duplicate.__name__,
)
def test_two_names_for_one_table_are_refused(
    sqlite_engine: sa.Engine,
    make_app: Callable[..., Any],
    duplicate: Callable[[sa.Engine], Any],
) -> None:
    databases = {"main": sqlite_engine, "again": duplicate(sqlite_engine)}
    with pytest.raises(ConfigurationError, match="'main' and 'again'"):
        Outbox(make_app(), databases=databases).install()
