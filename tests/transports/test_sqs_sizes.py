"""What SQS would never take is refused at the dispatch, counted as the relay counts it."""

import re
from typing import Any

import pytest

from celery_outbox import Outbox
from celery_outbox.errors import OptionError
from tests.publishers.sqs_stub import SQSStub
from tests.publishers.sqs_wire import arrived
from tests.relay.apps import relay_once, rows, send
from tests.transports.conftest import OpenStored

MIB = 1024 * 1024


@pytest.fixture(params=[True, False], ids=["base64", "plain"])
def outbox(request: pytest.FixtureRequest, sqs_stub: SQSStub, outbox_for: OpenStored) -> Outbox:
    options = {"sqs_base64_encoding": request.param}
    return outbox_for(sqs_stub.url, config={"broker_transport_options": options})


def attributes(bytes_: int) -> dict[str, Any]:
    """Attributes that count so many bytes."""
    return {
        "tenant": {"DataType": "String", "StringValue": "é" * 50},
        "raw": {"DataType": "Binary", "BinaryValue": bytes(range(256))},
        "more": {"DataType": "String", "StringValue": "v" * (bytes_ - 387)},
    }


@pytest.mark.parametrize("options", [{}, {"priority": 3, "MessageGroupId": "g"}], ids=["usual", "more"])
def test_the_longest_message_is_taken_and_none_that_has_a_byte_more(
    options: dict[str, Any], outbox: Outbox, sqs_stub: SQSStub
) -> None:
    def dispatch(bytes_: int) -> str:
        given = {"message_attributes": attributes(bytes_), "task_id": "the-id", **options}
        return send(outbox, "x" * 200_000, 1, **given)

    with pytest.raises(OptionError, match=r"at most 1,048,576 bytes") as caught:
        dispatch(MIB)
    found = re.search(r"with ([\d,]+) bytes as it is sent", str(caught.value))
    assert found is not None
    left = MIB - (int(found[1].replace(",", "")) - MIB)
    with pytest.raises(OptionError, match=r"with 1,048,577 bytes as it is sent"):
        dispatch(left + 1)
    assert rows(outbox) == []
    dispatch(left)
    relay_once(outbox)
    assert rows(outbox) == []
    assert arrived(sqs_stub) == {"the-id"}
    (entry,) = sqs_stub.queues["celery"]
    told = entry["MessageAttributes"]
    assert told.keys() == {"tenant", "raw", "more"}


def test_a_header_counts(outbox: Outbox) -> None:
    with pytest.raises(OptionError, match="the limit of SQS"):
        send(outbox, headers={"report": "x" * MIB})
    assert rows(outbox) == []


@pytest.mark.parametrize(
    "odd", ["no mapping", {"name": "no mapping"}, {"name": {"StringValue": "\ud800"}}]
)
def test_attributes_that_are_none_hold_no_other(odd: Any, outbox: Outbox, sqs_stub: SQSStub) -> None:
    sent = [send(outbox, "x", 1), send(outbox, "y", 1)]
    wrong = send(outbox, message_attributes=odd)
    sent.append(send(outbox))
    relay_once(outbox)
    assert arrived(sqs_stub) == set(sent)
    (row,) = rows(outbox)
    assert row.task_id == wrong
    assert "not known" not in row.error
