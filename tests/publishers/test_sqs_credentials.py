"""SQS: credentials that expire are read anew without a restart, and are told to nobody."""

import logging

import boto3
import pytest

from celery_outbox.relay.publishers import Publisher
from tests.processes import HOST
from tests.publishers.batches import message, publish
from tests.publishers.conftest import OpenPublisher
from tests.publishers.sqs_stub import KEY, Fault, Json, SQSStub
from tests.publishers.sqs_wire import rows
from tests.servers import SQSServer
from tests.waiting import wait_until

EXPIRED = [
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "SignatureDoesNotMatch",
]
SIGNED = (
    "The request signature we calculated does not match. The Canonical String for this request should "
    "have been\n'POST\n/\n\nx-amz-security-token:hush'"
)


def use(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let boto3 find these credentials where it looks when no others are given."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)


def with_key(key: str, asked: Json) -> bool:
    return bool(asked[KEY] == key)


@pytest.mark.parametrize("code", EXPIRED)
def test_expired_credentials_cost_no_attempt_and_are_read_anew(
    code: str, stub: SQSStub, open_publisher: OpenPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    use("old", monkeypatch)
    publisher = open_publisher(f"sqs://{HOST}:{stub.port}//")
    messages = [message() for _ in range(30)]
    publish(publisher, messages[:1])
    stub.faults.append(Fault(code=code, status=403, only=lambda asked: with_key("old", asked)))
    outcome = publish(publisher, messages)
    assert outcome.unsent == rows(messages)
    assert outcome.is_connection_lost
    assert not publisher.is_connected
    use("new", monkeypatch)
    publisher.connect()
    assert publish(publisher, messages).accepted == rows(messages)


def test_credentials_that_expire_between_two_requests_cost_no_attempt(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    stub.faults.append(Fault(code="ExpiredToken", status=403, only=lambda _: len(stub.batches()) > 1))
    messages = [message() for _ in range(30)]
    outcome = publish(open_publisher(stub.url), messages)
    assert (len(outcome.accepted), len(outcome.unsent), outcome.errors) == (10, 20, {})
    assert len(stub.bodies()) == 10


def test_after_credentials_have_expired_no_other_queue_is_tried(
    stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    stub.faults.append(Fault(operation="CreateQueue", code="ExpiredToken", status=403))
    messages = [message(f"queue-{number}") for number in range(5)]
    outcome = publish(open_publisher(stub.url), messages)
    assert outcome.unsent == rows(messages)
    assert len(stub.asked("CreateQueue")) == 1


def test_missing_credentials_cost_no_attempt(
    stub: SQSStub, open_publisher: OpenPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    predefined = {"celery": {"url": stub.queue_url("celery")}}
    publisher = open_publisher(f"sqs://{HOST}:{stub.port}//", predefined_queues=predefined)
    messages = [message(), message()]
    outcome = publish(publisher, messages)
    assert outcome.unsent == rows(messages)
    assert outcome.is_connection_lost
    assert stub.requests == []


def predefined(stub: SQSStub, open_publisher: OpenPublisher) -> Publisher:
    """A publisher of two queues, with credentials for each."""
    stub.queues.update({"good": [], "bad": []})
    queues = {
        name: {"url": stub.queue_url(name), "access_key_id": name, "secret_access_key": "hush"}
        for name in stub.queues
    }
    return open_publisher(stub.url, predefined_queues=queues)


@pytest.mark.parametrize("operation", ["SendMessageBatch", "GetQueueAttributes"])
def test_a_queue_with_wrong_credentials_of_its_own_waits_alone(
    operation: str, stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    publisher = predefined(stub, open_publisher)
    stub.faults.append(
        Fault(
            operation=operation,
            code="SignatureDoesNotMatch",
            status=403,
            reason=SIGNED,
            only=lambda asked: with_key("bad", asked),
        )
    )
    refused, others = [message("bad") for _ in range(12)], [message("good") for _ in range(12)]
    outcome = publish(publisher, [*refused, *others])
    assert outcome.accepted == rows(others)
    assert outcome.errors.keys() | outcome.unsent == rows(refused)
    assert len(outcome.errors) >= 1
    assert all("SignatureDoesNotMatch" in text for text in outcome.errors.values())
    assert "hush" not in str(outcome.errors)


def test_why_sqs_cannot_be_used_is_logged_once_and_without_what_was_signed(
    stub: SQSStub, open_publisher: OpenPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "celery_outbox")
    publisher = predefined(stub, open_publisher)
    stub.faults.append(Fault(code="SignatureDoesNotMatch", status=403, reason=SIGNED))
    for _ in range(3):
        assert publish(publisher, [message("bad")]).is_connection_lost
        publisher.connect()
    (record,) = caplog.records
    assert "SignatureDoesNotMatch" in record.getMessage()
    assert "hush" not in record.getMessage()
    stub.faults.clear()
    publish(publisher, [message("bad")])
    stub.faults.append(Fault(code="ExpiredToken", status=403))
    publish(publisher, [message("bad")])
    assert [each.levelname for each in caplog.records] == ["WARNING", "WARNING"]


@pytest.mark.parametrize("reason", [SIGNED, SIGNED.replace("\n", " ")])
def test_what_a_connection_is_refused_for_does_not_tell_what_was_signed(
    reason: str, stub: SQSStub, open_publisher: OpenPublisher
) -> None:
    stub.faults.append(
        Fault(operation="ListQueues", code="SignatureDoesNotMatch", status=403, reason=reason)
    )
    with pytest.raises(Exception, match="SignatureDoesNotMatch") as raised:
        open_publisher(stub.url)
    assert "hush" not in str(raised.value)


def test_the_credentials_of_a_role_are_renewed_while_it_publishes(
    stub: SQSStub,
    open_publisher: OpenPublisher,
    sqs_server: SQSServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use("base", monkeypatch)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://{HOST}:{sqs_server.port}")
    stub.queues["celery"] = []
    publisher = open_publisher(
        stub.url,
        predefined_queues={"celery": {"url": stub.queue_url("celery")}},
        sts_role_arn="arn:aws:iam::123456789012:role/relay",
        sts_token_buffer_time=899,
    )

    def keys() -> set[str]:
        sent = message()
        assert publish(publisher, [sent]).accepted == {sent.id}
        return {asked[KEY] for asked in stub.asked()}

    wait_until(lambda: len(keys()) >= 2)
    assert "base" not in keys()
