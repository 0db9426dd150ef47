"""A thread of the pool works for many requests, call after call, and a context may outlive its call:
none of it hides a request's transaction, or shows another's.
"""

import asyncio
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import anyio.from_thread
import anyio.to_thread
import pytest
import sqlalchemy as sa
from fastapi import Depends, FastAPI
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from celery_outbox import OutboxMiddleware
from celery_outbox.errors import TransactionError
from tests.capture.async_support import AsyncShop, lasting_shop, visitor
from tests.capture.shop import Order, insert_order

Work = Callable[[], Any]

endpoints = pytest.mark.parametrize("endpoint", ["sync", "async"])

span: contextvars.ContextVar[str] = contextvars.ContextVar("span")


@pytest.fixture(scope="module")
def lasting(request: pytest.FixtureRequest) -> Iterator[AsyncShop]:
    with lasting_shop(request, "asyncpg") as shop:
        yield shop


@pytest.fixture
def shop(lasting: AsyncShop) -> AsyncShop:
    lasting.clear()
    return lasting


@pytest.fixture
def api() -> FastAPI:
    api = FastAPI()
    api.add_middleware(OutboxMiddleware)
    return api


@pytest.fixture
def bare_api() -> FastAPI:
    """An API without the middleware."""
    return FastAPI()


def add_endpoint(api: FastAPI, kind: str, dependency: Callable[..., Any], work: Work) -> None:
    Given = Annotated[Any, Depends(dependency)]  # noqa: N806 - a type
    if kind == "sync":

        @api.get("/")
        def sync_endpoint(given: Given) -> None:
            work()

    else:

        @api.get("/")
        async def async_endpoint(given: Given) -> None:
            work()


def take_a_token() -> object:
    """What a tracing library does around a call: the token holds the context."""
    return span.set("work")


keepers = pytest.mark.parametrize("keep", [take_a_token, contextvars.copy_context])


def begun_and_kept(shop: AsyncShop, keep: Callable[[], object]) -> Callable[[], Iterator[Session]]:
    """A dependency whose context is kept as long as its session is open."""

    def dependency() -> Iterator[Session]:
        with Session(shop.engine) as session:
            session.add(Order(id=1))
            session.flush()
            kept = keep()
            yield session
            session.commit()
            del kept

    return dependency


@endpoints
@keepers
def test_a_dependency_whose_context_is_kept_is_found(
    shop: AsyncShop, api: FastAPI, keep: Callable[[], object], endpoint: str
) -> None:
    stored_before_the_end: list[str] = []

    def work() -> None:
        shop.send("1")
        stored_before_the_end.extend(shop.tasks)

    add_endpoint(api, endpoint, begun_and_kept(shop, keep), work)
    shop.visit(api)
    assert (stored_before_the_end, shop.orders, shop.tasks) == ([], [1], ["1"])


@endpoints
@keepers
def test_without_the_middleware_a_dependency_whose_context_is_kept_is_not_passed_by(
    shop: AsyncShop, bare_api: FastAPI, keep: Callable[[], object], endpoint: str
) -> None:
    add_endpoint(bare_api, endpoint, begun_and_kept(shop, keep), lambda: shop.send("1"))
    with pytest.raises(TransactionError, match="OutboxMiddleware"):
        shop.visit(bare_api)
    assert (shop.orders, shop.tasks) == ([], [])


def test_a_dependency_is_not_passed_by_while_its_thread_is_slow_to_end_its_call(
    shop: AsyncShop, bare_api: FastAPI
) -> None:
    def dependency() -> Iterator[Session]:
        with Session(shop.engine) as session:
            session.begin()
            yield session

    add_endpoint(bare_api, "async", dependency, lambda: shop.send("1"))
    with busy_thread(switch_seconds=0.05):
        for _ in range(5):
            with suppress(TransactionError):
                shop.visit(bare_api)
    assert shop.tasks == []


@contextmanager
def busy_thread(switch_seconds: float) -> Iterator[None]:
    """Let another thread have the interpreter, for so long each time that it wants it."""
    is_over = threading.Event()

    def burn() -> None:
        while not is_over.is_set():
            sum(range(1000))

    burner, usual = threading.Thread(target=burn), sys.getswitchinterval()
    sys.setswitchinterval(switch_seconds)
    burner.start()
    try:
        yield
    finally:
        is_over.set()
        burner.join()
        sys.setswitchinterval(usual)


@endpoints
@pytest.mark.parametrize("has_middleware", [True, False])
def test_using_around_the_yield_of_a_sync_dependency_stores_with_it_or_is_refused(
    shop: AsyncShop, api: FastAPI, bare_api: FastAPI, endpoint: str, has_middleware: bool
) -> None:
    def dependency() -> Iterator[Session]:
        with Session(shop.engine) as session, session.begin(), shop.outbox.using(session):
            session.add(Order(id=1))
            yield session

    visited = api if has_middleware else bare_api
    add_endpoint(visited, endpoint, dependency, lambda: shop.send("1"))
    try:
        shop.visit(visited)
    except TransactionError:
        assert not has_middleware
        assert (shop.orders, shop.tasks) == ([], [])
    else:
        assert (shop.orders, shop.tasks) == ([1], ["1"])


