"""Redis: batches in pipelines, as Kombu would have written them, each answer read."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import redis
from kombu import Connection, Exchange, Queue

from celery_outbox.relay.publishers.kombu import KombuPublisher
from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.publishers.batches import connected, message, publish

DIRECT, TOPIC = Exchange("orders", "direct"), Exchange("news", "topic")
BOTH = [Queue("first", TOPIC, "news.#"), Queue("second", TOPIC, "*.city")]


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def lists(client: redis.Redis) -> Mapping[str, list[Any]]:
    """What each list holds, the oldest first, without the tags that Kombu draws by lot."""
    found: dict[str, list[Any]] = {}
    for key in sorted(client.scan_iter(_type="list")):
        found[key.decode()] = [json.loads(text) for text in reversed(client.lrange(key, 0, -1))]
        for each in found[key.decode()]:
            assert len(each["properties"].pop("delivery_tag")) == 36
    return found


def ids(client: redis.Redis, queue: str = "celery") -> list[str]:
    return [each["headers"]["id"] for each in lists(client).get(queue, [])]


MESSAGES: Mapping[str, Mapping[str, Any]] = {
    "usual": {},
    "bytes": {"body": bytes(range(256)) * 5},
    "odd headers": {
        "headers": {'a"\n': [1, None, {"b": "é\U0001f600"}], "c": b"\xff", "\nheaders": "\\"}
    },
    "another queue": {"queue": "other"},
    "expiring": {"expires_in": 1_000_000.0},
    "expired": {"expires_in": -5.0},
    "priority": {"properties": {"priority": 6}},
    "priority beyond": {"properties": {"priority": 300}},
    "group": {"properties": {"MessageGroupId": "a", "delivery_mode": "transient"}},
    "odd id": {"properties": {"correlation_id": 'a"b\\'}},
    "direct": {
        "exchange": DIRECT,
        "routing_key": "eu",
        "declare": [Queue("orders-eu", DIRECT, "eu")],
    },
    "topic": {"exchange": TOPIC, "routing_key": "news.city", "declare": BOTH},
    "expiring queue": {
        "queue": "short",
        "declare": [Queue("short", Exchange("short"), "short", expires=3600)],
    },
}


def test_a_batch_is_what_kombu_writes_one_by_one(
    client: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 1000.0)
    messages = [message(**options) for options in MESSAGES.values() for _ in range(3)]
    one_by_one = KombuPublisher(Connection(redis_url))
    one_by_one.connect()
    publish(one_by_one, messages)
    expected = lists(client)
    client.flushdb()
    publisher = connected(redis_url)
    assert publish(publisher, messages).accepted == {each.id for each in messages}
    assert lists(client) == expected
    assert client.ttl("short") > 0
    publisher.close()
    one_by_one.close()


def test_a_fanout_reaches_every_subscriber(client: redis.Redis, redis_url: str) -> None:
    publisher = connected(redis_url)
    messages = [
        message(exchange=Exchange("all", "fanout"), routing_key="", declare=[Exchange("all", "fanout")])
        for _ in range(3)
    ]
    with client.pubsub() as subscriber:  # type: ignore[no-untyped-call]  # redis has not typed it
        subscriber.psubscribe("*")
        assert subscriber.get_message(timeout=5)["type"] == "psubscribe"
        assert publish(publisher, messages).accepted == {each.id for each in messages}
        found = [json.loads(subscriber.get_message(timeout=5)["data"]) for _ in messages]
    assert [each["headers"]["id"] for each in found] == [each.task_id for each in messages]
    publisher.close()


def test_a_key_prefix_is_kept(client: redis.Redis, redis_url: str) -> None:
    publisher = connected(redis_url, transport_options={"global_keyprefix": "eu:"})
    publish(publisher, [message(), message()])
    assert len(ids(client, "eu:celery")) == 2
    publisher.close()


def test_what_redis_refuses_holds_no_other(client: redis.Redis, redis_url: str) -> None:
    client.set("broken", "not a list")
    publisher = connected(redis_url)
    messages = [message(), message("broken"), message(), message("broken"), message()]
    outcome = publish(publisher, messages)
    assert list(outcome.errors) == [messages[1].id, messages[3].id]
    assert all("wrong kind of value" in text for text in outcome.errors.values())
    assert ids(client) == [messages[0].task_id, messages[2].task_id, messages[4].task_id]
    assert publisher.is_connected
    publisher.close()


def test_what_cannot_be_written_holds_no_other(client: redis.Redis, redis_url: str) -> None:
    publisher = connected(redis_url)
    corrupt = [message()._replace(envelope=text) for text in ("{}", "corrupt")]
    messages = [message(), *corrupt, message()]
    outcome = publish(publisher, messages)
    assert set(outcome.errors) == {each.id for each in corrupt}
    assert ids(client) == [messages[0].task_id, messages[3].task_id]
    publisher.close()


def test_an_exchange_without_a_queue_takes_nothing(client: redis.Redis, redis_url: str) -> None:
    publisher = connected(redis_url)
    lost = message(exchange=DIRECT, routing_key="nowhere", declare=[DIRECT])
    outcome = publish(publisher, [lost, message()])
    assert list(outcome.errors) == [lost.id]
    assert "expected a queue bound" in outcome.errors[lost.id]
    publisher.close()


def test_bindings_that_redis_lost_are_made_again(client: redis.Redis, redis_url: str) -> None:
    publisher = connected(redis_url)
    news = [
        message(exchange=TOPIC, routing_key="news.city", declare=BOTH, queue="first") for _ in range(4)
    ]
    publish(publisher, news[:2])
    client.flushdb()
    assert publish(publisher, news[2:]).accepted == {each.id for each in news[2:]}
    assert len(ids(client, "first")) == len(ids(client, "second")) == 2
    publisher.close()


def test_a_server_that_became_a_replica_gets_nothing_and_costs_no_attempt(
    client: redis.Redis, redis_url: str
) -> None:
    publisher = connected(redis_url)
    publish(publisher, [message()])
    messages = [message(), message("other")]
    client.replicaof(HOST, "1")
    try:
        outcome = publish(publisher, messages)
    finally:
        client.replicaof("NO", "ONE")
    assert outcome.unsent == {each.id for each in messages}
    assert outcome.is_connection_lost
    publisher.connect()
    assert publish(publisher, messages).accepted == {each.id for each in messages}
    publisher.close()


def test_nothing_is_accepted_whose_answer_was_not_read(
    client: redis.Redis, redis_url: str, tcp_proxy: Callable[[str, int], TcpProxy]
) -> None:
    proxy = tcp_proxy(HOST, int(redis_url.rpartition("/")[0].rpartition(":")[2]))
    publisher = connected(
        proxy.through(redis_url), transport_options={"socket_timeout": 0.5, "retry_on_timeout": True}
    )
    messages = [message(), message("other"), message()]
    publish(publisher, messages)
    client.flushdb()
    proxy.swallow_replies()
    outcome = publish(publisher, messages)
    assert set(outcome.errors) == {each.id for each in messages}
    assert all("not known" in text for text in outcome.errors.values())
    assert outcome.is_connection_lost
    # It has arrived, and once only: redis-py did not send it again.
    assert [len(ids(client)), len(ids(client, "other"))] == [2, 1]
    publisher.close()


@pytest.mark.parametrize("breaks", ["at the look whether it lives", "at a declaration"])
def test_what_was_not_sent_when_the_connection_broke_costs_no_attempt(
    breaks: str, client: redis.Redis, redis_url: str, tcp_proxy: Callable[[str, int], TcpProxy]
) -> None:
    proxy = tcp_proxy(HOST, int(redis_url.rpartition("/")[0].rpartition(":")[2]))
    options = {"socket_timeout": 0.5, "health_check_interval": 1e-6}
    publisher = connected(proxy.through(redis_url), transport_options=options)
    publish(publisher, [message()])
    client.flushdb()
    if breaks == "at a declaration":
        proxy.refuse()
        proxy.cut()
    else:
        proxy.stall()
    messages = [message("new" if breaks == "at a declaration" else "celery"), message()]
    outcome = publish(publisher, messages)
    assert (outcome.errors, outcome.unsent) == ({}, {each.id for each in messages})
    assert outcome.is_connection_lost
    publisher.close()


def test_what_needs_a_second_pipeline_waits_for_the_first(client: redis.Redis, redis_url: str) -> None:
    publisher = connected(redis_url)
    messages = [message(body=bytes([number]) * (3 * 1024 * 1024)) for number in range(5)]
    assert publish(publisher, messages).accepted == {each.id for each in messages}
    assert ids(client) == [each.task_id for each in messages]
    publisher.close()


def test_nothing_is_sent_after_the_lease(client: redis.Redis, redis_url: str) -> None:
    publisher = connected(redis_url)
    messages = [message(), message()]
    assert publish(publisher, messages, seconds=-1).unsent == {each.id for each in messages}
    assert lists(client) == {}
    publisher.close()
