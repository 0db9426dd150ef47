"""PgBouncer in transaction mode, between PostgreSQL and everything else."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import kombu.pools
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from celery_outbox import Outbox
from celery_outbox.storage.database import Database
from celery_outbox.storage.examination import examine
from celery_outbox.storage.install import install
from tests.relay.apps import make_outbox, relay_once, relaying, rows
from tests.relay.commands import environment, outbox_command, running
from tests.relay.wire import task_ids
from tests.storage.rows import add, claim, make_message
from tests.waiting import wait_until

#: As docs/databases.md says, for the engines of the application.
UNPREPARED = {"prepare_threshold": None}
UNPREPARED_ASYNC = {
    "statement_cache_size": 0,
    "prepared_statement_cache_size": 0,
    "prepared_statement_name_func": lambda: f"__asyncpg_{uuid4()}__",
}


@pytest.fixture
def engine(pgbouncer_url: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(pgbouncer_url, connect_args=UNPREPARED)
    yield engine
    engine.dispose()


@pytest.fixture
def open_outbox(redis_url: str) -> Iterator[Callable[..., Outbox]]:
    """Attach an outbox to an app, with an engine or a URL as its database."""
    made: list[Outbox] = []

    def open_(source: Any) -> Outbox:
        made.append(make_outbox(redis_url, source))
        return made[-1]

    yield open_
    for outbox in made:
        outbox.app.close()
    kombu.pools.reset()


def produce(outbox: Outbox, engine: sa.Engine) -> list[str]:
    """Commit 50 transactions, of one task and of thirteen in turn."""
    task, sent = outbox.app.tasks["shop.add"], list[str]()
    for number in range(50):
        with engine.begin() as connection, outbox.using(connection):
            for _ in range(13 if number % 2 else 1):
                sent.append(task.apply_async((1, 2), via_outbox=True).id)
    return sent


def test_producers_and_relays_share_two_connections_to_a_server(
    open_outbox: Callable[..., Outbox],
    engine: sa.Engine,
    pgbouncer_url: str,
    redis_url: str,
    tmp_path: Path,
) -> None:
    outbox = open_outbox(engine)
    # These open engines of their own; the relay in this process uses the producers'.
    command = outbox_command("relay", "--sleep", "0.05", "--batch", "10")
    env = environment(broker=redis_url, database=pgbouncer_url)
    with ExitStack() as stack:
        relays = [stack.enter_context(running(command, tmp_path, env)) for _ in range(2)]
        for relay in relays:
            relay.wait_for("Relaying from")
        stack.enter_context(relaying(outbox, batch=10))
        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(produce, outbox, engine) for _ in range(4)]
            sent = [task_id for future in futures for task_id in future.result()]
        wait_until(lambda: not rows(outbox), timeout=30, message="every delivery", interval=0.1)
        said = "".join(relay.output for relay in relays)
    assert Counter(task_ids(redis_url)) == Counter(sent)
    assert not [line for line in said.splitlines() if " INFO/" not in line]


def test_an_engine_of_the_outboxs_own_prepares_no_statements(pgbouncer_url: str) -> None:
    first, second = (Database("default", sa.make_url(pgbouncer_url), "celery_outbox") for _ in range(2))
    install(first)
    for number in range(30):
        database = second if number % 2 else first
        add(database, make_message(f"{number}"))
        made = claim(database)
        numbers = [message.id for message in made.messages]
        assert len(numbers) == 1
        database.run(partial(database.store.accept, token=made.token, ids=numbers, keep=False))


def test_the_tables_are_installed_and_checked(
    open_outbox: Callable[..., Outbox], engine: sa.Engine
) -> None:
    outbox = open_outbox(engine)
    outbox.install()
    assert examine(outbox.databases["default"]).faults == []


def test_asyncio_stores_through_it_and_a_relay_delivers(
    open_outbox: Callable[..., Outbox], pgbouncer_url: str, redis_url: str
) -> None:
    url = sa.make_url(pgbouncer_url).set(drivername="postgresql+asyncpg")
    engine = create_async_engine(url, connect_args=UNPREPARED_ASYNC)
    outbox = open_outbox(engine)
    task, sent = outbox.app.tasks["shop.add"], list[str]()

    async def store() -> None:
        for number in range(20):
            async with AsyncSession(engine) as session, session.begin():
                await session.execute(sa.text("SELECT 1"))
                for _ in range(13 if number % 2 else 1):
                    sent.append(task.apply_async((1, 2), via_outbox=True).id)

    async def store_side_by_side() -> None:
        await asyncio.gather(*(store() for _ in range(3)))
        await engine.dispose()

    asyncio.run(store_side_by_side())
    relay_once(outbox, batch=1000)
    assert Counter(task_ids(redis_url)) == Counter(sent)
