"""The same call on two apps, one plain and one with an outbox, and what each puts on the broker.

A ``Pair`` sends plainly first and takes everything off the broker, then stores, relays and takes
again. What may differ is removed in ``comparable``, and nothing else.
"""

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import redis
from celery import Celery, Signature

from celery_outbox import Outbox
from tests.relay.apps import relay_once, rows
from tests.relay.wire import amqp_messages

TASK = "shop.add"
ID = "8e6a5b0e-2f7f-4c1e-9d3b-5a1f0c9d7e42"

#: What a queue or list holds, or the members of a set, under its name.
Contents = Mapping[str, Any]
Call = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A plain app and one with an outbox, on one broker.

    Where ``keeps_declared``, Kombu's bindings stay on Redis when its lists are taken off.
    """

    url: str
    plain: Celery
    outbox: Outbox
    keeps_declared: bool

    def configure(self, **config: Any) -> None:
        """Set both apps up alike."""
        self.plain.conf.update(config)
        self.outbox.app.conf.update(config)

    def contents(self, call: Call, *queues: str) -> tuple[Contents, Contents]:
        """Return what the plain app put on the broker by ``call``, and what the outbox did.

        ``call`` gets the app, and what chooses the outbox as keyword arguments.
        """
        call(self.plain)
        plain = self.take(*queues)
        call(self.outbox.app, via_outbox=True)
        relay_once(self.outbox)
        assert rows(self.outbox) == []
        return plain, self.take(*queues)

    def apply(self, *args: Any, queues: tuple[str, ...] = (), **options: Any) -> None:
        """Assert that ``apply_async`` with these arguments comes out alike."""
        options.setdefault("task_id", ID)

        def call(app: Celery, **choice: bool) -> None:
            app.tasks[TASK].apply_async(args or (2, 3), **options, **choice)

        self.compare(call, *queues)

    def compare(self, call: Call, *queues: str) -> None:
        """Assert that both put the same on the broker, and that it is something."""
        plain, stored = self.contents(call, *queues)
        assert plain
        assert comparable(stored) == comparable(plain)

    def take(self, *queues: str) -> Contents:
        """Take everything off the broker: of RabbitMQ, off the queues named."""
        if self.url.startswith("redis:"):
            return take_redis(self.url, keeps_declared=self.keeps_declared)
        return take_amqp(self.url, queues or ("celery",))


def take_redis(url: str, *, keeps_declared: bool = False) -> Contents:
    """Take everything out of a logical database of Redis, or its lists alone."""
    with redis.Redis.from_url(url) as client:
        contents: dict[str, Any] = {}
        for key in sorted(client.scan_iter()):
            if client.type(key) == b"list":
                texts = client.lrange(key, 0, -1)
                contents[key.decode()] = [_readable(json.loads(text)) for text in reversed(texts)]
                client.delete(key)
            else:
                contents[key.decode()] = client.smembers(key)
        if not keeps_declared:
            client.flushdb()
        return contents


def _readable(envelope: dict[str, Any]) -> dict[str, Any]:
    # The bytes of the body themselves: base64 is how a virtual transport carries them.
    body = envelope["body"]
    if envelope["properties"]["body_encoding"] == "base64":
        body = base64.b64decode(body)
    return {**envelope, "body": body}


def take_amqp(url: str, queues: tuple[str, ...]) -> Contents:
    """Take every message off queues of RabbitMQ."""
    return {
        queue: [
            {
                "body": message.body,
                "properties": message.properties,
                "headers": message.headers,
                "exchange": message.delivery_info["exchange"],
                "routing_key": message.delivery_info["routing_key"],
            }
            for message in amqp_messages(url, queue)
        ]
        for queue in queues
    }


def comparable(contents: Contents) -> Contents:
    """Remove what belongs to the sending process, and read the time that is left."""
    return {
        name: [_comparable(message) for message in messages] if isinstance(messages, list) else messages
        for name, messages in contents.items()
    }


def _comparable(message: dict[str, Any]) -> dict[str, Any]:
    properties = dict(message["properties"])
    headers = dict(message["headers"])
    headers.pop("origin", None)
    properties.pop("delivery_tag", None)
    properties.pop("application_headers", None)  # the headers once more
    if properties.get("reply_to") != "answers":  # what the tests give
        properties.pop("reply_to", None)
    if "expiration" in properties:
        properties["expiration"] = Seconds(int(properties["expiration"]) / 1000)
    return {**message, "properties": properties, "headers": headers}


class Seconds(float):
    """Seconds left: equal to others a few seconds apart."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(float(self) - float(other)) < 20

    __hash__ = float.__hash__


def signature(app: Celery, *args: Any, **options: Any) -> Signature:
    """Make a signature of the task."""
    return app.tasks[TASK].s(*args).set(**options)
