"""Dispatches made by event listeners belong to the transaction in which they are made."""

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from celery_outbox.errors import TransactionError
from tests.capture.shop import Listen, OpenShop, Order, Shop, insert_order


class Ears:
    """A listener that dispatches once, whatever it is called with."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.has_heard = False

    def __call__(self, *args: Any) -> None:
        if not self.has_heard:
            self.has_heard = True
            self.shop.send("heard")


def on_class(shop: Shop, session: Session) -> Any:
    return Session


def on_instance(shop: Shop, session: Session) -> Any:
    return session


def on_mapped_class(shop: Shop, session: Session) -> Any:
    return Order


def on_attribute(shop: Shop, session: Session) -> Any:
    return Order.note


def on_engine(shop: Shop, session: Session) -> Any:
    return shop.engine


def on_every_engine(shop: Shop, session: Session) -> Any:
    return sa.Engine


DURING_COMMIT = [
    (on_class, "before_flush"),
    (on_class, "after_flush"),
    (on_class, "after_flush_postexec"),
    (on_class, "before_commit"),
    (on_instance, "before_flush"),
    (on_instance, "after_flush"),
    (on_instance, "after_flush_postexec"),
    (on_instance, "before_commit"),
    (on_instance, "after_begin"),
    (on_instance, "pending_to_persistent"),
    (on_mapped_class, "before_insert"),
    (on_mapped_class, "after_insert"),
    (on_engine, "begin"),
    (on_engine, "after_cursor_execute"),
    (on_engine, "commit"),
    (on_every_engine, "commit"),
]
during_commit = pytest.mark.parametrize(
    ("where", "name"),
    DURING_COMMIT,
    ids=[f"{name}-{where.__name__}" for where, name in DURING_COMMIT],
)
Where = Callable[[Shop, Session], Any]


@during_commit
def test_what_a_listener_sends_while_the_session_commits_is_stored_with_it(
    shop: Shop, listen: Listen, where: Where, name: str
) -> None:
    with Session(shop.engine) as session:
        session.add(Order(id=1))
        listen(where(shop, session), name, Ears(shop))
        session.commit()
        session.connection()
        session.commit()
    assert (shop.orders, shop.tasks) == ([1], ["heard"])


@during_commit
def test_what_a_listener_sends_in_a_commit_that_fails_is_gone(
    sqlite_shop: Shop, listen: Listen, where: Where, name: str
) -> None:
    """The commit fails after everything has been heard."""

    class PowerCutError(Exception):
        pass

    def cut(connection: sa.Connection) -> None:
        raise PowerCutError

    with Session(sqlite_shop.engine) as session:
        session.add(Order(id=1))
        listen(where(sqlite_shop, session), name, Ears(sqlite_shop))
        listen(sqlite_shop.engine, "commit", cut)
        with pytest.raises(PowerCutError):
            session.commit()
    assert (sqlite_shop.orders, sqlite_shop.tasks) == ([], [])


BEFORE_ROLLBACK = [each for each in DURING_COMMIT if "commit" not in each[1]]


@pytest.mark.parametrize(
    ("where", "name"),
    [*BEFORE_ROLLBACK, (on_attribute, "set")],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_what_a_listener_sends_before_a_rollback_is_gone(
    sqlite_shop: Shop, listen: Listen, where: Where, name: str
) -> None:
    with Session(sqlite_shop.engine) as session:
        session.begin()
        ears = Ears(sqlite_shop)
        listen(where(sqlite_shop, session), name, ears)
        session.add(Order(id=1, note="x"))
        session.flush()
        session.rollback()
        session.connection()
        session.commit()
    assert (ears.has_heard, sqlite_shop.orders, sqlite_shop.tasks) == (True, [], [])


def test_listeners_of_a_sessionmaker_are_heard(sqlite_shop: Shop, listen: Listen) -> None:
    maker = sessionmaker(sqlite_shop.engine)
    listen(maker, "before_commit", Ears(sqlite_shop))
    with maker.begin() as session:
        insert_order(session, 1)
    assert (sqlite_shop.orders, sqlite_shop.tasks) == ([1], ["heard"])


def test_a_before_commit_listener_may_be_all_that_a_session_does(shop: Shop, listen: Listen) -> None:
    with Session(shop.engine) as session:
        listen(session, "before_commit", Ears(shop))
        session.begin()
        session.commit()
    assert shop.tasks == ["heard"]


def test_several_before_commit_listeners_all_add_their_tasks(shop: Shop, listen: Listen) -> None:
    with Session(shop.engine) as session:
        session.begin()
        for number in range(3):
            listen(session, "before_commit", lambda _, number=number: shop.send(str(number)))
        session.commit()
    assert shop.tasks == ["0", "1", "2"]


def test_a_flush_begun_by_commit_itself_adds_its_tasks(shop: Shop, listen: Listen) -> None:
    """before_commit comes before commit's own flush."""
    with Session(shop.engine) as session:
        listen(session, "before_commit", lambda _: session.add(Order(id=2)))
        listen(session, "before_flush", lambda *_: session.add_all(extra))
        listen(Order, "after_insert", lambda mapper, conn, order: shop.send(str(order.id)))
        extra = [Order(id=3)]
        session.add(Order(id=1))
        session.commit()
    assert (shop.orders, sorted(shop.tasks)) == ([1, 2, 3], ["1", "2", "3"])


