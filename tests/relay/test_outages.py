"""Broker and result backend away at the dispatch: nobody is waited for, nothing is lost."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery, group
from celery.result import AsyncResult
from sqlalchemy.orm import Session

from celery_outbox import Outbox
from tests.processes import HOST, unused_port
from tests.proxy import TcpProxy
from tests.relay.apps import make_due, relay_once, relaying, rows, send
from tests.relay.conftest import OpenOutbox
from tests.relay.wire import task_ids
from tests.storage.rows import make_message
from tests.waiting import wait_until

MakeProxy = Callable[[str, int], TcpProxy]

BROKERS = {
    "redis": "redis://{address}/0",
    "amqp": "amqp://guest:guest@{address}//",
    "sqs": "sqs://key:secret@{address}",
    "database": "sqla+postgresql+psycopg://outbox:secret@{address}/broker",
}
BACKENDS = {
    "redis": "redis://{address}/1",
    "database": "db+postgresql+psycopg://outbox:secret@{address}/results",
    "rpc": "rpc://",
}


def send_plain(app: Celery) -> list[AsyncResult]:
    return [app.tasks["shop.add"].apply_async((1, 2), via_outbox=True)]


def send_delayed(app: Celery) -> list[AsyncResult]:
    return [app.tasks["shop.add"].apply_async((1, 2), via_outbox=True, countdown=60)]


def send_expiring(app: Celery) -> list[AsyncResult]:
    return [app.tasks["shop.add"].apply_async((1, 2), via_outbox=True, expires=60)]


def send_group(app: Celery) -> list[AsyncResult]:
    task = app.tasks["shop.add"]
    result = group(task.s(number, 1) for number in range(5)).apply_async(via_outbox=True)
    return list(result.results)


DISPATCHES = [send_plain, send_delayed, send_expiring, send_group]


@pytest.fixture
def nowhere(tcp_proxy: MakeProxy) -> TcpProxy:
    """Counts who connects; behind it there is nobody."""
    return tcp_proxy(HOST, unused_port())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("broker", BROKERS)
def test_a_dispatch_and_its_commit_return_at_once_and_connect_to_nobody(
    broker: str, backend: str, nowhere: TcpProxy, open_outbox: OpenOutbox, postgresql_url: str
) -> None:
    address = f"{nowhere.host}:{nowhere.port}"
    outbox = open_outbox(
        BROKERS[broker].format(address=address),
        postgresql_url,
        config={"result_backend": BACKENDS[backend].format(address=address)},
    )
    ids = []
    for dispatch in DISPATCHES:
        with session_of(outbox) as session:
            session.execute(sa.select(1))
            began = time.monotonic()
            results = dispatch(outbox.app)
            session.commit()
            assert time.monotonic() - began < 1, dispatch.__name__
        ids += [result.id for result in results]
    assert [row.task_id for row in rows(outbox)] == ids
    assert nowhere.accepted == 0


def session_of(outbox: Outbox) -> Session:
    """Begin to work in the default database."""
    bind = outbox.settings.databases["default"]
    assert isinstance(bind, sa.Engine)
    return Session(bind)


def test_a_closed_port_is_not_knocked_at_either(open_outbox: OpenOutbox, sqlite_url: str) -> None:
    address = f"{HOST}:{unused_port()}"
    for number, broker in enumerate(BROKERS.values()):
        outbox = open_outbox(
            broker.format(address=address),
            sqlite_url,
            config={"result_backend": f"redis://{address}/1"},
            name=f"shop {number}",
        )
        began = time.monotonic()
        for dispatch in DISPATCHES:
            dispatch(outbox.app)
        assert time.monotonic() - began < 4


def assert_delivered_when_back(outbox: Outbox, url: str, come_back: Callable[[], Any]) -> None:
    stored = [send(outbox) for _ in range(5)]
    relay_once(outbox)
    waiting = rows(outbox)
    assert [(row.task_id, row.attempts, row.claim_token) for row in waiting] == [
        (task_id, 0, None) for task_id in stored
    ]
    come_back()
    relay_once(outbox)
    assert task_ids(url) == stored
    assert rows(outbox) == []


@pytest.mark.parametrize("server", ["redis", "rabbitmq"])
def test_what_was_stored_while_the_broker_was_down_is_delivered_when_it_is_back(
    server: str, open_outbox: OpenOutbox, sqlite_url: str, tcp_proxy: MakeProxy, request: Any
) -> None:
    url = request.getfixturevalue(f"{server}_url")
    port = int(url.rpartition("/")[0].rpartition(":")[2])
    proxy = tcp_proxy(HOST, port)
    proxy.refuse()
    outbox = open_outbox(proxy.through(url), sqlite_url)
    assert_delivered_when_back(outbox, url, proxy.listen)


# Kombu's tables use what SQLAlchemy 2.1 calls deprecated.
@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
def test_a_broken_database_broker_delivers_when_it_is_repaired(
    open_outbox: OpenOutbox, sqlite_url: str, tmp_path: Path
) -> None:
    directory = tmp_path / "broker"
    url = f"sqla+sqlite:///{directory / 'queue.db'}"
    outbox = open_outbox(url, sqlite_url)
    stored = send(outbox)
    relay_once(outbox)
    assert [row.task_id for row in rows(outbox)] == [stored]
    directory.mkdir()
    make_due(outbox)
    relay_once(outbox)
    assert task_ids(url) == [stored]
    assert rows(outbox) == []


@pytest.mark.parametrize("server", ["redis", "rabbitmq"])
def test_a_running_relay_survives_an_outage(
    server: str,
    open_outbox: OpenOutbox,
    sqlite_url: str,
    tcp_proxy: MakeProxy,
    request: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = request.getfixturevalue(f"{server}_url")
    proxy = tcp_proxy(HOST, int(url.rpartition("/")[0].rpartition(":")[2]))
    retry = {"base_delay": 0.05, "max_delay": 0.1}
    outbox = open_outbox(proxy.through(url), sqlite_url, retry=retry)
    before = send(outbox)
    with relaying(outbox):
        wait_until(lambda: not rows(outbox), message="the first delivery")
        proxy.refuse()
        proxy.cut()
        during = [send(outbox) for _ in range(10)]
        wait_until(lambda: "cannot be used" in caplog.text, message="the outage")
        proxy.listen()
        wait_until(lambda: not rows(outbox), message="the other deliveries")
    assert set(task_ids(url)) == {before, *during}


def test_an_outage_gives_the_attempt_back_to_what_was_not_sent(
    open_outbox: OpenOutbox,
    sqlite_url: str,
    tcp_proxy: MakeProxy,
    redis_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    proxy = tcp_proxy(HOST, int(redis_url.rpartition("/")[0].rpartition(":")[2]))
    outbox = open_outbox(proxy.through(redis_url), sqlite_url, retry={"base_delay": 600})
    send(outbox)
    with relaying(outbox):
        wait_until(lambda: not rows(outbox), message="the first delivery")
        proxy.refuse()
        proxy.cut()
        with outbox.databases["default"].begin() as connection:
            messages = [make_message(f"{number}") for number in range(10)]
            outbox.databases["default"].store.add(connection, messages)
        wait_until(lambda: "cannot be used" in caplog.text, message="the outage")
    assert [row.attempts for row in rows(outbox)] == [0] * 10
    assert [row.claim_token for row in rows(outbox)] == [None] * 10
