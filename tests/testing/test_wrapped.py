"""Tests inside a transaction that is rolled back: what the application commits is a savepoint of it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from celery_outbox.testing import OutboxRecorder
from tests.testing.conftest import OpenShop, Order, Shop, first_arguments

OpenSession = Callable[[], Session]


@pytest.fixture
def shop(url: str, open_shop: OpenShop) -> Shop:
    return open_shop(url)


@pytest.fixture
def open_session(shop: Shop) -> Iterator[OpenSession]:
    """The application's sessionmaker, all of whose Sessions work in one transaction of the test."""
    with shop.engine.connect() as connection:
        transaction = connection.begin()
        yield sessionmaker(connection, join_transaction_mode="create_savepoint")
        transaction.rollback()


def test_what_the_application_commits_is_stored(
    shop: Shop, outbox: OutboxRecorder, open_session: OpenSession
) -> None:
    with open_session() as session:
        session.add(Order(id=1))
        shop.send(1)
        assert first_arguments(outbox.pending) == [1]
        session.commit()
        outbox.assert_stored(shop.receipt, args=[1], count=1)
        session.add(Order(id=2))
        shop.send(2)
        session.commit()
    with open_session() as session, session.begin():
        shop.send(3)
    assert first_arguments(outbox.stored) == [1, 2, 3]


def test_what_is_dispatched_outside_a_session_is_stored_in_the_tests_transaction(
    shop: Shop, outbox: OutboxRecorder, open_session: OpenSession
) -> None:
    shop.send(1)
    with open_session() as session:
        session.add(Order(id=1))
        session.commit()
        shop.send(2)
    assert first_arguments(outbox.stored) == [1, 2]
    assert shop.rows() == 0


def test_what_the_application_commits_is_gone_after_the_test(
    shop: Shop, outbox: OutboxRecorder
) -> None:
    with shop.engine.connect() as connection:
        transaction = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            session.add(Order(id=1))
            shop.send(1)
            session.commit()
        lying = connection.scalar(sa.text("SELECT count(*) FROM celery_outbox"))
        outbox.assert_stored(shop.receipt)
        transaction.rollback()
    assert (lying, shop.rows()) == (1, 0)


@pytest.mark.parametrize("end", [Session.rollback, Session.close])
def test_what_the_application_does_not_commit_is_rolled_back(
    shop: Shop, outbox: OutboxRecorder, open_session: OpenSession, end: Callable[[Session], None]
) -> None:
    with open_session() as session:
        session.add(Order(id=1))
        shop.send(1)
        session.commit()
        session.add(Order(id=2))
        shop.send(2)
        end(session)
        session.add(Order(id=3))
        shop.send(3)
        session.commit()
    assert first_arguments(outbox.stored) == [1, 3]
    assert first_arguments(outbox.rolled_back) == [2]


def test_savepoints_of_the_application_roll_back_what_was_dispatched_since(
    shop: Shop, outbox: OutboxRecorder, open_session: OpenSession
) -> None:
    with open_session() as session, session.begin():
        shop.send(1)
        with pytest.raises(LookupError), session.begin_nested():
            shop.send(2)
            raise LookupError
        with session.begin_nested():
            shop.send(3)
    assert first_arguments(outbox.stored) == [1, 3]
    assert first_arguments(outbox.rolled_back) == [2]


def test_a_fake_records_the_same_in_a_wrapped_test_and_writes_nothing(
    shop: Shop, outbox_fake: OutboxRecorder
) -> None:
    with shop.engine.connect() as connection:
        transaction = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            session.begin()
            shop.send(1)
            assert first_arguments(outbox_fake.pending) == [1]
            session.commit()
            session.begin()
            shop.send(2)
            session.rollback()
        lying = connection.scalar(sa.text("SELECT count(*) FROM celery_outbox"))
        assert lying == 0
        assert first_arguments(outbox_fake.stored) == [1]
        assert first_arguments(outbox_fake.rolled_back) == [2]
        transaction.rollback()


def test_stored_tasks_are_drained_before_the_test_rolls_back(
    shop: Shop, outbox: OutboxRecorder, open_session: OpenSession
) -> None:
    @shop.task()
    def count_orders() -> int:
        with open_session() as session:
            return session.query(Order).count()

    with open_session() as session:
        session.add(Order(id=1))
        count_orders.apply_async(via_outbox=True)
        session.commit()
    [result] = outbox.drain()
    assert result.get() == 1


def test_an_async_session_counts_like_any_other(url: str, open_shop: OpenShop) -> None:
    shop = open_shop(url)
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql+psycopg": "postgresql+asyncpg"}
    engine = create_async_engine(sa.make_url(url).set(drivername=drivers[shop.engine.url.drivername]))

    @asynccontextmanager
    async def wrapped() -> AsyncIterator[Callable[[], AsyncSession]]:
        async with engine.connect() as connection:
            transaction = await connection.begin()
            yield lambda: AsyncSession(connection, join_transaction_mode="create_savepoint")
            await transaction.rollback()
        await engine.dispose()

    async def test() -> None:
        with OutboxRecorder(shop.app) as outbox:
            async with wrapped() as open_session, open_session() as session:
                session.add(Order(id=1))
                await session.flush()
                shop.send(1)
                assert first_arguments(outbox.pending) == [1]
                await session.commit()
                session.add(Order(id=2))
                shop.send(2)
                await session.rollback()
                assert first_arguments(outbox.stored) == [1]
                assert first_arguments(outbox.rolled_back) == [2]

    asyncio.run(test())
    assert shop.rows() == 0