@endpoints
def test_using_around_the_yield_of_an_async_dependency_needs_no_middleware(
    shop: AsyncShop, bare_api: FastAPI, endpoint: str
) -> None:
    async def dependency() -> Any:
        with Session(shop.engine) as session, session.begin(), shop.outbox.using(session):
            session.add(Order(id=1))
            yield session

    add_endpoint(bare_api, endpoint, dependency, lambda: shop.send("1"))
    shop.visit(bare_api)
    assert (shop.orders, shop.tasks) == ([1], ["1"])


@endpoints
def test_a_connection_from_a_dependency_is_found(shop: AsyncShop, api: FastAPI, endpoint: str) -> None:
    def dependency() -> Iterator[sa.Connection]:
        with shop.engine.begin() as connection:
            insert_order(connection, 1)
            yield connection

    add_endpoint(api, endpoint, dependency, lambda: shop.send("1"))
    shop.visit(api)
    assert (shop.orders, shop.tasks) == ([1], ["1"])


@pytest.mark.parametrize("has_middleware", [True, False])
def test_one_thread_that_works_for_two_requests_does_not_mix_them(
    shop: AsyncShop, api: FastAPI, bare_api: FastAPI, has_middleware: bool
) -> None:
    visited = api if has_middleware else bare_api
    is_open, may_end = asyncio.Event(), asyncio.Event()
    threads: set[int] = set()

    def dependency() -> Iterator[Session]:
        threads.add(threading.get_ident())
        with Session(shop.engine) as session:
            session.begin()
            yield session

    @visited.get("/with")
    async def endpoint_with_a_session(session: Annotated[Session, Depends(dependency)]) -> None:
        is_open.set()
        await may_end.wait()

    @visited.get("/without")
    def endpoint_without_a_session() -> str:
        threads.add(threading.get_ident())
        try:
            shop.send("1")
        except TransactionError:
            return "refused"
        return "stored"

    async def main() -> str:
        anyio.to_thread.current_default_thread_limiter().total_tokens = 1
        async with visitor(visited) as client, asyncio.TaskGroup() as tasks:
            tasks.create_task(client.get("/with"))
            await is_open.wait()
            response = await client.get("/without")
            may_end.set()
            return str(response.json())

    outcome = shop.run(main)
    assert len(threads) == 1
    assert (outcome, shop.tasks) == (("stored", ["1"]) if has_middleware else ("refused", []))


@pytest.mark.parametrize("call", [run_in_threadpool, asyncio.to_thread])
def test_threads_that_an_endpoint_waits_for_find_its_transaction(
    shop: AsyncShop, api: FastAPI, call: Callable[..., Any]
) -> None:
    @api.get("/")
    async def endpoint() -> None:
        async with shop.session() as session, session.begin():
            session.add(Order(id=1))
            await session.flush()
            await asyncio.gather(*(call(shop.send, str(number)) for number in range(5)))

    shop.visit(api)
    assert (shop.orders, sorted(shop.tasks)) == ([1], ["0", "1", "2", "3", "4"])


@pytest.mark.parametrize("has_middleware", [True, False])
def test_a_thread_is_not_given_the_transaction_of_another_child_of_its_task(
    shop: AsyncShop, api: FastAPI, bare_api: FastAPI, has_middleware: bool
) -> None:
    visited = api if has_middleware else bare_api

    @visited.get("/")
    async def endpoint() -> str:
        is_open, may_end = asyncio.Event(), asyncio.Event()

        async def child() -> None:
            async with shop.session() as session:
                await session.begin()
                is_open.set()
                await may_end.wait()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(child())
            await is_open.wait()
            try:
                await run_in_threadpool(shop.send, "1")
            except TransactionError:
                return "refused"
            finally:
                may_end.set()
        return "stored"

    assert (shop.visit(visited).json(), shop.tasks) in [("stored", ["1"]), ("refused", [])]


def test_a_coroutine_that_a_sync_endpoint_runs_in_the_loop_is_refused_or_stored_with_it(
    shop: AsyncShop, api: FastAPI
) -> None:
    async def send() -> None:
        shop.send("1")

    @api.get("/")
    def endpoint() -> None:
        with Session(shop.engine) as session:
            session.begin()
            with suppress(TransactionError):
                anyio.from_thread.run(send)

    shop.visit(api)
    assert shop.tasks == []


def test_tasks_left_behind_by_an_ended_request_are_strangers_to_each_other(
    shop: AsyncShop, api: FastAPI
) -> None:
    is_open, may_end, request_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    jobs: list[asyncio.Task[None]] = []

    async def with_a_transaction() -> None:
        async with shop.session() as session:
            await session.begin()
            is_open.set()
            await may_end.wait()

    async def without() -> None:
        await request_ended.wait()
        await is_open.wait()
        shop.send("1")

    @api.get("/")
    async def endpoint() -> None:
        jobs.extend([asyncio.create_task(with_a_transaction()), asyncio.create_task(without())])

    async def main() -> None:
        async with visitor(api) as client:
            await client.get("/")
        request_ended.set()
        try:
            await jobs[1]
        finally:
            may_end.set()
            await jobs[0]

    shop.run(main)
    assert shop.tasks == ["1"]
