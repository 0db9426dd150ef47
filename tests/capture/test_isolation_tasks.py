"""Asyncio tasks: each sees its own transactions, and is told when only another's is open."""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from celery_outbox.errors import TransactionError
from tests.capture.async_support import PATIENCE_SECONDS, AsyncShop, lasting_shop
from tests.capture.shop import Order

Work = Callable[[], Awaitable[Any]]


@pytest.fixture(scope="module")
def lasting(request: pytest.FixtureRequest) -> Iterator[AsyncShop]:
    with lasting_shop(request, "asyncpg") as shop:
        yield shop


@pytest.fixture
def shop(lasting: AsyncShop) -> AsyncShop:
    lasting.clear()
    return lasting


async def begin_by_begin(session: AsyncSession) -> None:
    await session.begin()


async def begin_by_adding(session: AsyncSession) -> None:
    session.add(Order(id=1))


async def begin_by_sql(session: AsyncSession) -> None:
    await session.run_sync(lambda it: it.add(Order(id=1)))
    await session.flush()


beginnings = pytest.mark.parametrize("begin", [begin_by_begin, begin_by_adding, begin_by_sql])


async def in_a_new_task(work: Work) -> None:
    await asyncio.create_task(work())  # type: ignore[arg-type]


async def gathered(work: Work) -> None:
    await asyncio.gather(work())


async def in_a_task_group(work: Work) -> None:
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(work())  # type: ignore[arg-type]
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


async def waited_for(work: Work) -> None:
    await asyncio.wait_for(asyncio.shield(work()), PATIENCE_SECONDS)


children = pytest.mark.parametrize("start", [in_a_new_task, gathered, in_a_task_group, waited_for])


@beginnings
@children
def test_a_child_of_a_task_with_an_open_transaction_is_refused(
    shop: AsyncShop, start: Callable[[Work], Coroutine[Any, Any, None]], begin: Callable[..., Any]
) -> None:
    async def child() -> None:
        shop.send("1")

    async def main() -> None:
        async with shop.session() as session:
            await begin(session)
            with pytest.raises(TransactionError, match=r"another began.*outbox\.using"):
                await start(child)
            await session.rollback()

    shop.run(main)
    assert shop.tasks == []


@children
def test_a_child_stores_alone_once_its_parents_transaction_has_ended(
    shop: AsyncShop, start: Callable[[Work], Coroutine[Any, Any, None]]
) -> None:
    async def child() -> None:
        shop.send("1")

    async def main() -> None:
        async with shop.session() as session:
            await begin_by_sql(session)
            await session.rollback()
            await start(child)
        async with shop.session() as session, session.begin():
            await begin_by_sql(session)
        await start(child)

    shop.run(main)
    assert shop.tasks == ["1", "1"]


@children
def test_a_child_with_a_transaction_of_its_own_stores_in_it(
    shop: AsyncShop, start: Callable[[Work], Coroutine[Any, Any, None]]
) -> None:
    async def child() -> None:
        async with shop.session() as session, session.begin():
            session.add(Order(id=2))
            shop.send("child")

    async def main() -> None:
        async with shop.session() as session:
            session.add(Order(id=1))
            await session.flush()
            await start(child)
            shop.send("parent")
            await session.rollback()

    shop.run(main)
    assert (shop.orders, shop.tasks) == ([2], ["child"])


@beginnings
def test_a_thread_of_a_task_with_an_open_transaction_is_refused(
    shop: AsyncShop, begin: Callable[..., Any]
) -> None:
    async def main() -> None:
        async with shop.session() as session:
            await begin(session)
            with pytest.raises(TransactionError, match="another began"):
                await asyncio.to_thread(shop.send, "1")
            await session.commit()
        await asyncio.to_thread(shop.send, "2")

    shop.run(main)
    assert shop.tasks == ["2"]


@children
def test_a_transaction_begun_in_a_task_that_has_ended_is_not_passed_by(
    shop: AsyncShop, start: Callable[[Work], Coroutine[Any, Any, None]]
) -> None:
    async def main() -> None:
        async with shop.session() as session:
            # On Python 3.11 wait_for alone makes such a task.
            await start(lambda: begin_by_sql(session))
            with suppress(TransactionError):
                shop.send("1")
            await session.rollback()

    shop.run(main)
    assert shop.tasks == []


