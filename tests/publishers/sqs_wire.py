"""What lies in the queues of SQS, read with boto3: no publisher and nothing of Kombu takes part."""

import base64
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config

from celery_outbox.message import ClaimedMessage
from tests.publishers.sqs_stub import SQSStub


@contextmanager
def sqs_client(url: str, service: str = "sqs") -> Iterator[Any]:
    """A client for the server of a broker's URL."""
    parts = urlsplit(url)
    client = boto3.client(
        service,
        endpoint_url=f"http://{parts.hostname}:{parts.port}",
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        config=Config(retries={"total_max_attempts": 1}),
    )
    try:
        yield client
    finally:
        client.close()


def taken(url: str, queue: str = "celery") -> list[dict[str, Any]]:
    """Take every message off a queue, as SQS hands it out."""
    found: list[dict[str, Any]] = []
    with sqs_client(url) as client:
        address = client.get_queue_url(QueueName=queue)["QueueUrl"]
        asking = {
            "QueueUrl": address,
            "MaxNumberOfMessages": 10,
            "MessageAttributeNames": ["All"],
            "MessageSystemAttributeNames": ["All"],
        }
        while messages := client.receive_message(**asking).get("Messages"):
            found += messages
            for each in messages:
                client.delete_message(QueueUrl=address, ReceiptHandle=each["ReceiptHandle"])
    return found


def envelope(body: str) -> dict[str, Any]:
    """Read what Kombu has written, in base64 or not."""
    text = body if body.startswith("{") else base64.b64decode(body)
    found: dict[str, Any] = json.loads(text)
    return found


def task_ids(url: str, queue: str = "celery") -> list[str]:
    """Take every message off a queue and return the ids of their tasks."""
    return [envelope(each["Body"])["headers"]["id"] for each in taken(url, queue)]


def queue_names(url: str) -> list[str]:
    """The queues that there are."""
    with sqs_client(url) as client:
        return sorted(each.rpartition("/")[2] for each in client.list_queues().get("QueueUrls", []))


def arrived(stub: SQSStub, queue: str = "celery") -> set[str]:
    """The ids of the tasks that a queue of the stub has taken."""
    return {envelope(body)["headers"]["id"] for body in stub.bodies(queue)}


def names(messages: Iterable[ClaimedMessage]) -> set[str]:
    """The ids of their tasks."""
    return {each.task_id for each in messages}


def rows(messages: Iterable[ClaimedMessage]) -> set[int]:
    """The ids of their rows."""
    return {each.id for each in messages}
