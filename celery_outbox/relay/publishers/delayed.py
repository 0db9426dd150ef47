"""RabbitMQ's native delayed delivery: how long it still waits, written as Celery writes it.

For quorum queues Celery puts the delay into the routing key, as 28 binary digits, and sends to the
topmost of the exchanges that count it. There it begins at the publish, not at the dispatch.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import replace

from ...message import ClaimedMessage, Envelope

__all__ = ["with_delay_left"]

#: The exchange that it begins at; its name may have a prefix.
_TOPMOST = "celery_delayed_27"
_DIGITS = 28
_DELAY = re.compile(rf"(?:[01]\.){{{_DIGITS}}}")


def with_delay_left(message: ClaimedMessage, read_at: float) -> ClaimedMessage:
    """The message with what is left of its delay, where the broker delays it; else as it is.

    The delay is in whole seconds, rounded up; with less than one left it is none: the exchanges hand
    such a message on at once.
    """
    if message.due_in is None or _TOPMOST not in message.envelope:
        return message
    envelope = Envelope.from_text(message.envelope)
    delay = _DELAY.match(envelope.routing_key)
    exchange = getattr(envelope.exchange, "name", envelope.exchange)
    if delay is None or not exchange.endswith(_TOPMOST):
        return message
    left = message.due_in - (time.monotonic() - read_at)
    seconds = min(math.ceil(left), 2**_DIGITS - 1) if left >= 1 else 0
    digits = ".".join(f"{seconds:0{_DIGITS}b}")
    routing_key = f"{digits}.{envelope.routing_key[delay.end() :]}"
    return message._replace(envelope=replace(envelope, routing_key=routing_key).to_text())
