"""SQS FIFO: groups keep their order, and a message is deduplicated against itself alone."""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue

from celery_outbox.message import ClaimedMessage
from tests.publishers.batches import message, publish
from tests.publishers.conftest import OpenPublisher
from tests.publishers.sqs_stub import Fault, Json, SQSStub
from tests.publishers.sqs_wire import envelope, rows, sqs_client, taken

FIFO = "jobs.fifo"


def job(group: str = "a", **options: Any) -> ClaimedMessage:
    return message(FIFO, properties={"MessageGroupId": group}, **options)


def jobs(count: int, groups: str) -> list[ClaimedMessage]:
    return [job(groups[number % len(groups)]) for number in range(count)]


def name_of(entry: Json) -> str:
    return str(envelope(entry["MessageBody"])["headers"]["id"])


def by_group(stub: SQSStub) -> dict[str, list[str]]:
    """The tasks of each group, as the queue has taken them."""
    found = defaultdict(list)
    for entry in stub.queues.get(FIFO, ()):
        found[entry["MessageGroupId"]].append(name_of(entry))
    return found


def expected(messages: Sequence[ClaimedMessage], groups: str) -> dict[str, list[str]]:
    found = defaultdict(list)
    for number, each in enumerate(messages):
        found[groups[number % len(groups)]].append(each.task_id)
    return found


def naming(only: ClaimedMessage) -> Callable[[Json], bool]:
    return lambda entry: name_of(entry) == only.task_id


