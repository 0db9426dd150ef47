"""What the transports make of a dispatch: delays, limits, and what a worker could not read."""

import itertools
import os
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kombu import Exchange, Queue
from kombu.transport.native_delayed_delivery import calculate_routing_key

from celery_outbox.errors import OptionError
from celery_outbox.message import Envelope
from tests.relay.apps import rows, send
from tests.transports.conftest import OpenStored

SQS = "sqs://127.0.0.1:1"
NEVER = "redis://127.0.0.1:1/0"


def delay(row: Any) -> float | None:
    """Seconds between the dispatch and the intended time."""
    if row.deliver_at is None:
        return None
    return float((row.deliver_at - row.created_at).total_seconds())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"DelaySeconds": 30}, 30),
        ({"delay_seconds": 30}, 30),
        ({"delay_seconds": None, "DelaySeconds": "30"}, 30),
        ({"DelaySeconds": 0}, 0),
        ({"DelaySeconds": 3600}, 3600),
        ({"DelaySeconds": 30, "countdown": 10}, 30),
        ({"DelaySeconds": 30, "countdown": 100}, 100),
        ({"DelaySeconds": 30, "countdown": 0}, 30),
    ],
    ids=repr,
)
@pytest.mark.parametrize("queue", ["celery", "orders.fifo"])
def test_a_delay_of_sqs_counts_from_the_dispatch(
    options: dict[str, Any], expected: float | None, queue: str, outbox_for: OpenStored
) -> None:
    outbox = outbox_for(SQS)
    send(outbox, queue=queue, **options)
    (row,) = rows(outbox)
    assert delay(row) == (None if expected is None else pytest.approx(expected, abs=0.5))
    assert {"DelaySeconds", "delay_seconds"}.isdisjoint(Envelope.from_text(row.message).properties)


@pytest.mark.parametrize(("seconds", "expected"), [(10, 100), (200, 200)])
def test_of_a_delay_and_an_eta_the_later_counts(
    seconds: int, expected: int, outbox_for: OpenStored
) -> None:
    outbox = outbox_for(SQS)
    send(outbox, DelaySeconds=seconds, eta=datetime.now(UTC) + timedelta(seconds=100))
    (row,) = rows(outbox)
    assert delay(row) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize("wrong", ["soon", -1, float("inf")])
def test_a_delay_that_is_none_is_left_to_kombu(wrong: Any, outbox_for: OpenStored) -> None:
    outbox = outbox_for(SQS)
    send(outbox, DelaySeconds=wrong)
    (row,) = rows(outbox)
    assert row.deliver_at is None


def test_a_delay_of_sqs_is_no_delay_elsewhere(outbox_for: OpenStored) -> None:
    outbox = outbox_for(NEVER)
    send(outbox, DelaySeconds=30)
    (row,) = rows(outbox)
    assert row.deliver_at is None
    assert Envelope.from_text(row.message).properties["DelaySeconds"] == 30


@pytest.mark.parametrize(
    ("options", "fits", "too_long"),
    [
        ({}, 580_000, 600_000),
        ({"sqs_base64_encoding": False}, 780_000, 790_000),
    ],
    ids=["two layers of base64", "one layer"],
)
def test_what_sqs_would_never_take_is_refused_at_the_call(
    options: dict[str, Any], fits: int, too_long: int, outbox_for: OpenStored
) -> None:
    outbox = outbox_for(SQS, config={"broker_transport_options": options})
    send(outbox, "x" * fits)
    with pytest.raises(OptionError, match=r"at most 1,048,576 bytes.*compression=\"zlib\""):
        send(outbox, "x" * too_long)
    send(outbox, "x" * too_long, compression="zlib")
    send(outbox, os.urandom(3).hex(), queue="orders.fifo")
    assert len(rows(outbox)) == 3


def test_no_other_broker_has_the_limit_of_sqs(outbox_for: OpenStored) -> None:
    outbox = outbox_for(NEVER, brokers={"queue": SQS})
    send(outbox, "x" * 1_100_000)
    with pytest.raises(OptionError, match="the limit of SQS"):
        send(outbox, "x" * 1_100_000, outbox_broker="queue")
    assert len(rows(outbox)) == 1


def test_a_task_for_native_delayed_delivery_leaves_at_once(outbox_for: OpenStored) -> None:
    outbox = outbox_for(
        "amqp://127.0.0.1:1//",
        config={
            "task_queues": [
                Queue(
                    "slow",
                    Exchange("slow", "topic"),
                    "slow",
                    queue_arguments={"x-queue-type": "quorum"},
                )
            ],
            "task_default_queue": "slow",
            "task_default_queue_type": "quorum",
            "task_default_exchange_type": "topic",
        },
    )
    send(outbox, countdown=86400)
    send(outbox, eta=datetime.now(UTC) + timedelta(days=2))
    for row, seconds in itertools.zip_longest(rows(outbox), (86400, 2 * 86400 - 1)):
        envelope = Envelope.from_text(row.message)
        assert getattr(envelope.exchange, "name", None) == "celery_delayed_27"
        assert envelope.routing_key == calculate_routing_key(seconds, "slow")
        assert abs(row.scheduled_at - row.created_at) < timedelta(seconds=1)
        assert row.deliver_at - row.created_at > timedelta(seconds=seconds - 1)


def test_a_header_that_a_worker_could_not_read_is_refused_as_without_the_outbox(
    outbox_for: OpenStored, tmp_path: object
) -> None:
    outbox = outbox_for(f"sqla+sqlite:///{tmp_path}/broker.db")
    headers = {"when": datetime.now(UTC)}
    with pytest.raises(TypeError, match="not JSON serializable"):
        send(outbox, headers=headers)
    assert rows(outbox) == []
