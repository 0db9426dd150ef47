"""SQS that answers in another order than it was asked: each answer is that of its own message."""

import threading

from tests.publishers.batches import message, publish
from tests.publishers.conftest import OpenPublisher
from tests.publishers.sqs_stub import Fault, Json, SQSStub
from tests.publishers.sqs_wire import arrived, envelope, names, rows
from tests.waiting import wait_until


def test_entries_that_are_told_in_another_order_are_told_apart(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    messages = [message() for _ in range(50)]
    odd = names(messages[::3])

    def is_odd(entry: Json) -> bool:
        return envelope(entry["MessageBody"])["headers"]["id"] in odd

    stub.faults.append(Fault(refuse=is_odd, reorders=True))
    outcome = publish(open_publisher(stub.url), messages)
    assert outcome.errors.keys() == rows(messages[::3])
    assert outcome.accepted == rows(messages) - outcome.errors.keys()
    assert arrived(stub) == names(messages) - odd


def test_requests_that_are_answered_in_another_order_are_told_apart(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    publisher = open_publisher(stub.url)
    publish(publisher, [message()])
    messages = [message() for _ in range(30)]
    others_are_done = threading.Event()
    # The first request is answered last, and with a refusal of everything in it.
    stub.faults.append(Fault(times=1, until=others_are_done, refuse=lambda entry: True))

    def answer_the_first() -> None:
        wait_until(lambda: len(stub.bodies()) == 21, 20, "the other requests")
        others_are_done.set()

    beside = threading.Thread(target=answer_the_first)
    beside.start()
    outcome = publish(publisher, messages)
    beside.join()
    assert len(outcome.errors) == 10
    assert outcome.accepted == rows(messages) - outcome.errors.keys()
    assert arrived(stub) >= names(each for each in messages if each.id in outcome.accepted)
    assert arrived(stub).isdisjoint(names(each for each in messages if each.id in outcome.errors))
