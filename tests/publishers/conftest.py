"""Publishers that end with their test, and the server that goes wrong on demand."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from celery_outbox.relay.publishers import Publisher
from tests.publishers.batches import connected
from tests.publishers.sqs_stub import SQSStub

OpenPublisher = Callable[..., Publisher]


@pytest.fixture
def open_publisher() -> Iterator[OpenPublisher]:
    """Connect publishers by URL and transport options."""
    with ExitStack() as stack:

        def open_(url: str, **transport_options: Any) -> Publisher:
            publisher = connected(url, transport_options=transport_options)
            stack.callback(publisher.close)
            return publisher

        yield open_


@pytest.fixture
def stub(sqs_stub: SQSStub) -> SQSStub:
    """Speaks SQS, and does what it is told."""
    return sqs_stub
