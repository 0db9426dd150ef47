"""SQS: batches that Kombu could have written one by one, within the limits of a request."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue

from celery_outbox.message import ClaimedMessage
from celery_outbox.relay.publishers.virtual import VirtualPublisher
from tests.publishers.batches import message, publish
from tests.publishers.conftest import OpenPublisher
from tests.publishers.sqs_stub import KEY, SQSStub
from tests.publishers.sqs_wire import envelope, queue_names, sqs_client, taken, task_ids

DIRECT, TOPIC = Exchange("orders", "direct"), Exchange("news", "topic")
BOTH = [Queue("first", TOPIC, "news.#"), Queue("second", TOPIC, "*.city")]
ATTRIBUTES = {
    "tenant": {"DataType": "String", "StringValue": "é"},
    "raw": {"DataType": "Binary", "BinaryValue": b"\x00\xff"},
}
MIB = 1024 * 1024

MESSAGES: Mapping[str, Mapping[str, Any]] = {
    "usual": {},
    "bytes": {"body": bytes(range(256)) * 5},
    "odd headers": {"headers": {'a"\n': [1, None, {"b": "é\U0001f600"}], "c": b"\xff"}},
    "another queue": {"queue": "other"},
    "a name that SQS does not take": {"queue": "eu.orders!"},
    "expiring": {"expires_in": 1_000_000.0},
    "expired": {"expires_in": -5.0},
    "priority": {"properties": {"priority": 6}},
    "attributes": {"properties": {"message_attributes": ATTRIBUTES}},
    "fair queue": {"properties": {"MessageGroupId": "tenant-7"}},
    "group and deduplication": {
        "queue": "jobs.fifo",
        "properties": {"MessageGroupId": "a", "MessageDeduplicationId": "given"},
    },
    "default group": {"queue": "jobs.fifo", "properties": {"MessageDeduplicationId": "another"}},
    "direct": {
        "exchange": DIRECT,
        "routing_key": "eu",
        "declare": [Queue("orders-eu", DIRECT, "eu")],
    },
    "topic": {"exchange": TOPIC, "routing_key": "news.city", "declare": BOTH},
}
QUEUES = ["celery", "other", "eu-orders_", "jobs.fifo", "orders-eu", "first", "second"]


def found(url: str) -> dict[str, list[Any]]:
    """What lies in each queue, without what is drawn by lot or tells the time."""
    everything: dict[str, list[Any]] = {}
    for queue in QUEUES:
        everything[queue] = []
        for each in taken(url, queue):
            content = envelope(each["Body"])
            assert len(content["properties"].pop("delivery_tag")) == 36
            told = {
                name: each["Attributes"].get(name)
                for name in ("MessageGroupId", "MessageDeduplicationId")
            }
            is_plain = each["Body"].startswith("{")
            everything[queue].append((is_plain, content, told, each.get("MessageAttributes")))
        everything[queue].sort(key=lambda each: str(each[1]["headers"]["id"]))
    return everything


@pytest.mark.parametrize("options", [{}, {"sqs_base64_encoding": False}], ids=["base64", "plain"])
def test_a_batch_is_what_kombu_writes_one_by_one(
    options: dict[str, Any],
    sqs_url: str,
    monkeypatch: pytest.MonkeyPatch,
    open_publisher: OpenPublisher,
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 1000.0)
    messages = [message(**options) for options in MESSAGES.values()]
    repeated = [message() for _ in range(25)]
    one_by_one = VirtualPublisher(Connection(sqs_url, transport_options=options))
    one_by_one.connect()
    publish(one_by_one, [*messages, *repeated])
    one_by_one.close()
    expected = found(sqs_url)
    with sqs_client(sqs_url) as client:
        for name in queue_names(sqs_url):  # FIFO queues remember what they had
            client.delete_queue(QueueUrl=client.get_queue_url(QueueName=name)["QueueUrl"])
    outcome = publish(open_publisher(sqs_url, **options), [*messages, *repeated])
    assert outcome.accepted == {each.id for each in [*messages, *repeated]}
    assert found(sqs_url) == expected
    assert {queue: len(each) for queue, each in expected.items()} == {
        "celery": 33,
        "other": 1,
        "eu-orders_": 1,
        "jobs.fifo": 2,
        "orders-eu": 1,
        "first": 1,
        "second": 1,
    }


@pytest.mark.parametrize("options", [{}, {"sqs_base64_encoding": False}], ids=["base64", "plain"])
def test_kombu_reads_what_was_sent(
    options: dict[str, Any], sqs_url: str, open_publisher: OpenPublisher
) -> None:
    messages = [message(body=json.dumps([[number], {}, {}]).encode()) for number in range(3)]
    publish(open_publisher(sqs_url, **options), messages)
    with (
        Connection(sqs_url, transport_options={"wait_time_seconds": 0, **options}) as connection,
        connection.SimpleQueue("celery") as queue,
    ):
        payloads = {}
        for _ in messages:
            read = queue.get(timeout=10)
            payloads[read.headers["id"]] = read.payload
            read.ack()
    assert payloads == {each.task_id: json.loads(each.body) for each in messages}


def test_a_topic_with_attributes_tells_them_to_each_queue(
    sqs_url: str, open_publisher: OpenPublisher
) -> None:
    both = message(
        exchange=TOPIC,
        routing_key="news.city",
        declare=BOTH,
        properties={"message_attributes": ATTRIBUTES},
    )
    assert publish(open_publisher(sqs_url), [both]).accepted == {both.id}
    for queue in ("first", "second"):
        (only,) = taken(sqs_url, queue)
        assert only["MessageAttributes"] == ATTRIBUTES
        assert "message_attributes" not in envelope(only["Body"])["properties"]


def test_a_request_carries_ten_messages_and_some_requests_are_under_way_at_once(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    stub.seconds = 0.05
    messages = [message() for _ in range(205)]
    assert publish(open_publisher(stub.url), messages).accepted == {each.id for each in messages}
    sizes = [len(batch) for batch in stub.batches()]
    assert (len(sizes), max(sizes), min(sizes)) == (21, 10, 5)
    assert 4 <= stub.most_at_once <= 8
    sent = [envelope(body)["headers"]["id"] for body in stub.bodies()]
    assert sorted(sent) == sorted(each.task_id for each in messages)


def test_requests_are_no_longer_than_sqs_takes(sqs_url: str, open_publisher: OpenPublisher) -> None:
    messages = [message(body=b"x" * 200_000) for _ in range(10)]
    assert publish(open_publisher(sqs_url), messages).accepted == {each.id for each in messages}
    assert sorted(task_ids(sqs_url)) == sorted(each.task_id for each in messages)


def sized(bytes_: int, overhead: int) -> ClaimedMessage:
    """A message that counts so many bytes, part of them in an attribute."""
    value = "v" * (bytes_ - overhead - 400_000 - len("nameString"))
    return message(
        body=b"x" * 300_000,
        headers={"id": "same"},
        properties={
            "correlation_id": "same",
            "message_attributes": {"name": {"DataType": "String", "StringValue": value}},
        },
    )


@pytest.fixture
def overhead(stub: SQSStub, open_publisher: OpenPublisher) -> int:
    """What is sent of such a message without its body and attributes."""
    empty = message(body=b"", headers={"id": "same"}, properties={"correlation_id": "same"})
    publish(open_publisher(stub.url, sqs_base64_encoding=False), [empty])
    (body,) = stub.bodies()
    stub.queues.clear()
    stub.requests.clear()
    return len(body)


def test_a_message_may_have_a_mebibyte_with_its_attributes_and_no_byte_more(
    stub: SQSStub, open_publisher: OpenPublisher, overhead: int
) -> None:
    longest, too_long = sized(MIB, overhead), sized(MIB + 1, overhead)
    messages = [message(), too_long, longest, message()]
    outcome = publish(open_publisher(stub.url, sqs_base64_encoding=False), messages)
    assert set(outcome.errors) == {too_long.id}
    assert "size" in outcome.errors[too_long.id]
    assert "1,048,576" in outcome.errors[too_long.id]
    assert "1,048,577" in outcome.errors[too_long.id]
    assert len(stub.bodies()) == 3


@pytest.mark.parametrize(("bytes_", "requests"), [(MIB // 2, 1), (MIB // 2 + 1, 2)])
def test_what_is_together_too_long_goes_in_two_requests(
    bytes_: int, requests: int, stub: SQSStub, open_publisher: OpenPublisher, overhead: int
) -> None:
    messages = [sized(bytes_, overhead) for _ in range(2)]
    publisher = open_publisher(stub.url, sqs_base64_encoding=False)
    assert publish(publisher, messages).accepted == {each.id for each in messages}
    assert len(stub.batches()) == requests


def test_base64_counts(stub: SQSStub, open_publisher: OpenPublisher) -> None:
    large, small = message(body=b"x" * 750_000), message()
    outcome = publish(open_publisher(stub.url), [large, small])
    assert set(outcome.errors) == {large.id}
    assert outcome.accepted == {small.id}
    assert publish(open_publisher(stub.url, sqs_base64_encoding=False), [large]).accepted == {large.id}


DELAYS = [
    (None, None),
    (0.0, 0),
    (-30.0, 0),
    (0.4, 1),
    (600.0, 600),
    (899.2, 900),
    (900.0, 900),
    (900.5, 900),
]


@pytest.mark.parametrize(("due_in", "seconds"), DELAYS)
def test_a_delay_is_sent_as_what_remains_of_it(
    due_in: float | None, seconds: int | None, stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    delayed = message(due_in=due_in)
    assert publish(open_publisher(stub.url), [delayed]).accepted == {delayed.id}
    ((entry,),) = stub.batches()
    assert entry.get("DelaySeconds") == seconds


def test_the_time_since_the_claim_is_no_part_of_the_delay(
    stub: SQSStub, open_publisher: OpenPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = open_publisher(stub.url)
    monkeypatch.setattr("time.monotonic", lambda: 1000.0)
    publisher.publish([message(due_in=600.0)], deadline=2000.0, read_at=900.0)
    ((entry,),) = stub.batches()
    assert entry["DelaySeconds"] == 500


def test_a_delay_that_sqs_does_not_take_is_waited_for_here(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    late, early = message(due_in=905.0), message(due_in=600.0)
    outcome = publish(open_publisher(stub.url), [late, early])
    assert (outcome.deferred, outcome.accepted) == ({late.id}, {early.id})
    assert len(stub.bodies()) == 1


@pytest.mark.parametrize("name", ["delay_seconds", "DelaySeconds"])
def test_a_delay_among_the_properties_is_sent_as_kombu_sends_it(
    name: str, stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    messages = [message(properties={name: value}) for value in (7, 0, 5000)]
    messages.append(message("jobs.fifo", properties={name: 7}))
    publish(open_publisher(stub.url), messages)
    assert [entry["DelaySeconds"] for entry in stub.queues["celery"]] == [7, 0, 900]
    assert "DelaySeconds" not in stub.queues["jobs.fifo"][0]


def test_predefined_queues_are_neither_looked_for_nor_made(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    stub.queues.update({"jobs.fifo": [], "standard": []})
    predefined = {
        "jobs.fifo": {"url": stub.queue_url("jobs.fifo")},
        "std": {"url": stub.queue_url("standard")},
    }
    messages = [
        message("std"),
        message("other"),
        message("jobs.fifo"),
        message("other"),
        message("std"),
    ]
    outcome = publish(open_publisher(stub.url, predefined_queues=predefined), messages)
    assert set(outcome.errors) == {messages[1].id, messages[3].id}
    assert all("predefined_queues" in text for text in outcome.errors.values())
    assert (len(stub.bodies("standard")), len(stub.bodies("jobs.fifo"))) == (2, 1)
    assert {name for name, _ in stub.requests} <= {"SendMessageBatch", "GetQueueAttributes"}


def test_a_prefix_stands_before_the_name(sqs_url: str, open_publisher: OpenPublisher) -> None:
    sent = message()
    publish(open_publisher(sqs_url, queue_name_prefix="eu-"), [sent])
    assert queue_names(sqs_url) == ["eu-celery"]
    assert task_ids(sqs_url, "eu-celery") == [sent.task_id]


def test_a_queue_is_made_as_kombu_makes_it(sqs_url: str, open_publisher: OpenPublisher) -> None:
    options = {"visibility_timeout": 77, "sqs-creation-attributes": {"DelaySeconds": "3"}}
    publish(open_publisher(sqs_url, **options), [message(), message("jobs.fifo")])
    with sqs_client(sqs_url) as client:
        found = {}
        for name in queue_names(sqs_url):
            url = client.get_queue_url(QueueName=name)["QueueUrl"]
            found[name] = client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])[
                "Attributes"
            ]
    assert found.keys() == {"celery", "jobs.fifo"}
    assert all(each["VisibilityTimeout"] == "77" for each in found.values())
    assert all(each["DelaySeconds"] == "3" for each in found.values())
    assert found["jobs.fifo"]["FifoQueue"] == "true"


def test_each_predefined_queue_has_its_own_credentials(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    stub.queues.update({"one": [], "two": []})
    predefined = {
        name: {"url": stub.queue_url(name), "access_key_id": f"key-{name}", "secret_access_key": "s"}
        for name in ("one", "two")
    }
    messages = [message(name) for name in ("one", "two")]
    publish(open_publisher(stub.url, predefined_queues=predefined), messages)
    assert {asked["QueueUrl"]: asked[KEY] for asked in stub.asked()} == {
        stub.queue_url("one"): "key-one",
        stub.queue_url("two"): "key-two",
    }


def test_a_fanout_goes_to_sns(sqs_url: str, open_publisher: OpenPublisher) -> None:
    everyone = Exchange("all", "fanout")
    queue = Queue("listener", everyone)
    publisher = open_publisher(sqs_url, supports_fanout=True, region="us-east-1")
    with Connection(sqs_url, transport_options={"supports_fanout": True}) as connection:
        channel = connection.default_channel
        queue(channel).declare()
        channel.fanout.subscriptions.subscribe_queue(queue_name="listener", exchange_name="all")
    sent = [message(exchange=everyone, routing_key="", declare=[everyone]) for _ in range(2)]
    assert publish(publisher, [*sent, message()]).accepted.issuperset(each.id for each in sent)
    heard = [envelope(each["Body"]) for each in taken(sqs_url, "listener")]
    assert sorted(each["headers"]["id"] for each in heard) == [each.task_id for each in sent]