def test_of_one_group_one_message_is_under_way_and_they_keep_their_order(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    stub.seconds = 0.005
    messages = jobs(60, "abcd")
    assert publish(open_publisher(stub.url), messages).accepted == rows(messages)
    assert by_group(stub) == expected(messages, "abcd")
    assert stub.most_of_one_group == 1
    for batch in stub.batches():
        groups = [entry["MessageGroupId"] for entry in batch]
        assert len(groups) == len(set(groups))


def test_many_groups_fill_requests_and_go_at_once(stub: SQSStub, open_publisher: OpenPublisher) -> None:
    stub.seconds = 0.05
    groups = "".join(chr(ord("A") + number) for number in range(50))
    messages = jobs(100, groups)
    assert publish(open_publisher(stub.url), messages).accepted == rows(messages)
    assert by_group(stub) == expected(messages, groups)
    assert stub.most_of_one_group == 1
    assert stub.most_at_once >= 4
    assert max(map(len, stub.batches())) == 10


def test_without_a_group_all_are_of_the_default_group(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    messages = [message(FIFO) for _ in range(12)]
    publish(open_publisher(stub.url), messages)
    assert by_group(stub) == {"default": [each.task_id for each in messages]}
    assert stub.most_of_one_group == 1


def test_a_group_on_a_standard_queue_holds_nothing(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    messages = [message(properties={"MessageGroupId": "tenant-7"}) for _ in range(10)]
    stub.faults.append(Fault(refuse=naming(messages[0])))
    assert publish(open_publisher(stub.url), messages).accepted == rows(messages[1:])
    (batch,) = stub.batches()
    assert {entry["MessageGroupId"] for entry in batch} == {"tenant-7"}
    assert not any("MessageDeduplicationId" in entry for entry in batch)


@pytest.mark.parametrize("fault", ["refuse", "omit"])
def test_after_one_that_failed_none_of_its_group_is_sent(
    fault: str, stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    messages = jobs(12, "abc")
    stub.faults.append(Fault(**{fault: naming(messages[4])}))
    outcome = publish(open_publisher(stub.url), messages)
    assert set(outcome.errors) == {messages[4].id}
    assert outcome.unsent == {messages[7].id, messages[10].id}
    assert outcome.accepted == rows(messages) - {messages[number].id for number in (4, 7, 10)}
    assert not outcome.is_connection_lost
    order = expected(messages, "abc")
    assert by_group(stub) == {**order, "b": order["b"][:1]}


def test_what_comes_to_a_group_after_a_failure_is_not_sent_either(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    publisher = open_publisher(stub.url)
    publish(publisher, [job("first")])
    first, slow, second, late = (
        jobs(10, "abcdefghij"),
        message("slow"),
        jobs(10, "ABCDEFGHIJ"),
        job("a"),
    )
    answered = threading.Event()
    stub.faults.append(Fault(refuse=naming(first[0]), after=answered.set))
    # Routing goes on only when the first request has its answer.
    stub.faults.append(Fault(operation="CreateQueue", until=answered))
    outcome = publish(publisher, [*first, slow, *second, late])
    assert (list(outcome.errors), outcome.unsent) == ([first[0].id], {late.id})


def test_a_topic_of_which_one_queue_has_the_message_and_another_has_not_is_an_error(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    news = Exchange("news", "topic")
    queues = [Queue(name, news, "#") for name in (FIFO, "standard")]
    both = [
        message(exchange=news, routing_key="city", declare=queues, properties={"MessageGroupId": "a"})
        for _ in range(2)
    ]
    stub.faults.append(
        Fault(refuse=naming(both[0]), only=lambda asked: asked["QueueUrl"].endswith(FIFO))
    )
    outcome = publish(open_publisher(stub.url), both)
    assert set(outcome.errors) == rows(both)
    assert "another has it" in outcome.errors[both[1].id]
    assert len(stub.bodies("standard")) == 2


def test_after_one_that_is_too_long_none_of_its_group_is_sent(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    messages = [job(), job(body=b"x" * 800_000), job(), job("b")]
    outcome = publish(open_publisher(stub.url), messages)
    assert list(outcome.errors) == [messages[1].id]
    assert outcome.unsent == {messages[2].id}
    assert by_group(stub) == {"a": [messages[0].task_id], "b": [messages[3].task_id]}


def test_a_group_that_is_no_text_stays_alone(stub: SQSStub, open_publisher: OpenPublisher) -> None:
    odd = message(FIFO, properties={"MessageGroupId": ["a"]})
    messages = [job(), odd, job("b")]
    outcome = publish(open_publisher(stub.url), messages)
    assert list(outcome.errors) == [odd.id]
    assert outcome.accepted == {messages[0].id, messages[2].id}


def test_after_a_request_that_is_refused_none_of_its_groups_is_sent(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    messages = jobs(9, "abc")
    stub.faults.append(Fault(code="ThrottlingException", times=1))
    outcome = publish(open_publisher(stub.url), messages)
    assert set(outcome.errors) == rows(messages[:3])
    assert outcome.unsent == rows(messages[3:])
    assert by_group(stub) == {}


def test_a_queue_that_was_deleted_gets_its_groups_in_order(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    publisher = open_publisher(stub.url)
    publish(publisher, [job()])
    del stub.queues[FIFO]
    messages = jobs(20, "abc")
    assert publish(publisher, messages).accepted == rows(messages)
    assert by_group(stub) == expected(messages, "abc")


def test_a_request_that_is_refused_for_one_message_keeps_the_order(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    messages = jobs(9, "abc")
    stub.faults.append(
        Fault(code="InvalidMessageContents", only=lambda asked: len(asked["Entries"]) > 1)
    )
    assert publish(open_publisher(stub.url), messages).accepted == rows(messages)
    assert by_group(stub) == expected(messages, "abc")
    assert stub.most_of_one_group == 1


def test_two_names_of_one_queue_share_its_groups(stub: SQSStub, open_publisher: OpenPublisher) -> None:
    stub.seconds = 0.02
    one = [
        message(name, properties={"MessageGroupId": "a"})
        for name in ("eu.jobs.fifo", "eu-jobs.fifo") * 4
    ]
    assert publish(open_publisher(stub.url), one).accepted == rows(one)
    assert [name_of(entry) for entry in stub.queues["eu-jobs.fifo"]] == [each.task_id for each in one]
    assert stub.most_of_one_group == 1


def test_what_is_sent_again_after_a_lost_answer_is_there_once(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    publisher = open_publisher(stub.url)
    messages = [job(), message(FIFO, properties={"MessageDeduplicationId": "given"})]
    stub.faults.append(Fault(cut="before replying", times=1))
    assert set(publish(publisher, messages).errors) == rows(messages)
    publisher.connect()
    assert publish(publisher, messages).accepted == rows(messages)
    first, second = [
        {name_of(entry): entry["MessageDeduplicationId"] for entry in batch} for batch in stub.batches()
    ]
    assert first == second
    assert first[messages[1].task_id] == "given"
    assert first[messages[0].task_id] not in {"", "given"}
    assert len(stub.bodies(FIFO)) == 2


def test_one_task_that_is_dispatched_twice_is_there_twice(
    sqs_url: str, open_publisher: OpenPublisher
) -> None:
    twice = [job(headers={"id": "same"}) for _ in range(2)]
    assert publish(open_publisher(sqs_url), twice).accepted == rows(twice)
    found = []
    while messages := taken(sqs_url, FIFO):
        found += messages
    assert len(found) == 2


def test_before_its_time_a_message_waits_here_and_holds_none_of_its_group(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    messages = [job(due_in=4.0), job(), job(due_in=0.0), job(due_in=-3.0)]
    outcome = publish(open_publisher(stub.url), messages)
    assert outcome.deferred == {messages[0].id}
    assert outcome.accepted == rows(messages[1:])
    assert not any("DelaySeconds" in entry for entry in stub.queues[FIFO])
    assert by_group(stub) == {"a": [each.task_id for each in messages[1:]]}


def test_nothing_of_a_group_follows_an_answer_that_did_not_come(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    publisher = open_publisher(stub.url, **{"client-config": {"read_timeout": 0.3}})
    publish(publisher, [job("first")])
    answered = threading.Event()
    messages = jobs(6, "ab")
    stub.faults.append(Fault(until=answered))
    outcome = publish(publisher, messages)
    answered.set()
    assert set(outcome.errors) == rows(messages[:2])
    assert outcome.unsent == rows(messages[2:])


def test_a_topic_of_sns_is_told_the_same_deduplication_id_each_time(
    sqs_url: str, open_publisher: OpenPublisher
) -> None:
    everyone = Exchange("all.fifo", "fanout")
    options = {"supports_fanout": True, "region": "us-east-1"}
    publisher = open_publisher(sqs_url, **options)
    with Connection(sqs_url, transport_options=options) as connection:
        channel = connection.default_channel
        Queue("listener.fifo", everyone)(channel).declare()
        channel.fanout.subscriptions.subscribe_queue(
            queue_name="listener.fifo", exchange_name="all.fifo"
        )
    told = message(exchange=everyone, routing_key="", declare=[everyone])
    for _ in range(2):
        assert publish(publisher, [told]).accepted == {told.id}
    with sqs_client(sqs_url) as client:
        url = client.get_queue_url(QueueName="listener.fifo")["QueueUrl"]
        heard = client.receive_message(
            QueueUrl=url, MaxNumberOfMessages=10, MessageSystemAttributeNames=["All"]
        )["Messages"]
    assert len({each["Attributes"]["MessageDeduplicationId"] for each in heard}) == 1
