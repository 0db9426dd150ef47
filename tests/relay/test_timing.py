"""Delays from the dispatch to the broker: never restarted, never over too early."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
import redis

from tests.publishers.sqs_stub import SQSStub
from tests.relay.apps import relaying, rows, send
from tests.relay.conftest import OpenOutbox
from tests.relay.wire import redis_envelopes
from tests.waiting import wait_until


@pytest.fixture
def full_redis(redis_url: str) -> Iterator[redis.Redis]:
    """A Redis that takes nothing until it is told to, or the test ends."""
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("maxmemory", 1)
        yield client
        client.config_set("maxmemory", 0)


@pytest.mark.parametrize("countdown", [20, 0.2])
def test_failed_attempts_do_not_restart_a_countdown(
    countdown: float, full_redis: redis.Redis, redis_url: str, open_outbox: OpenOutbox, sqlite_url: str
) -> None:
    outbox = open_outbox(redis_url, sqlite_url, retry={"base_delay": 0.1, "max_delay": 0.2})
    before = datetime.now(UTC)
    send(outbox, countdown=countdown)
    (stored,) = rows(outbox)
    with relaying(outbox):
        wait_until(lambda: rows(outbox)[0].attempts >= 3, 30, "three attempts")
        (row,) = rows(outbox)
        assert (row.deliver_at, row.message) == (stored.deliver_at, stored.message)
        full_redis.config_set("maxmemory", 0)
        # When it is over, it leaves at once.
        wait_until(lambda: not rows(outbox), 10, "the delivery")
    (envelope,) = redis_envelopes(redis_url)
    eta = datetime.fromisoformat(envelope["headers"]["eta"])
    assert timedelta(0) <= eta - before - timedelta(seconds=countdown) < timedelta(seconds=0.5)


def test_workers_of_redis_hold_nothing_for_as_long_as_their_visibility_timeout(
    redis_url: str, open_outbox: OpenOutbox, sqlite_url: str
) -> None:
    config = {"broker_transport_options": {"visibility_timeout": 2}}
    outbox = open_outbox(redis_url, sqlite_url, config=config)
    began = time.monotonic()
    send(outbox, countdown=2.5)
    with relaying(outbox):
        wait_until(lambda: redis_envelopes(redis_url), 10, "the delivery")
    # It leaves half of the timeout before its time.
    assert time.monotonic() - began >= 1.5


def test_on_a_fifo_queue_fractions_of_a_delay_are_waited_for(
    sqs_stub: SQSStub, mariadb_url: str, open_outbox: OpenOutbox
) -> None:
    outbox = open_outbox(sqs_stub.url, mariadb_url)
    began = time.monotonic()
    send(outbox, queue="orders.fifo", countdown=1.9)
    with relaying(outbox):
        wait_until(lambda: sqs_stub.bodies("orders.fifo"), 10, "the delivery")
    assert time.monotonic() - began >= 1.9
