"""SQS: queues that are made, made again, or cannot be made."""

import pytest

from tests.publishers.batches import message, publish
from tests.publishers.conftest import OpenPublisher
from tests.publishers.sqs_stub import Fault, SQSStub
from tests.publishers.sqs_wire import arrived, names, rows


def test_a_queue_that_cannot_be_made_is_tried_once_for_a_batch(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    stub.faults.append(
        Fault(operation="CreateQueue", code="AccessDenied", only=lambda a: a["QueueName"] == "bad")
    )
    refused, others = [message("bad") for _ in range(20)], [message() for _ in range(3)]
    outcome = publish(open_publisher(stub.url), [*refused, *others])
    assert set(outcome.errors) == rows(refused)
    assert all("AccessDenied" in text for text in outcome.errors.values())
    assert outcome.accepted == rows(others)
    assert [asked["QueueName"] for asked in stub.asked("CreateQueue")] == ["bad", "celery"]


def test_a_queue_that_was_deleted_is_made_again(stub: SQSStub, open_publisher: OpenPublisher) -> None:
    publisher = open_publisher(stub.url)
    publish(publisher, [message()])
    del stub.queues["celery"]
    messages = [message() for _ in range(45)]
    assert publish(publisher, messages).accepted == rows(messages)
    assert arrived(stub) == names(messages)
    assert len(stub.asked("CreateQueue")) == 2


def test_a_queue_that_was_deleted_before_it_was_used_is_made_again(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    stub.queues["celery"] = []
    publisher = open_publisher(stub.url)
    del stub.queues["celery"]
    messages = [message() for _ in range(3)]
    assert publish(publisher, messages).accepted == rows(messages)
    assert arrived(stub) == names(messages)


def test_a_queue_that_sqs_does_not_make_again_is_an_error(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    publisher = open_publisher(stub.url)
    publish(publisher, [message()])
    del stub.queues["celery"]
    stub.faults.append(
        Fault(
            operation="CreateQueue",
            code="QueueDeletedRecently",
            only=lambda asked: asked["QueueName"] == "celery",
        )
    )
    lost, others = [message() for _ in range(45)], [message("other")]
    outcome = publish(publisher, [*lost, *others])
    assert rows(others) == outcome.accepted
    assert outcome.errors.keys() == rows(lost)
    assert "QueueDeletedRecently" in str(outcome.errors)
    assert len(stub.asked("CreateQueue")) == 3


def test_a_predefined_queue_that_is_missing_is_an_error(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    stub.queues.update({"bad": [], "good": []})
    predefined = {name: {"url": stub.queue_url(name)} for name in ("bad", "good")}
    publisher = open_publisher(stub.url, predefined_queues=predefined)
    publish(publisher, [message("bad"), message("good")])
    del stub.queues["bad"]
    messages = [message("bad"), message("good")]
    outcome = publish(publisher, messages)
    assert list(outcome.errors) == [messages[0].id]
    assert "NonExistentQueue" in outcome.errors[messages[0].id]
    assert outcome.accepted == {messages[1].id}
    assert stub.asked("CreateQueue") == []


@pytest.mark.parametrize("operation", ["CreateQueue", "GetQueueAttributes"])
def test_a_connection_that_breaks_before_a_message_is_sent_costs_no_attempt(
    operation: str, stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    stub.faults.append(Fault(operation=operation, cut="before replying", times=1))
    publisher = open_publisher(stub.url)
    messages = [message(), message()]
    outcome = publish(publisher, messages)
    assert outcome.unsent == rows(messages)
    assert outcome.is_connection_lost
    publisher.connect()
    assert publish(publisher, messages).accepted == rows(messages)