def test_a_session_begun_in_a_thread_and_left_open_is_not_passed_by(shop: AsyncShop) -> None:
    def begin(session: Session) -> None:
        session.add(Order(id=1))
        session.flush()

    async def main() -> None:
        with Session(shop.engine) as session:
            await asyncio.to_thread(begin, session)
            with pytest.raises(TransactionError, match="another began"):
                shop.send("1")
            await asyncio.to_thread(session.rollback)
        shop.send("2")

    shop.run(main)
    assert shop.tasks == ["2"]


def test_interleaved_tasks_with_a_session_each_never_mix(shop: AsyncShop) -> None:
    async def work(number: int, mine: asyncio.Event, other: asyncio.Event) -> None:
        async with shop.session() as session:
            for step in range(3):
                shop_number = 10 * number + step
                session.add(Order(id=shop_number))
                shop.send(str(shop_number))
                await session.flush()
                mine.set()
                await asyncio.wait_for(other.wait(), 20)
                other.clear()
            await (session.commit() if number % 2 else session.rollback())
            mine.set()

    async def main() -> None:
        one, other = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(work(1, one, other))
            tasks.create_task(work(2, other, one))

    shop.run(main)
    assert (shop.orders, sorted(shop.tasks)) == ([10, 11, 12], ["10", "11", "12"])


def test_a_task_without_a_transaction_is_not_bothered_by_another_tasks(shop: AsyncShop) -> None:
    async def main() -> None:
        is_open = asyncio.Event()

        async def unrelated() -> None:
            await asyncio.wait_for(is_open.wait(), 20)
            shop.send("unrelated")

        task = asyncio.create_task(unrelated())
        async with shop.session() as session:
            await begin_by_sql(session)
            shop.send("rolled back")
            is_open.set()
            await task
            await session.rollback()

    shop.run(main)
    assert shop.tasks == ["unrelated"]


def test_a_task_in_an_empty_context_is_not_bothered_by_the_one_that_made_it(
    shop: AsyncShop,
) -> None:
    async def unrelated() -> None:
        shop.send("unrelated")

    async def main() -> None:
        async with shop.session() as session:
            await begin_by_sql(session)
            await asyncio.create_task(unrelated(), context=contextvars.Context())
            await session.rollback()

    shop.run(main)
    assert shop.tasks == ["unrelated"]


def test_a_copied_context_in_the_same_task_finds_the_tasks_transaction(shop: AsyncShop) -> None:
    async def main() -> None:
        async with shop.session() as session:
            context = contextvars.copy_context()
            session.add(Order(id=1))
            context.run(shop.send, "1")
            contextvars.Context().run(shop.send, "2")
            await session.commit()

    shop.run(main)
    assert shop.tasks == ["1", "2"]


def test_using_reaches_the_children_of_its_block(shop: AsyncShop) -> None:
    async def child() -> None:
        shop.send("child")

    async def main() -> None:
        async with shop.session() as session:
            await session.begin()
            with shop.outbox.using(session):
                await asyncio.gather(child(), asyncio.to_thread(shop.send, "thread"))
            await session.commit()

    shop.run(main)
    assert sorted(shop.tasks) == ["child", "thread"]


def test_a_loop_inside_a_thread_with_a_transaction_is_refused(shop: AsyncShop) -> None:
    async def main() -> None:
        shop.send("1")

    with Session(shop.engine) as session:
        session.begin()
        with pytest.raises(TransactionError, match="another began"):
            shop.run(main)
    shop.run(main)
    assert shop.tasks == ["1"]


def test_a_cancelled_task_takes_its_tasks_with_it(shop: AsyncShop) -> None:
    async def main() -> None:
        is_sent = asyncio.Event()

        async def work() -> None:
            async with shop.session() as session, session.begin():
                session.add(Order(id=1))
                await session.flush()
                shop.send("1")
                is_sent.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await is_sent.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        shop.send("2")

    shop.run(main)
    assert (shop.orders, shop.tasks) == ([], ["2"])
