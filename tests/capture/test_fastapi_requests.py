"""What surrounds an endpoint: other middleware, background tasks, websockets, streams, lifespans."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import pytest
from fastapi import BackgroundTasks, Depends, FastAPI, HTTPException, Request, Response, WebSocket
from fastapi.responses import StreamingResponse
from sqlalchemy.orm import Session

from celery_outbox import OutboxMiddleware
from celery_outbox.errors import TransactionError
from tests.capture.async_support import AsyncShop, lasting_shop, visitor
from tests.capture.shop import Order

CallNext = Callable[[Request], Awaitable[Response]]
Dependency = Callable[[], Iterator[Session]]

endpoints = pytest.mark.parametrize("endpoint", ["sync", "async"])


@pytest.fixture(scope="module")
def lasting(request: pytest.FixtureRequest) -> Iterator[AsyncShop]:
    with lasting_shop(request, "asyncpg") as shop:
        yield shop


@pytest.fixture
def shop(lasting: AsyncShop) -> AsyncShop:
    lasting.clear()
    return lasting


@pytest.fixture
def committing(shop: AsyncShop) -> Dependency:
    """A dependency whose transaction is used and committed in threads of the pool."""

    def dependency() -> Iterator[Session]:
        with Session(shop.engine) as session:
            session.add(Order(id=1))
            session.flush()
            yield session
            session.commit()

    return dependency


@pytest.fixture
def rolling_back(shop: AsyncShop) -> Dependency:
    def dependency() -> Iterator[Session]:
        with Session(shop.engine) as session:
            session.add(Order(id=1))
            session.flush()
            yield session
            session.rollback()

    return dependency


@pytest.fixture
def api() -> FastAPI:
    api = FastAPI()
    api.add_middleware(OutboxMiddleware)
    return api


def add_sending_endpoint(api: FastAPI, shop: AsyncShop, kind: str, dependency: Dependency) -> None:
    if kind == "sync":

        @api.get("/")
        def sync_endpoint(session: Annotated[Session, Depends(dependency)]) -> None:
            shop.send("1")

    else:

        @api.get("/")
        async def async_endpoint(session: Annotated[Session, Depends(dependency)]) -> None:
            shop.send("1")


@endpoints
@pytest.mark.parametrize("side", ["inside", "outside"])
def test_a_users_http_middleware_may_stand_on_either_side_of_ours(
    shop: AsyncShop, committing: Dependency, endpoint: str, side: str
) -> None:
    api = FastAPI()
    if side == "outside":
        api.add_middleware(OutboxMiddleware)

    @api.middleware("http")
    async def users_own(request: Request, call_next: CallNext) -> Response:
        return await call_next(request)

    if side == "inside":
        api.add_middleware(OutboxMiddleware)
    add_sending_endpoint(api, shop, endpoint, committing)
    shop.visit(api)
    assert (shop.orders, shop.tasks) == ([1], ["1"])


@endpoints
@pytest.mark.parametrize("side", ["inside", "outside", "absent"])
def test_a_transaction_begun_in_a_users_http_middleware_is_found_or_refused(
    shop: AsyncShop, endpoint: str, side: str
) -> None:
    api = FastAPI()
    if side == "outside":
        api.add_middleware(OutboxMiddleware)

    @api.middleware("http")
    async def users_own(request: Request, call_next: CallNext) -> Response:
        with Session(shop.engine) as session:
            session.begin()
            response = await call_next(request)
            session.rollback()
            return response

    if side == "inside":
        api.add_middleware(OutboxMiddleware)

    outcomes: list[str] = []

    def send() -> None:
        try:
            shop.send("1")
            outcomes.append("found")
        except TransactionError:
            outcomes.append("refused")

    if endpoint == "sync":
        api.get("/")(lambda: send())
    else:

        @api.get("/")
        async def async_endpoint() -> None:
            send()

    shop.visit(api)
    assert len(outcomes) == 1
    assert shop.tasks == []


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_background_task_after_the_sessions_end_stores_alone(
    shop: AsyncShop, api: FastAPI, rolling_back: Dependency, kind: str
) -> None:
    def sync_task() -> None:
        shop.send("background")

    async def async_task() -> None:
        shop.send("background")

    @api.get("/")
    def endpoint(
        background: BackgroundTasks,
        session: Annotated[Session, Depends(rolling_back, scope="function")],
    ) -> None:
        shop.send("endpoint")
        background.add_task(sync_task if kind == "sync" else async_task)

    shop.visit(api)
    assert shop.tasks == ["background"]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_background_task_before_the_sessions_end_stores_in_its_transaction(
    shop: AsyncShop, api: FastAPI, committing: Dependency, kind: str
) -> None:
    stored_before_the_end: list[str] = []

    def sync_task() -> None:
        shop.send("background")
        stored_before_the_end.extend(shop.tasks)

    async def async_task() -> None:
        sync_task()

    @api.get("/")
    def endpoint(background: BackgroundTasks, session: Annotated[Session, Depends(committing)]) -> None:
        background.add_task(sync_task if kind == "sync" else async_task)

    shop.visit(api)
    assert (stored_before_the_end, shop.tasks) == ([], ["background"])


@endpoints
def test_an_endpoint_without_a_session_stores_alone_while_others_have_transactions(
    shop: AsyncShop, api: FastAPI, rolling_back: Dependency, endpoint: str
) -> None:
    is_open, may_end = asyncio.Event(), asyncio.Event()

    @api.get("/with")
    async def endpoint_with_a_session(session: Annotated[Session, Depends(rolling_back)]) -> None:
        is_open.set()
        await asyncio.wait_for(may_end.wait(), 20)
        shop.send("with")

    if endpoint == "sync":

        @api.get("/without")
        def sync_endpoint() -> None:
            shop.send("without")

    else:

        @api.get("/without")
        async def async_endpoint() -> None:
            shop.send("without")

    async def main() -> None:
        async with visitor(api) as client, asyncio.TaskGroup() as tasks:
            tasks.create_task(client.get("/with"))
            await asyncio.wait_for(is_open.wait(), 20)
            await client.get("/without")
            may_end.set()

    shop.run(main)
    assert shop.tasks == ["without"]


@endpoints
def test_an_endpoint_that_raises_takes_its_tasks_back(
    shop: AsyncShop, api: FastAPI, committing: Dependency, endpoint: str
) -> None:
    def fail() -> None:
        shop.send("1")
        raise HTTPException(418)

    if endpoint == "sync":

        @api.get("/")
        def sync_endpoint(session: Annotated[Session, Depends(committing)]) -> None:
            fail()

    else:

        @api.get("/")
        async def async_endpoint(session: Annotated[Session, Depends(committing)]) -> None:
            fail()

    assert shop.visit(api).status_code == 418
    assert (shop.orders, shop.tasks) == ([], [])


def test_a_dependency_may_send_before_and_after_its_endpoint(shop: AsyncShop, api: FastAPI) -> None:
    def dependency() -> Iterator[Session]:
        with Session(shop.engine) as session:
            session.begin()
            shop.send("before")
            yield session
            shop.send("after")
            session.commit()

    @api.get("/")
    def endpoint(session: Annotated[Session, Depends(dependency)]) -> None:
        session.add(Order(id=1))
        shop.send("endpoint")

    shop.visit(api)
    assert (shop.orders, shop.tasks) == ([1], ["before", "endpoint", "after"])


def test_two_open_sessions_of_a_request_are_ambiguous(
    shop: AsyncShop, api: FastAPI, committing: Dependency
) -> None:
    def another() -> Iterator[Session]:
        with Session(shop.engine) as session:
            session.begin()
            yield session

    @api.get("/")
    def endpoint(
        one: Annotated[Session, Depends(committing)], other: Annotated[Session, Depends(another)]
    ) -> None:
        shop.send("1")

    with pytest.raises(TransactionError, match="found several"):
        shop.visit(api)
    assert shop.tasks == []


@endpoints
def test_a_session_of_the_endpoint_beside_the_dependencys_is_ambiguous(
    shop: AsyncShop, api: FastAPI, committing: Dependency, endpoint: str
) -> None:
    def send_in_another_session() -> None:
        with Session(shop.engine) as session, session.begin():
            shop.send("1")

    if endpoint == "sync":

        @api.get("/")
        def sync_endpoint(session: Annotated[Session, Depends(committing)]) -> None:
            send_in_another_session()

    else:

        @api.get("/")
        async def async_endpoint(session: Annotated[Session, Depends(committing)]) -> None:
            send_in_another_session()

    with pytest.raises(TransactionError, match="found several"):
        shop.visit(api)
    assert shop.tasks == []


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_stream_sends_in_the_transaction_that_is_open_or_is_refused(
    shop: AsyncShop, api: FastAPI, rolling_back: Dependency, kind: str
) -> None:
    outcomes: list[str] = []

    def send() -> str:
        try:
            shop.send("1")
        except TransactionError:
            outcomes.append("refused")
        else:
            outcomes.append("found")
        return "sent"

    def sync_body() -> Iterator[str]:
        yield send()

    async def async_body() -> AsyncIterator[str]:
        yield send()

    @api.get("/")
    def endpoint(session: Annotated[Session, Depends(rolling_back)]) -> StreamingResponse:
        return StreamingResponse(sync_body() if kind == "sync" else async_body())

    assert shop.visit(api).text == "sent"
    assert len(outcomes) == 1
    assert shop.tasks == []


def test_a_websocket_endpoint_finds_its_dependencys_transaction(
    shop: AsyncShop, api: FastAPI, committing: Dependency
) -> None:
    @api.websocket("/")
    async def endpoint(websocket: WebSocket, session: Annotated[Session, Depends(committing)]) -> None:
        await websocket.accept()
        shop.send(await websocket.receive_text())
        await websocket.close()

    events = [{"type": "websocket.connect"}, {"type": "websocket.receive", "text": "1"}]
    sent = asyncio.run(speak(api, {"type": "websocket", "path": "/"}, events))
    assert [each["type"] for each in sent] == ["websocket.accept", "websocket.close"]
    assert (shop.orders, shop.tasks) == ([1], ["1"])


def test_a_lifespan_passes_through_the_middleware(shop: AsyncShop) -> None:
    @asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncIterator[None]:
        shop.send("started")
        with Session(shop.engine) as session, session.begin():
            shop.send("in a transaction")
        yield
        shop.send("stopped")

    api = FastAPI(lifespan=lifespan)
    api.add_middleware(OutboxMiddleware)
    events = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent = asyncio.run(speak(api, {"type": "lifespan"}, events))
    assert [each["type"] for each in sent] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
    ]
    assert shop.tasks == ["started", "in a transaction", "stopped"]


async def speak(
    api: FastAPI, scope: dict[str, Any], events: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Speak ASGI with an API: it receives the events, we what it sends."""
    sent: list[dict[str, Any]] = []
    coming = iter(events)

    async def receive() -> Any:
        return next(coming)

    async def send(message: Any) -> None:
        sent.append(message)

    await api({"headers": [], "query_string": b"", "state": {}, **scope}, receive, send)
    return sent
