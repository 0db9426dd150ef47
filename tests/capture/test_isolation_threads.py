"""Threads: each sees the transactions that it began or works in, and nobody else's."""

import contextvars
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from celery_outbox.errors import TransactionError
from tests.capture.async_support import PATIENCE_SECONDS, AsyncShop, lasting_shop
from tests.capture.shop import Order, insert_order

COUNT = 20


@pytest.fixture(scope="module")
def lasting(request: pytest.FixtureRequest) -> Iterator[AsyncShop]:
    with lasting_shop(request, "asyncpg", pool_size=COUNT) as shop:
        yield shop


@pytest.fixture
def shop(lasting: AsyncShop) -> AsyncShop:
    lasting.clear()
    return lasting


def in_a_thread(work: Callable[..., Any], *args: Any) -> Any:
    """Run something in a thread of its own; its error is raised here."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(work, *args).result(PATIENCE_SECONDS)


def test_twenty_interleaved_threads_store_each_in_its_own_transaction(shop: AsyncShop) -> None:
    everyone = threading.Barrier(COUNT, timeout=PATIENCE_SECONDS)

    def work(number: int) -> None:
        with Session(shop.engine) as session:
            for step in range(3):
                row = 10 * number + step
                session.add(Order(id=row))
                shop.send(str(row))
                everyone.wait()
            savepoint = session.begin_nested()
            shop.send(f"never {number}")
            everyone.wait()
            savepoint.rollback()
            everyone.wait()
            (session.commit if number % 2 else session.rollback)()

    with ThreadPoolExecutor(COUNT) as executor:
        list(executor.map(work, range(COUNT)))
    expected = [10 * number + step for number in range(1, COUNT, 2) for step in range(3)]
    assert shop.orders == expected
    assert sorted(map(int, shop.tasks)) == expected


def test_a_thread_without_a_transaction_stores_alone_while_another_has_one(
    shop: AsyncShop,
) -> None:
    with Session(shop.engine) as session:
        session.add(Order(id=1))
        session.flush()
        in_a_thread(shop.send, "alone")
        assert shop.tasks == ["alone"]
        session.rollback()
    assert shop.tasks == ["alone"]


def test_a_reused_thread_forgets_the_session_that_it_finished(shop: AsyncShop) -> None:
    def with_a_session(end: str) -> int:
        with Session(shop.engine) as session:
            session.add(Order(id=1))
            shop.send(end)
            getattr(session, end)()
        return threading.get_ident()

    def without() -> int:
        shop.send("alone")
        return threading.get_ident()

    with ThreadPoolExecutor(1) as executor:
        threads = {
            executor.submit(with_a_session, "rollback").result(),
            executor.submit(without).result(),
            executor.submit(with_a_session, "commit").result(),
            executor.submit(without).result(),
        }
    assert len(threads) == 1
    assert shop.tasks == ["alone", "commit", "alone"]


def test_a_session_leaked_by_a_dead_thread_is_not_seen_by_one_with_its_number(
    shop: AsyncShop,
) -> None:
    leaked: list[Session] = []

    def leak() -> int:
        leaked.append(Session(shop.engine))
        leaked[0].begin()
        shop.send("leaked")
        return threading.get_ident()

    def send() -> int:
        shop.send("alone")
        return threading.get_ident()

    dead = in_a_thread(leak)
    # The system gives numbers of dead threads out again, mostly at once.
    for _ in range(100):
        if in_a_thread(send) == dead:
            break
    else:
        pytest.fail("the number of the dead thread was not given out again")
    leaked[0].rollback()
    assert set(shop.tasks) == {"alone"}


def test_a_session_leaked_and_collected_leaves_nothing_to_its_thread(shop: AsyncShop) -> None:
    session = Session(shop.engine)
    session.add(Order(id=1))
    shop.send("dropped")
    del session
    gc.collect()
    shop.send("alone")
    assert shop.tasks == ["alone"]


def test_a_session_handed_to_a_thread_that_works_in_it_is_not_passed_by(shop: AsyncShop) -> None:
    def work(session: Session) -> None:
        insert_order(session, 1)
        shop.send("1")

    with Session(shop.engine) as session:
        session.begin()
        with suppress(TransactionError):
            in_a_thread(work, session)
        session.rollback()
    assert shop.tasks == []


def test_a_session_begun_in_a_thread_and_used_here_is_not_passed_by(shop: AsyncShop) -> None:
    with Session(shop.engine) as session:
        in_a_thread(session.begin)
        insert_order(session, 1)
        with suppress(TransactionError):
            shop.send("1")
        session.rollback()
    assert shop.tasks == []


def test_using_carries_a_transaction_into_a_thread(shop: AsyncShop) -> None:
    def work(session: Session) -> None:
        with shop.outbox.using(session):
            shop.send("1")

    with Session(shop.engine) as session:
        session.add(Order(id=1))
        in_a_thread(work, session)
        session.commit()
    assert (shop.orders, shop.tasks) == ([1], ["1"])


def test_using_does_not_reach_a_thread_that_was_not_given_its_context(shop: AsyncShop) -> None:
    with Session(shop.engine) as session, shop.outbox.using(session):
        in_a_thread(shop.send, "alone")
        session.rollback()
    assert shop.tasks == ["alone"]


def test_using_reaches_a_thread_that_was_given_its_context(shop: AsyncShop) -> None:
    with Session(shop.engine) as session, shop.outbox.using(session):
        in_a_thread(contextvars.copy_context().run, shop.send, "1")
        session.commit()
    assert shop.tasks == ["1"]


def test_a_thread_given_the_context_of_an_open_transaction_is_refused(shop: AsyncShop) -> None:
    with Session(shop.engine) as session:
        session.begin()
        context = contextvars.copy_context()
        with pytest.raises(TransactionError, match="another began"):
            in_a_thread(context.run, shop.send, "1")
        session.rollback()
    in_a_thread(context.run, shop.send, "2")
    assert shop.tasks == ["2"]


def test_a_transaction_begun_in_a_copied_context_is_not_passed_by_outside_it(
    shop: AsyncShop,
) -> None:
    with Session(shop.engine) as session:
        context = contextvars.copy_context()
        context.run(session.begin)
        context.run(shop.send, "inside")
        with suppress(TransactionError):
            shop.send("outside")
        assert shop.tasks == []
        session.commit()
    assert shop.tasks[0] == "inside"


def test_a_scoped_session_gives_each_thread_its_own_transaction(shop: AsyncShop) -> None:
    registry = scoped_session(sessionmaker(shop.engine))
    is_sent = threading.Barrier(2, timeout=PATIENCE_SECONDS)

    def work(number: int) -> None:
        registry.add(Order(id=number))
        shop.send(str(number))
        is_sent.wait()
        (registry.commit if number else registry.rollback)()
        registry.remove()

    with ThreadPoolExecutor(2) as executor:
        list(executor.map(work, range(2)))
    assert (shop.orders, shop.tasks) == ([1], ["1"])


def test_connections_of_threads_never_mix(shop: AsyncShop) -> None:
    everyone = threading.Barrier(COUNT, timeout=PATIENCE_SECONDS)

    def work(number: int) -> None:
        with shop.engine.connect() as connection:
            insert_order(connection, number)
            everyone.wait()
            shop.send(str(number))
            everyone.wait()
            (connection.commit if number % 2 else connection.rollback)()

    with ThreadPoolExecutor(COUNT) as executor:
        list(executor.map(work, range(COUNT)))
    assert sorted(map(int, shop.tasks)) == shop.orders == list(range(1, COUNT, 2))
