"""Redis that takes a part of a batch, nothing, or nothing yet; and what a batch costs it."""

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu import Exchange, Queue

from celery_outbox.message import ClaimedMessage
from tests.processes import HOST, spawn, unused_port
from tests.publishers.batches import connected, message, publish
from tests.redis_servers import port_of, private_redis
from tests.relay.apps import make_due, relay_once, relaying, rows, send
from tests.relay.conftest import OpenOutbox, open_outbox
from tests.relay.wire import task_ids
from tests.waiting import wait_until

__all__ = ["open_outbox"]

QUEUES = [f"queue-{number}" for number in range(10)]


@pytest.fixture
def private(server_directory: Path, tmp_path: Path) -> Iterator[redis.Redis]:
    """A Redis whose memory may be limited."""
    with private_redis(server_directory / tmp_path.name) as client:
        yield client


def url_of(client: redis.Redis) -> str:
    return f"redis://{HOST}:{port_of(client)}/0"


def arrived(client: redis.Redis) -> list[str]:
    """The ids of the tasks in all queues."""
    return list(itertools.chain.from_iterable(task_ids(url_of(client), queue) for queue in QUEUES))


def test_of_a_batch_that_fits_in_part_each_message_is_on_redis_or_in_the_outbox(
    private: redis.Redis, open_outbox: OpenOutbox, sqlite_url: str
) -> None:
    outbox = open_outbox(url_of(private), sqlite_url)
    sent = [send(outbox, "x" * 20_000, 1, queue=queue) for queue in QUEUES for _ in range(10)]
    private.config_set("maxmemory", private.info("memory")["used_memory"] + 2_000_000)
    relay_once(outbox, batch=100)
    taken, left = arrived(private), rows(outbox)
    assert taken
    assert left
    assert sorted([*taken, *(row.task_id for row in left)]) == sorted(sent)
    assert all("maxmemory" in row.error and row.attempts == 1 for row in left)
    private.config_set("maxmemory", 0)
    make_due(outbox)
    relay_once(outbox, batch=100)
    assert rows(outbox) == []
    assert sorted(arrived(private)) == sorted(sent)


def test_a_relay_goes_on_without_a_restart_when_redis_has_room_again(
    private: redis.Redis, open_outbox: OpenOutbox, sqlite_url: str
) -> None:
    outbox = open_outbox(url_of(private), sqlite_url, retry={"base_delay": 0.05, "max_delay": 0.1})
    private.config_set("maxmemory", 1)
    sent = [send(outbox) for _ in range(20)]
    with relaying(outbox):
        wait_until(lambda: all(row.attempts >= 2 for row in rows(outbox)), 30, "two attempts of each")
        assert [row.task_id for row in rows(outbox)] == sent
        private.config_set("maxmemory", 0)
        wait_until(lambda: not rows(outbox), 30, "the deliveries")
    assert sorted(task_ids(url_of(private))) == sorted(sent)


def test_a_redis_that_is_still_loading_costs_no_attempt_and_no_restart(
    open_outbox: OpenOutbox,
    server_directory: Path,
    tmp_path: Path,
    sqlite_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = server_directory / tmp_path.name
    with private_redis(directory) as client:
        for number in range(60):
            client.set(f"key-{number}", os.urandom(2000))
        client.save()
    port = unused_port()
    slow = ["--key-load-delay", "50000", "--loading-process-events-interval-bytes", "1024"]
    usual = ["--port", str(port), "--bind", HOST, "--save", "", "--dir", str(directory)]
    outbox = open_outbox(url := f"redis://{HOST}:{port}/0", sqlite_url)
    sent = [send(outbox) for _ in range(3)]
    server = spawn(["redis-server", *usual, *slow], directory)
    try:
        with relaying(outbox):
            wait_until(lambda: "is loading the dataset" in caplog.text, 20, "an answer of Redis")
            assert [(row.attempts, row.error) for row in rows(outbox)] == [(0, None)] * 3
            wait_until(lambda: not rows(outbox), 30, "the deliveries")
        assert task_ids(url) == sent
    finally:
        server.stop()


TOPIC, FANOUT = Exchange("news", "topic"), Exchange("all", "fanout")
KINDS: dict[str, dict[str, Any]] = {
    "direct": {},
    "named direct": {
        "exchange": Exchange("orders", "direct"),
        "routing_key": "eu",
        "declare": [Queue("orders-eu", Exchange("orders", "direct"), "eu")],
    },
    "priority": {"properties": {"priority": 6}},
    "topic": {"exchange": TOPIC, "routing_key": "a.b", "declare": [Queue("ab", TOPIC, "a.*")]},
    "fanout": {"exchange": FANOUT, "routing_key": "", "declare": [FANOUT]},
}


def reads(client: redis.Redis) -> int:
    """How often the server has read from a client."""
    return int(client.info("stats")["total_reads_processed"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_any_routing_goes_in_a_few_round_trips(kind: str, private: redis.Redis) -> None:
    publisher = connected(url_of(private))
    messages: Sequence[ClaimedMessage] = [message(**KINDS[kind]) for _ in range(200)]
    assert publish(publisher, messages[:1]).accepted
    before = reads(private)
    assert publish(publisher, messages).accepted == {each.id for each in messages}
    # It takes several to read what is sent at once.
    assert reads(private) - before < 25
    publisher.close()
