"""Forks: a child has nothing of what its parent had open, and takes nothing away from it."""

import gc
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.capture.async_support import PATIENCE_SECONDS, AsyncShop, lasting_shop
from tests.capture.shop import MakeEngine, OpenShop, Order, Shop

# Python 3.12 and later warn of forks beside threads; the children here wait for no lock.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture(scope="module")
def lasting(request: pytest.FixtureRequest) -> Iterator[AsyncShop]:
    with lasting_shop(request, "asyncpg") as shop:
        yield shop


@pytest.fixture
def shop(lasting: AsyncShop, make_engine: MakeEngine, open_shop: OpenShop) -> Shop:
    """A shop whose outbox has an engine of its own, with a connection in its pool."""
    lasting.clear()
    engine = make_engine(lasting.engine.url)
    shop = open_shop({"default": engine}, {"default": engine.url}, require_transaction=False)
    shop.send("earlier")
    return shop


def in_a_fork(work: Callable[..., Any], *args: Any) -> None:
    """Run something in a forked child, and see that it succeeds."""
    child = multiprocessing.get_context("fork").Process(target=work, args=args)
    child.start()
    child.join(PATIENCE_SECONDS)
    if child.exitcode is None:
        child.kill()
        child.join()
    assert child.exitcode == 0


def send_in_a_session(shop: Shop, number: int) -> None:
    """Store with an order, on an engine made in this process."""
    engine = sa.create_engine(shop.engine.url, poolclass=sa.NullPool)
    with Session(engine) as session, session.begin():
        session.add(Order(id=number))
        shop.send(str(number))


def test_a_child_stores_alone_and_its_parents_commit_still_stores(shop: Shop) -> None:
    with Session(shop.engine) as session:
        session.add(Order(id=1))
        session.flush()
        shop.send("1")
        in_a_fork(shop.send, "child")
        assert shop.tasks == ["earlier", "child"]
        session.commit()
    assert (shop.orders, shop.tasks) == ([1], ["earlier", "child", "1"])


def test_a_childs_transaction_is_its_own(shop: Shop) -> None:
    with Session(shop.engine) as session:
        session.add(Order(id=1))
        session.flush()
        shop.send("1")
        in_a_fork(send_in_a_session, shop, 2)
        session.rollback()
    assert (shop.orders, shop.tasks) == ([2], ["earlier", "2"])


def test_a_child_that_collects_what_it_inherited_writes_nothing(shop: Shop) -> None:
    def child() -> None:
        gc.collect()
        send_in_a_session(shop, 2)
        gc.collect()

    with Session(shop.engine) as session:
        session.add(Order(id=1))
        shop.send("1")
        in_a_fork(child)
        assert shop.tasks == ["earlier", "2"]
        session.commit()
    assert (shop.orders, shop.tasks) == ([1, 2], ["earlier", "2", "1"])


def test_several_children_and_their_parent_never_mix(shop: Shop) -> None:
    with Session(shop.engine) as session:
        session.add(Order(id=1))
        shop.send("1")
        for number in (2, 3):
            in_a_fork(send_in_a_session, shop, number)
        shop.send("last")
        session.commit()
    assert (shop.orders, shop.tasks) == ([1, 2, 3], ["earlier", "2", "3", "1", "last"])


def test_a_child_does_not_store_in_what_its_parent_uses(shop: Shop) -> None:
    with Session(shop.engine) as session, shop.outbox.using(session):
        session.add(Order(id=1))
        session.flush()
        in_a_fork(shop.send, "child")
        session.rollback()
    assert (shop.orders, shop.tasks) == ([], ["earlier", "child"])


def test_an_engine_of_the_users_works_in_the_child_once_its_pool_is_replaced(
    lasting: AsyncShop,
) -> None:
    shop = lasting
    shop.clear()

    def child() -> None:
        shop.engine.dispose(close=False)
        with Session(shop.engine) as session, session.begin():
            session.add(Order(id=2))
            shop.send("2")
        shop.send("child")

    with Session(shop.engine) as session:
        session.add(Order(id=1))
        session.flush()
        shop.send("1")
        in_a_fork(child)
        session.commit()
    assert (shop.orders, shop.tasks) == ([1, 2], ["2", "child", "1"])
