"""Savepoints: a task lives exactly as long as the order that was inserted beside it."""

import random
from collections.abc import Callable

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.capture.shop import MakeEngine, OpenShop, Order, OutOfStockError, Shop

Transactional = Session | sa.Connection


def session(shop: Shop) -> Session:
    return Session(shop.engine)


def connection(shop: Shop) -> sa.Connection:
    return shop.engine.connect()


both = pytest.mark.parametrize("opened", [session, connection], ids=lambda opened: opened.__name__)
Opened = Callable[[Shop], Transactional]
commits_or_not = pytest.mark.parametrize("outer", ["commit", "rollback"])


@both
@commits_or_not
def test_rolled_back_released_and_nested_savepoints_in_one_transaction(
    shop: Shop, opened: Opened, outer: str
) -> None:
    with opened(shop) as transaction:
        begin(transaction)
        shop.order_and_send(transaction, 1)
        with pytest.raises(OutOfStockError), transaction.begin_nested():
            shop.order_and_send(transaction, 2)
            raise OutOfStockError
        with transaction.begin_nested():
            shop.order_and_send(transaction, 3)
        with pytest.raises(OutOfStockError), transaction.begin_nested():
            shop.order_and_send(transaction, 4)
            with transaction.begin_nested():
                shop.order_and_send(transaction, 5)
            raise OutOfStockError
        getattr(transaction, outer)()
    expected = [1, 3] if outer == "commit" else []
    assert (shop.orders, shop.tasks) == (expected, [str(number) for number in expected])


@both
@commits_or_not
@pytest.mark.parametrize("inner", ["commit", "rollback"])
def test_a_savepoint_as_the_very_first_act(shop: Shop, opened: Opened, inner: str, outer: str) -> None:
    with opened(shop) as transaction:
        savepoint = transaction.begin_nested()
        shop.order_and_send(transaction, 1)
        getattr(savepoint, inner)()
        getattr(transaction, outer)()
    expected = [1] if (inner, outer) == ("commit", "commit") else []
    assert (shop.orders, shop.tasks) == (expected, [str(number) for number in expected])


def test_a_savepoint_as_the_first_act_on_an_engine_that_is_not_the_configured_one(
    sqlite_shop: Shop, make_engine: MakeEngine
) -> None:
    with Session(make_engine(sqlite_shop.engine.url)) as other:
        with other.begin_nested():
            sqlite_shop.order_and_send(other, 1)
        other.rollback()
    assert (sqlite_shop.orders, sqlite_shop.tasks) == ([], [])


def test_a_savepoint_as_the_first_act_of_a_connection_of_another_engine(
    sqlite_shop: Shop, make_engine: MakeEngine
) -> None:
    with make_engine(sqlite_shop.engine.url).connect() as other:
        with other.begin_nested():
            sqlite_shop.order_and_send(other, 1)
        other.rollback()
    assert (sqlite_shop.orders, sqlite_shop.tasks) == ([], [])


def test_a_savepoint_as_the_first_act_on_an_engine_configured_by_url(
    sqlite_engine: sa.Engine, open_shop: OpenShop
) -> None:
    shop = open_shop({"default": sqlite_engine}, databases_as={"default": str(sqlite_engine.url)})
    with Session(shop.engine) as plain:
        with plain.begin_nested():
            shop.order_and_send(plain, 1)
        plain.rollback()
    assert (shop.orders, shop.tasks) == ([], [])


def test_an_engine_that_begins_by_itself_keeps_its_savepoints_right(
    sqlite_engine: sa.Engine, open_shop: OpenShop
) -> None:
    """SQLAlchemy's documented cure for the driver: no transactions of its own, BEGIN by an event."""

    @sa.event.listens_for(sqlite_engine, "connect")
    def leave_transactions_to_us(dbapi_connection, record):
        dbapi_connection.isolation_level = None

    @sa.event.listens_for(sqlite_engine, "begin")
    def begin_by_ourselves(connection):
        connection.exec_driver_sql("BEGIN")

    shop = open_shop({"default": sqlite_engine})
    for outer in ("rollback", "commit"):
        with Session(sqlite_engine) as plain:
            with plain.begin_nested():
                shop.order_and_send(plain, 1)
            getattr(plain, outer)()
    assert (shop.orders, shop.tasks) == ([1], ["1"])


@both
@commits_or_not
def test_twenty_savepoints_deep(shop: Shop, opened: Opened, outer: str) -> None:
    with opened(shop) as transaction:
        begin(transaction)
        savepoints = []
        for number in range(20):
            savepoints.append(transaction.begin_nested())
            shop.order_and_send(transaction, number)
        for number, savepoint in reversed(list(enumerate(savepoints))):
            (savepoint.rollback if number == 10 else savepoint.commit)()
        getattr(transaction, outer)()
    expected = list(range(10)) if outer == "commit" else []
    assert (shop.orders, shop.tasks) == (expected, [str(number) for number in expected])


