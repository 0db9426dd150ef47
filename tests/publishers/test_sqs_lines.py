"""SQS FIFO through a relay: what is refused holds up its group, under whatever name of its queue."""

import itertools
import random
from typing import Any

import pytest

from tests.publishers.batches import message
from tests.publishers.conftest import OpenPublisher
from tests.publishers.sqs_stub import Fault, Json, SQSStub
from tests.publishers.sqs_wire import envelope
from tests.relay.apps import relaying, rows, send
from tests.relay.conftest import OpenOutbox, open_outbox
from tests.waiting import wait_until

__all__ = ["open_outbox"]

NAMES = ("eu.jobs.fifo", "eu-jobs.fifo", "eu.jobs.fifo")


def group_of(name: str, group: str | None = None) -> Any:
    return message(name, properties={"MessageGroupId": group} if group else {})


def test_two_names_of_one_queue_are_one_line(stub: SQSStub, open_publisher: OpenPublisher) -> None:
    publisher = open_publisher(stub.url)
    lines = [publisher.line_of(group_of(name, "a")) for name in NAMES]
    lines.append(publisher.line_of(group_of("eu.jobs.fifo", "b")))
    lines.append(publisher.line_of(group_of("us.jobs.fifo", "a")))
    publisher.close()
    # Before each connection it is asked, too.
    lines.append(publisher.line_of(group_of("eu-jobs.fifo", "a")))
    assert [lines.index(each) for each in lines] == [0, 0, 0, 3, 4, 0]
    assert publisher.line_of(group_of("eu.jobs", "a")) is None


def test_two_predefined_names_of_one_queue_are_one_line(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    url = {"url": stub.queue_url("jobs.fifo")}
    stub.queues["jobs.fifo"] = []
    predefined = {"eu-one.fifo": url, "eu-two.fifo": url}
    publisher = open_publisher(stub.url, predefined_queues=predefined, queue_name_prefix="eu-")
    one, two = (publisher.line_of(group_of(f"{name}.fifo")) for name in ("one", "two"))
    assert one == two


def name_of(entry: Json) -> str:
    return str(envelope(entry["MessageBody"])["headers"]["id"])


def test_a_group_keeps_its_order_through_refusals_in_batches_of_any_size(
    sqs_stub: SQSStub, open_outbox: OpenOutbox, sqlite_url: str
) -> None:
    outbox = open_outbox(sqs_stub.url, sqlite_url, retry={"base_delay": 0.02, "max_delay": 0.1})
    chance = random.Random(7)
    refusals = itertools.cycle(chance.random() < 0.3 for _ in range(97))
    sqs_stub.faults.append(Fault(refuse=lambda _: next(refusals)))
    sent: dict[str, list[str]] = {"a": [], "b": []}
    with relaying(outbox, batch=2):
        for number in range(24):
            group = chance.choice("ab")
            name = NAMES[number % 2]
            sent[group].append(send(outbox, queue=name, MessageGroupId=group))
        wait_until(lambda: not rows(outbox), timeout=60)
    taken: dict[str, list[str]] = {"a": [], "b": []}
    for entry in sqs_stub.queues["eu-jobs.fifo"]:
        taken[entry["MessageGroupId"]].append(name_of(entry))
    assert taken == sent


@pytest.mark.parametrize("name", ["jobs.fifo", "jobs"])
def test_a_message_that_cannot_be_read_stands_in_no_line(
    name: str, stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    odd = group_of(name, "a")._replace(envelope='MessageGroupId {"v": 1')
    assert open_publisher(stub.url).line_of(odd) is None
