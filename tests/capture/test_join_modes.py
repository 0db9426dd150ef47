"""A Session bound to a Connection: whoever decides about the orders decides about the tasks.

Each test sends a task beside every order that it inserts and compares the two at the end; what
SQLAlchemy makes of the mode is SQLAlchemy's affair.
"""

import pytest
from sqlalchemy.orm import Session

from tests.capture.shop import Order, OutOfStockError, Shop

MODES = ["conditional_savepoint", "rollback_only", "control_fully", "create_savepoint"]
ENDS = ["commit", "rollback", "close"]
every_mode = pytest.mark.parametrize("mode", MODES)


@every_mode
@pytest.mark.parametrize("outer", ["commit", "rollback"])
@pytest.mark.parametrize("inner", ["commit", "rollback"])
def test_task_and_order_share_the_end_that_session_and_connection_choose(
    shop: Shop, mode: str, inner: str, outer: str
) -> None:
    with shop.engine.connect() as connection:
        transaction = connection.begin()
        shop.order_and_send(connection, 1)
        with Session(connection, join_transaction_mode=mode) as session:
            shop.order_and_send(session, 2)
            getattr(session, inner)()
        if transaction.is_active:
            shop.order_and_send(connection, 3)
            getattr(transaction, outer)()
    assert shop.tasks == [str(number) for number in shop.orders]


@every_mode
@pytest.mark.parametrize("outer", ["commit", "rollback"])
@pytest.mark.parametrize("inner", ENDS)
def test_a_session_inside_a_savepoint_of_its_connection_shares_its_end(
    sqlite_shop: Shop, mode: str, inner: str, outer: str
) -> None:
    with sqlite_shop.engine.connect() as connection:
        transaction = connection.begin()
        savepoint = connection.begin_nested()
        sqlite_shop.order_and_send(connection, 1)
        with Session(connection, join_transaction_mode=mode) as session:
            sqlite_shop.order_and_send(session, 2)
            getattr(session, inner)()
        if savepoint.is_active:
            sqlite_shop.order_and_send(connection, 3)
            getattr(savepoint, outer)()
        if transaction.is_active:
            sqlite_shop.order_and_send(connection, 4)
            transaction.commit()
    assert sqlite_shop.tasks == [str(number) for number in sqlite_shop.orders]


@every_mode
@pytest.mark.parametrize("savepoint_ends", ["commit", "rollback"])
@pytest.mark.parametrize("outer", ["commit", "rollback"])
def test_savepoints_of_a_bound_session_keep_tasks_and_orders_together(
    sqlite_shop: Shop, mode: str, savepoint_ends: str, outer: str
) -> None:
    with sqlite_shop.engine.connect() as connection, connection.begin() as transaction:
        with Session(connection, join_transaction_mode=mode) as session:
            nested = session.begin_nested()
            sqlite_shop.order_and_send(session, 1)
            getattr(nested, savepoint_ends)()
            sqlite_shop.order_and_send(session, 2)
            session.commit()
        if transaction.is_active:
            getattr(transaction, outer)()
    assert sqlite_shop.tasks == [str(number) for number in sqlite_shop.orders]


@every_mode
def test_a_session_on_a_connection_without_transaction_ends_its_own(shop: Shop, mode: str) -> None:
    with (
        shop.engine.connect() as connection,
        Session(connection, join_transaction_mode=mode) as session,
    ):
        shop.order_and_send(session, 1)
        session.rollback()
        shop.order_and_send(session, 2)
        session.commit()
        shop.order_and_send(session, 3)
    assert (shop.orders, shop.tasks) == ([2], ["2"])


def test_the_recipe_for_test_suites_leaves_nothing_behind(shop: Shop) -> None:
    with shop.engine.connect() as connection:
        transaction = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            for number in (1, 2):
                session.add(Order(id=number))
                shop.send(str(number))
                session.commit()
            shop.order_and_send(session, 3)
            session.rollback()
            inside = connection.exec_driver_sql("SELECT task_id FROM celery_outbox ORDER BY id")
            assert inside.scalars().all() == ["1", "2"]
        transaction.rollback()
    assert (shop.orders, shop.tasks) == ([], [])


def test_two_sessions_in_turn_share_the_transaction_of_one_connection(shop: Shop) -> None:
    with shop.engine.begin() as connection:
        for number in (1, 2):
            with Session(connection, join_transaction_mode="create_savepoint") as session:
                shop.order_and_send(session, number)
                session.commit()
        with (
            pytest.raises(OutOfStockError),
            Session(connection, join_transaction_mode="create_savepoint") as session,
        ):
            shop.order_and_send(session, 3)
            raise OutOfStockError
    assert (shop.orders, shop.tasks) == ([1, 2], ["1", "2"])
