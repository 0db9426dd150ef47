"""RabbitMQ: batches with confirms; what is refused, returned or in doubt is told apart."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from kombu import Connection, Exchange, Queue

from celery_outbox.relay.publishers import Publisher
from celery_outbox.relay.publishers.kombu import KombuPublisher
from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.publishers.batches import connected, message, publish
from tests.relay.wire import amqp_connection, amqp_messages
from tests.servers import RabbitServer
from tests.waiting import wait_until

TOPIC = Exchange("news", "topic")


@pytest.fixture
def publisher(rabbitmq_url: str) -> Iterator[Publisher]:
    publisher = connected(rabbitmq_url)
    yield publisher
    publisher.close()


def ids(url: str, queue: str = "celery") -> list[str]:
    return [each.headers["id"] for each in amqp_messages(url, queue)]


def waiting(url: str) -> int:
    """How many messages wait in the default queue; they stay there."""
    with amqp_connection(url) as connection:
        return int(connection.channel().queue_declare("celery", passive=True).message_count)


def test_a_batch_arrives_in_order_and_untouched(publisher: Publisher, rabbitmq_url: str) -> None:
    messages = [message(body=f"{number} ".encode() * 300) for number in range(200)]
    assert publish(publisher, messages).accepted == {each.id for each in messages}
    found = amqp_messages(rabbitmq_url)
    assert [each.body.encode() for each in found] == [each.body for each in messages]
    assert [each.properties["correlation_id"] for each in found] == [each.task_id for each in messages]


def test_what_no_queue_takes_is_an_error_of_its_own(publisher: Publisher, rabbitmq_url: str) -> None:
    lost = [
        message(exchange=TOPIC, routing_key="nowhere", declare=[TOPIC], queue=f"lost-{number}")
        for number in range(2)
    ]
    messages = [message(), lost[0], message(), lost[1], message()]
    outcome = publish(publisher, messages)
    assert set(outcome.errors) == {each.id for each in lost}
    assert all("NO_ROUTE" in text for text in outcome.errors.values())
    assert ids(rabbitmq_url) == [messages[0].task_id, messages[2].task_id, messages[4].task_id]


def test_of_two_messages_with_one_id_the_one_that_comes_back_is_not_called_accepted(
    publisher: Publisher, rabbitmq_url: str
) -> None:
    exchange = Exchange("by-header", "headers")
    queue = Queue("bound", exchange, "", binding_arguments={"tenant": "a", "x-match": "all"})
    same = {"properties": {"correlation_id": "same"}, "exchange": exchange, "routing_key": "k"}
    taken = message(headers={"tenant": "a"}, declare=[queue], **same)
    lost = message(headers={"tenant": "b"}, declare=[queue], **same)
    outcome = publish(publisher, [taken, lost])
    assert lost.id in outcome.errors
    assert taken.task_id in ids(rabbitmq_url, "bound")


def test_a_queue_that_was_deleted_is_declared_again(publisher: Publisher, rabbitmq_url: str) -> None:
    publish(publisher, [message()])
    with amqp_connection(rabbitmq_url) as connection:
        connection.channel().queue_delete("celery")
    messages = [message(), message("other"), message()]
    assert publish(publisher, messages).accepted == {each.id for each in messages}
    assert ids(rabbitmq_url) == [messages[0].task_id, messages[2].task_id]


def test_a_declaration_that_conflicts_stops_its_queue_alone(
    publisher: Publisher, rabbitmq_url: str
) -> None:
    with amqp_connection(rabbitmq_url) as connection:
        connection.channel().queue_declare("taken", durable=False, auto_delete=False)
    messages = [message(), message("taken"), message(), message("taken")]
    outcome = publish(publisher, messages)
    assert set(outcome.errors) == {messages[1].id, messages[3].id}
    assert all("PRECONDITION_FAILED" in text for text in outcome.errors.values())
    assert ids(rabbitmq_url) == [messages[0].task_id, messages[2].task_id]


def test_an_exchange_that_is_missing_stops_its_messages_alone(
    publisher: Publisher, rabbitmq_url: str
) -> None:
    missing = message(exchange="missing", routing_key="x", declare=[])
    messages = [message(), missing, message(), message()]
    outcome = publish(publisher, messages)
    assert set(outcome.errors) == {missing.id}
    assert "NOT_FOUND" in outcome.errors[missing.id]
    assert outcome.accepted == {each.id for each in messages} - {missing.id}
    assert ids(rabbitmq_url) == [each.task_id for each in messages if each is not missing]


def test_a_message_for_which_the_broker_closes_the_channel_stays_alone(
    publisher: Publisher, rabbitmq_url: str
) -> None:
    news = [
        message(exchange=TOPIC, routing_key="city", declare=[Queue("city", TOPIC, "#")], queue="city")
        for _ in range(2)
    ]
    publish(publisher, news[:1])
    with amqp_connection(rabbitmq_url) as connection:
        connection.channel().exchange_delete("news")
    messages = [message(), news[1], message(), message()]
    outcome = publish(publisher, messages)
    assert outcome.accepted | outcome.errors.keys() == {each.id for each in messages}
    assert outcome.errors.keys() <= {news[1].id}
    # Those in doubt were sent again: at least once, and none of them lost.
    assert set(ids(rabbitmq_url)) == {each.task_id for each in messages} - {news[1].task_id}


def test_what_cannot_be_written_holds_no_other(publisher: Publisher, rabbitmq_url: str) -> None:
    messages = [
        message(),
        message(properties={"priority": 300}),
        message(),
        message(headers={"x" * 300: 1}),
        message(),
    ]
    outcome = publish(publisher, messages)
    assert set(outcome.errors) == {messages[1].id, messages[3].id}
    assert ids(rabbitmq_url) == [messages[0].task_id, messages[2].task_id, messages[4].task_id]


def test_what_the_broker_refuses_is_an_error(publisher: Publisher, rabbitmq_url: str) -> None:
    short = Queue(
        "short",
        Exchange("short"),
        "short",
        queue_arguments={"x-max-length": 1, "x-overflow": "reject-publish"},
    )
    messages = [message("short", declare=[short]) for _ in range(3)]
    outcome = publish(publisher, messages)
    assert outcome.accepted == {messages[0].id}
    assert all("refused" in text for text in outcome.errors.values())
    assert ids(rabbitmq_url, "short") == [messages[0].task_id]


def test_a_message_that_is_too_large_for_the_broker_stays_alone(
    rabbitmq: RabbitServer, rabbitmq_url: str
) -> None:
    messages = [message(body=b"x" * (5000 if number == 3 else 10)) for number in range(10)]
    limit = "application:set_env(rabbit, max_message_size, {})."
    rabbitmq.control(limit.format(1024))
    try:
        publisher = connected(rabbitmq_url)
        outcome = publish(publisher, messages)
        assert outcome.errors.keys() == {messages[3].id}
        assert "size 5000 is larger than" in outcome.errors[messages[3].id]
        assert publish(publisher, [after := message()]).accepted == {after.id}
        publisher.close()
    finally:
        rabbitmq.control(limit.format(134217728))
    found = ids(rabbitmq_url)
    assert set(found) == {each.task_id for each in [*messages, after]} - {messages[3].task_id}


def test_bad_publishes_cost_neither_good_ones_nor_connections(
    rabbitmq_url: str, tcp_proxy: Callable[[str, int], TcpProxy]
) -> None:
    proxy = tcp_proxy(HOST, int(rabbitmq_url.rpartition("/")[0].rpartition(":")[2]))
    publisher = connected(proxy.through(rabbitmq_url))
    good = []
    for _ in range(20):
        bad, *others = [message(exchange="nope", routing_key="x", declare=[]), message(), message()]
        outcome = publish(publisher, [bad, *others])
        assert outcome.errors.keys() == {bad.id}
        good += others
    assert ids(rabbitmq_url) == [each.task_id for each in good]
    assert (proxy.accepted, proxy.live) == (1, 1)
    publisher.close()


def test_nothing_is_accepted_whose_confirmation_was_not_read(
    rabbitmq_url: str, tcp_proxy: Callable[[str, int], TcpProxy]
) -> None:
    proxy = tcp_proxy(HOST, int(rabbitmq_url.rpartition("/")[0].rpartition(":")[2]))
    publisher = connected(proxy.through(rabbitmq_url))
    publish(publisher, [message()])
    assert len(amqp_messages(rabbitmq_url)) == 1
    proxy.swallow_replies()
    messages = [message() for _ in range(3)]
    with ThreadPoolExecutor(1) as pool:
        published = pool.submit(publish, publisher, messages)
        wait_until(lambda: waiting(rabbitmq_url) == 3, 15, "the publish")
        proxy.cut()
        outcome = published.result(timeout=15)
    assert set(outcome.errors) == {each.id for each in messages}
    assert all("not known" in text for text in outcome.errors.values())
    assert outcome.is_connection_lost
    publisher.close()


ODD = {
    "usual": {},
    "bytes": {"body": bytes(range(256)) * 5},
    "large": {"body": b"x" * 300_000},
    "odd headers": {
        "headers": {
            'a"\n': [1, None, True, 2.5, -(2**40), {"b": "é\U0001f600"}],
            "c": b"\xff",
            "when": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
            "price": Decimal("12.50"),
            "nested": {"a": {"b": []}},
        }
    },
    "expiring": {"expires_in": 1_000_000.0},
    "expired": {"expires_in": -5.0},
    "priority": {"properties": {"priority": 6}},
    "foreign properties": {"properties": {"MessageGroupId": "a"}},
    "transient": {"properties": {"delivery_mode": 1, "reply_to": "there"}},
    "topic": {"exchange": TOPIC, "routing_key": "eu", "declare": [Queue("celery", TOPIC, "eu")]},
}


def test_a_batch_is_what_kombu_writes_one_by_one(
    rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Kombu declares no second queue of one name: the topic first.
    messages = [message(**options) for options in reversed(ODD.values())]
    found = []
    one_by_one = KombuPublisher(Connection(rabbitmq_url))
    one_by_one.connect()
    for publisher in (one_by_one, connected(rabbitmq_url)):
        with monkeypatch.context() as patch:
            patch.setattr("celery_outbox.relay.publishers.kombu.time.monotonic", lambda: 1000.0)
            outcome = publisher.publish(messages, deadline=2000.0, read_at=1000.0)
        assert outcome.accepted == {each.id for each in messages}
        publisher.close()
        with amqp_connection(rabbitmq_url) as connection:
            channel = connection.channel()
            wait_until(lambda: waiting(rabbitmq_url) == len(messages))
            got = [channel.basic_get("celery", no_ack=True) for _ in messages]
        found.append([(each.body, each.properties, each.delivery_info["routing_key"]) for each in got])
    assert found[0] == found[1]


def test_a_queue_is_bound_wherever_messages_need_it(publisher: Publisher, rabbitmq_url: str) -> None:
    messages = [message(), message(**ODD["topic"]), message()]
    assert publish(publisher, messages).accepted == {each.id for each in messages}
    assert ids(rabbitmq_url) == [each.task_id for each in messages]
