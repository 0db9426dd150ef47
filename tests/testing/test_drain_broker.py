"""drain("broker"): what is stored is published by the relay's publisher, for a worker to run."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from queue import Empty

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker
from kombu import Connection
from kombu.exceptions import OperationalError
from sqlalchemy.orm import Session

from celery_outbox.errors import OutboxError
from celery_outbox.testing import OutboxRecorder
from tests.processes import unused_port
from tests.testing.conftest import OpenShop, Order, Shop

SHARED = ("broker_url", "result_backend", "task_default_queue")
OpenBroker = Callable[[str], Shop]


@pytest.fixture
def open_with(sqlite_url: str, open_shop: OpenShop) -> Iterator[OpenBroker]:
    """Open a shop with that broker and a queue that no other test has."""
    with ExitStack() as stack:

        def open_(broker: str) -> Shop:
            queue = uuid.uuid4().hex
            shop = open_shop(
                sqlite_url, broker=broker, backend="cache+memory://", task_default_queue=queue
            )
            stack.callback(shop.app.close)
            return shop

        yield open_


def working(app: Celery) -> AbstractContextManager[object]:
    """A worker in a thread of this process."""
    worker: AbstractContextManager[object] = start_worker(
        app, perform_ping_check=False, shutdown_timeout=30
    )
    return worker


@pytest.mark.parametrize("broker", ["redis", "memory"])
def test_a_worker_runs_what_a_wrapped_test_stored(
    broker: str, open_with: OpenBroker, request: pytest.FixtureRequest
) -> None:
    # One in memory is that of this process, workers included.
    shop = open_with("memory://" if broker == "memory" else request.getfixturevalue("redis_url"))
    with OutboxRecorder(shop.app) as outbox, shop.engine.connect() as connection:
        transaction = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            session.add(Order(id=1))
            task_id = shop.send(1)
            shop.send(2, countdown=0.1, expires=60)
            session.commit()
            session.add(Order(id=2))
            shop.send(3)
            session.rollback()
        results = outbox.drain("broker")
        with working(shop.app):
            assert [result.get(timeout=20) for result in results] == [1, 2]
        assert results[0].id == task_id
        assert outbox.drain("broker") == []
        assert outbox.drain() == []
        transaction.rollback()
    assert sorted(shop.ran) == [1, 2]


def test_a_worker_runs_tasks_that_are_not_registered_here(
    redis_url: str, open_with: OpenBroker
) -> None:
    shop = open_with(redis_url)
    other = Celery("warehouse", set_as_current=False)
    other.conf.update({key: shop.app.conf[key] for key in SHARED})

    @other.task(name="warehouse.pack", shared=False)
    def pack(number: int) -> int:
        return -number

    with OutboxRecorder(shop.app) as outbox:
        shop.app.send_task("warehouse.pack", (1,), via_outbox=True)
        [result] = outbox.drain("broker")
    with working(other):
        assert result.get(timeout=20) == -1
    other.close()


def test_what_a_broker_does_not_take_is_left_for_the_next_drain(
    redis_url: str, sqlite_url: str, open_shop: OpenShop
) -> None:
    port = unused_port()
    brokers = {"other": f"redis://127.0.0.1:{port}/0"}
    shop = open_shop(sqlite_url, broker=redis_url, outbox_brokers=brokers)
    with OutboxRecorder(shop.app) as outbox:
        first = shop.send(1)
        shop.send(2, outbox_broker="other")
        with pytest.raises(OperationalError):
            outbox.drain("broker")
        with pytest.raises(OperationalError):
            outbox.drain("broker")
        with Connection(redis_url) as connection, connection.SimpleQueue("celery") as queue:
            assert queue.get(timeout=5).headers["id"] == first
            with pytest.raises(Empty):
                queue.get(block=False)
        assert [result.get() for result in outbox.drain()] == [2]
    shop.app.close()


def test_a_message_that_a_broker_refuses_is_an_error(
    rabbitmq_url: str, sqlite_url: str, open_shop: OpenShop
) -> None:
    shop = open_shop(sqlite_url, broker=rabbitmq_url)
    with OutboxRecorder(shop.app) as outbox:
        shop.send(1, priority=300)
        shop.send(2)
        with pytest.raises(OutboxError, match=r"take 2 message\(s\), found that it did not take 1: "):
            outbox.drain("broker")
        assert [result.get() for result in outbox.drain()] == [1]
    shop.app.close()
