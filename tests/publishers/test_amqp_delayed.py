"""RabbitMQ's native delayed delivery: what is left of a delay counts, not what was asked for."""

import time
from collections.abc import Callable, Iterator

import pytest
from kombu import Connection, Exchange, Queue
from kombu.transport.native_delayed_delivery import (
    bind_queue_to_native_delayed_delivery_exchange,
    calculate_routing_key,
    declare_native_delayed_delivery_exchanges_and_queues,
)

from celery_outbox.message import ClaimedMessage
from celery_outbox.relay.publishers import Publisher
from tests.publishers.batches import connected, message, publish
from tests.relay.apps import make_due, relay_once, rows, send
from tests.relay.conftest import OpenOutbox, open_outbox
from tests.relay.wire import amqp_connection, task_ids
from tests.storage.rows import change, hours_from_now
from tests.waiting import wait_until

__all__ = ["open_outbox"]

JOBS = Queue("jobs", Exchange("jobs", "topic"), "jobs", queue_arguments={"x-queue-type": "quorum"})


def prepare_delays(url: str, prefix: str | None = None) -> None:
    """Do what a Celery worker does when it starts."""
    with Connection(url) as connection:
        JOBS.bind(connection.channel()).declare()
        declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum", prefix)
        bind_queue_to_native_delayed_delivery_exchange(connection, JOBS, prefix)


def delayed(seconds: int, *, left: float | None, prefix: str = "") -> ClaimedMessage:
    """A message that Celery made with a delay, of which some is left."""
    return message(
        "jobs",
        exchange=Exchange(f"{prefix}celery_delayed_27", "topic"),
        routing_key=calculate_routing_key(seconds, "jobs"),
        declare=[],
        due_in=left,
    )


@pytest.fixture
def publisher(rabbitmq_url: str) -> Iterator[Publisher]:
    publisher = connected(rabbitmq_url)
    yield publisher
    publisher.close()


@pytest.fixture
def next_id(rabbitmq_url: str) -> Iterator[Callable[[], str]]:
    """Wait for the next message in the queue and return its task's id."""
    with amqp_connection(rabbitmq_url) as connection:
        channel = connection.channel()

        def wait() -> str:
            found = wait_until(lambda: channel.basic_get("jobs", no_ack=True), 15, "a message")
            return str(found.headers["id"])

        yield wait


@pytest.mark.parametrize("prefix", [None, "eu"])
def test_a_delay_lasts_as_long_as_is_left_of_it(
    prefix: str | None, publisher: Publisher, rabbitmq_url: str, next_id: Callable[[], str]
) -> None:
    prepare_delays(rabbitmq_url, prefix)
    begun = "eu_" if prefix else ""
    later, now, late = (delayed(30, left=left, prefix=begun) for left in (1.7, 0.4, -60.0))
    messages = [later, now, late]
    start = time.monotonic()
    assert publish(publisher, messages).accepted == {each.id for each in messages}
    arrived = {next_id(): time.monotonic() - start for _ in messages}
    assert list(arrived)[2] == later.task_id
    assert arrived[now.task_id] < 1
    assert arrived[late.task_id] < 1
    assert 1.7 <= arrived[later.task_id] < 3.5


def test_time_that_a_batch_has_waited_for_its_turn_is_no_delay(
    publisher: Publisher, rabbitmq_url: str, next_id: Callable[[], str]
) -> None:
    prepare_delays(rabbitmq_url)
    read_long_ago = time.monotonic() - 3600
    one = delayed(4000, left=3599.5)
    outcome = publisher.publish([one], deadline=time.monotonic() + 60, read_at=read_long_ago)
    assert outcome.accepted == {one.id}
    assert next_id() == one.task_id


def test_a_key_that_only_looks_like_a_delay_stays(publisher: Publisher, rabbitmq_url: str) -> None:
    key = calculate_routing_key(30, "jobs")
    queue = Queue("celery_delayed_27", Exchange("plain", "direct"), key)
    plain = message(queue.name, exchange="plain", routing_key=key, declare=[queue], due_in=1.0)
    assert publish(publisher, [plain]).accepted == {plain.id}
    assert task_ids(rabbitmq_url, queue.name) == [plain.task_id]


def test_of_delayed_messages_the_one_that_no_queue_takes_is_an_error(
    publisher: Publisher, rabbitmq_url: str
) -> None:
    prepare_delays(rabbitmq_url)
    lost = message(
        exchange=Exchange("celery_delayed_27", "topic"),
        routing_key=calculate_routing_key(30, "nowhere"),
        declare=[],
        due_in=0.0,
    )
    messages = [delayed(30, left=0.0), lost, delayed(30, left=0.0)]
    outcome = publish(publisher, messages)
    assert outcome.errors.keys() == {lost.id}
    assert "NO_ROUTE" in outcome.errors[lost.id]
    assert task_ids(rabbitmq_url, "jobs") == [messages[0].task_id, messages[2].task_id]


def test_without_the_exchanges_of_a_worker_a_delayed_message_stays_alone(
    open_outbox: OpenOutbox, rabbitmq_url: str, sqlite_url: str, next_id: Callable[[], str]
) -> None:
    outbox = open_outbox(rabbitmq_url, sqlite_url, config={"task_queues": [JOBS]})
    waiting = send(outbox, queue="jobs", countdown=3600)
    plain = send(outbox, queue="jobs")
    make_due(outbox)
    relay_once(outbox)
    assert next_id() == plain
    (row,) = rows(outbox)
    assert row.task_id == waiting
    assert "celery_delayed_27" in row.error
    prepare_delays(rabbitmq_url)
    change(outbox.databases["default"], deliver_at=hours_from_now(2 / 3600))
    make_due(outbox)
    start = time.monotonic()
    relay_once(outbox)
    assert rows(outbox) == []
    assert next_id() == waiting
    assert 1 < time.monotonic() - start < 4