@commits_or_not
@pytest.mark.parametrize("inner", ["commit", "rollback"])
def test_savepoints_made_on_the_connection_of_a_session(shop: Shop, inner: str, outer: str) -> None:
    with Session(shop.engine) as plain:
        shop.order_and_send(plain, 1)
        savepoint = plain.connection().begin_nested()
        shop.order_and_send(plain, 2)
        getattr(savepoint, inner)()
        shop.order_and_send(plain, 3)
        getattr(plain, outer)()
    expected = [] if outer == "rollback" else [1, 2, 3] if inner == "commit" else [1, 3]
    assert (shop.orders, shop.tasks) == (expected, [str(number) for number in expected])


def test_savepoints_of_a_session_and_of_its_connection_nest(shop: Shop) -> None:
    with Session(shop.engine) as plain:
        with plain.begin_nested():
            shop.order_and_send(plain, 1)
            raw = plain.connection().begin_nested()
            shop.order_and_send(plain, 2)
            raw.rollback()
            raw = plain.connection().begin_nested()
            shop.order_and_send(plain, 3)
            raw.commit()
        with pytest.raises(OutOfStockError), plain.begin_nested():
            raw = plain.connection().begin_nested()
            shop.order_and_send(plain, 4)
            raw.commit()
            raise OutOfStockError
        plain.commit()
    assert (shop.orders, shop.tasks) == ([1, 3], ["1", "3"])


def test_rolling_back_the_session_inside_a_savepoint_rolls_back_everything(shop: Shop) -> None:
    with Session(shop.engine) as plain:
        shop.order_and_send(plain, 1)
        plain.begin_nested()
        shop.order_and_send(plain, 2)
        plain.rollback()
        shop.order_and_send(plain, 3)
        plain.commit()
    assert (shop.orders, shop.tasks) == ([3], ["3"])


def test_committing_the_session_inside_a_savepoint_commits_everything(shop: Shop) -> None:
    with Session(shop.engine) as plain:
        shop.order_and_send(plain, 1)
        plain.begin_nested()
        shop.order_and_send(plain, 2)
        plain.commit()
        shop.order_and_send(plain, 3)
        plain.rollback()
    assert (shop.orders, shop.tasks) == ([1, 2], ["1", "2"])


def test_a_flush_that_fails_in_a_savepoint_takes_the_savepoints_tasks_alone(shop: Shop) -> None:
    with Session(shop.engine) as plain:
        shop.order_and_send(plain, 1)
        with pytest.raises(sa.exc.IntegrityError), plain.begin_nested():
            shop.send("2")
            plain.add(Order(id=1))
            plain.flush()
        shop.order_and_send(plain, 3)
        plain.commit()
    assert (shop.orders, shop.tasks) == ([1, 3], ["1", "3"])


@pytest.mark.parametrize("seed", range(8))
@both
def test_whatever_the_sequence_tasks_and_orders_agree(
    sqlite_shop: Shop, opened: Opened, seed: int
) -> None:
    check_random_sequence(sqlite_shop, opened, seed)


@pytest.mark.parametrize("seed", range(100, 102))
@both
def test_whatever_the_sequence_tasks_and_orders_agree_on_servers(
    shop: Shop, opened: Opened, seed: int
) -> None:
    check_random_sequence(shop, opened, seed)


def check_random_sequence(shop: Shop, opened: Opened, seed: int) -> None:
    """Insert, dispatch, make and end savepoints and transactions in a random order."""
    chance = random.Random(seed)
    with opened(shop) as transaction:
        savepoints: list[sa.NestedTransaction] = []
        for number in range(150):
            begin(transaction)
            act = chance.choices(
                ["order", "savepoint", "release", "undo", "undo outer", "commit", "rollback"],
                [40, 25, 14, 12, 4, 3, 2],
            )[0]
            if act == "order":
                shop.order_and_send(transaction, number)
            elif act == "savepoint":
                savepoints.append(transaction.begin_nested())
            elif act in {"release", "undo"} and savepoints:
                savepoint = savepoints.pop()
                (savepoint.commit if act == "release" else savepoint.rollback)()
            elif act == "undo outer" and savepoints:
                index = chance.randrange(len(savepoints))
                for savepoint in reversed(savepoints[index:]):
                    savepoint.rollback()
                del savepoints[index:]
            elif act in {"commit", "rollback"}:
                getattr(transaction, act)()
                savepoints.clear()
        transaction.commit()
    assert shop.orders
    assert shop.tasks == [str(number) for number in shop.orders]


def begin(transaction: Transactional) -> None:
    if not transaction.in_transaction():
        transaction.begin()
