"""The same call on two apps, one plain and one with an outbox, and what each puts on the broker.

A ``Pair`` sends plainly first and takes everything off the broker, then stores, relays and takes
again. What may differ is removed in ``comparable``, and nothing else.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from celery import Celery

from celery_outbox import Outbox
from tests.relay.apps import make_due, relay_once, rows
from tests.relay.wire import Contents, take

TASK = "shop.add"
ID = "8e6a5b0e-2f7f-4c1e-9d3b-5a1f0c9d7e42"

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
        self.relay()
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
        assert any(plain.values())
        assert comparable(stored) == comparable(plain)

    def relay(self) -> None:
        """Deliver what was stored, delayed or not."""
        if self.url.startswith("sqla+"):
            make_due(self.outbox)  # nothing leaves for this broker before its time
        relay_once(self.outbox)

    def take(self, *queues: str) -> Contents:
        """Take everything off the broker: of RabbitMQ, off the queues named."""
        return take(self.url, *queues, keeps_declared=self.keeps_declared)


def comparable(contents: Contents) -> Contents:
    """Remove what belongs to the sending process."""
    return {
        name: [_comparable(message) for message in messages] if isinstance(messages, list) else messages
        for name, messages in contents.items()
    }


def _comparable(message: dict[str, Any]) -> dict[str, Any]:
    properties = dict(message["properties"])
    properties.pop("delivery_tag", None)
    if properties.get("reply_to") != "answers":  # what the tests give
        properties.pop("reply_to", None)
    if "application_headers" in properties:
        properties["application_headers"] = _without_origin(properties["application_headers"])
    return {**message, "properties": properties, "headers": _without_origin(message["headers"])}


def _without_origin(headers: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in headers.items() if name != "origin"}
