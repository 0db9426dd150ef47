"""What the tests of publishers begin with: claimed messages without a table behind them."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

from kombu import Connection, Exchange, Queue

from celery_outbox.message import ClaimedMessage, Envelope
from celery_outbox.relay.publishers import Outcome, Publisher, publisher_for

_ids = itertools.count(1)


def message(
    queue: str = "celery",
    *,
    body: bytes = b"[[1, 2], {}, {}]",
    headers: Any = None,
    properties: Any = None,
    exchange: str | Exchange = "",
    routing_key: str | None = None,
    declare: Sequence[Any] | None = None,
    expires_in: float | None = None,
    due_in: float | None = None,
) -> ClaimedMessage:
    """A message as Celery makes it for ``queue``, but for what is given."""
    number = next(_ids)
    task_id = f"id-{number}"
    envelope = Envelope(
        exchange=exchange,
        routing_key=queue if routing_key is None else routing_key,
        content_type="application/json",
        content_encoding="utf-8",
        headers={"id": task_id, "task": "shop.add", **(headers or {})},
        properties={
            "delivery_mode": 2,
            "correlation_id": task_id,
            "reply_to": "",
            **(properties or {}),
        },
        declare=[Queue(queue, Exchange(queue), queue)] if declare is None else declare,
    )
    return ClaimedMessage(
        id=number,
        identity=f"row{number}",
        broker="shop",
        task_id=task_id,
        task_name="shop.add",
        queue=queue,
        envelope=envelope.to_text(),
        body=body,
        attempts=1,
        expires_in=expires_in,
        due_in=due_in,
    )


def connected(url: str, **options: Any) -> Publisher:
    """The publisher for a broker, connected."""
    publisher = publisher_for(Connection(url, **options))
    publisher.connect()
    return publisher


def publish(publisher: Publisher, messages: Sequence[ClaimedMessage], seconds: float = 60) -> Outcome:
    """Publish one batch, whose answer keeps the contract."""
    now = time.monotonic()
    outcome = publisher.publish(messages, deadline=now + seconds, read_at=now)
    outcome.check(messages)
    return outcome