def test_a_listener_in_a_savepoint_shares_the_savepoints_end(shop: Shop, listen: Listen) -> None:
    with Session(shop.engine) as session:
        listen(Order, "after_insert", lambda mapper, conn, order: shop.send(str(order.id)))
        for number, end in [(1, "commit"), (2, "rollback"), (3, "commit")]:
            savepoint = session.begin_nested()
            session.add(Order(id=number))
            session.flush()
            getattr(savepoint, end)()
        session.commit()
    assert (shop.orders, shop.tasks) == ([1, 3], ["1", "3"])


def test_commit_of_the_sessions_connection_stores_what_waits(shop: Shop) -> None:
    with Session(shop.engine) as session:
        shop.order_and_send(session, 1)
        session.connection().commit()
    assert (shop.orders, shop.tasks) == ([1], ["1"])


@pytest.mark.parametrize("name", ["after_commit", "after_rollback", "after_soft_rollback"])
@pytest.mark.parametrize("where", [on_class, on_instance], ids=lambda where: where.__name__)
def test_what_is_sent_after_the_end_is_stored_by_itself(
    shop_engine: sa.Engine, open_shop: OpenShop, listen: Listen, where: Where, name: str
) -> None:
    shop = open_shop({"default": shop_engine}, require_transaction=False)
    with Session(shop.engine) as session:
        insert_order(session, 1)
        listen(where(shop, session), name, lambda *_: shop.send("after"))
        (session.commit if name == "after_commit" else session.rollback)()
        stored_at_once = shop.tasks
        session.connection()
        session.rollback()
    assert stored_at_once == ["after"]
    assert set(shop.tasks) == {"after"}


@pytest.mark.parametrize("name", ["after_commit", "after_rollback"])
def test_what_is_sent_after_the_end_is_refused_where_a_transaction_is_required(
    sqlite_shop: Shop, listen: Listen, name: str
) -> None:
    with Session(sqlite_shop.engine) as session:
        insert_order(session, 1)
        listen(session, name, Ears(sqlite_shop))
        with pytest.raises(TransactionError):
            (session.commit if name == "after_commit" else session.rollback)()
    assert sqlite_shop.tasks == []


def test_what_is_sent_when_a_savepoint_is_released_belongs_to_the_transaction(
    shop: Shop, listen: Listen
) -> None:
    """after_commit also comes when a savepoint is released."""
    with Session(shop.engine) as session:
        listen(session, "before_commit", lambda _: shop.send("released"))
        with session.begin_nested():
            insert_order(session, 1)
        session.rollback()
    assert shop.tasks == []
