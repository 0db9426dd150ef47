"""Messages put together from stored parts: what plain Celery sends, most of them without Kombu."""

from typing import Any

import kombu.pools
import pytest
import redis
from celery import Celery
from kombu import Exchange, Producer, Queue

from celery_outbox import Outbox
from tests.equivalence.pairs import comparable
from tests.publishers.batches import connected, message, publish
from tests.publishers.sqs_wire import envelope, taken
from tests.redis_servers import count_commands
from tests.relay.apps import add, relay_once, rows, send
from tests.relay.conftest import OpenOutbox, open_outbox
from tests.relay.wire import Contents, take

__all__ = ["open_outbox"]

# Kombu's tables use what SQLAlchemy 2.1 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")

NAME = "reports"
TOPIC = Exchange("news", "topic")
COUNT = 20

#: Celery gives each of them also ``priority: None``, ``immediate: None`` and ``mandatory: None``.
OPTIONS = {
    "by name": {"queue": NAME},
    "with an exchange": {"queue": Queue(NAME, Exchange("accounts", "direct"), NAME)},
    "with properties of SQS": {"queue": NAME, "MessageGroupId": "tenant-7"},
    "with a deadline": {"queue": NAME, "expires": 100_000},
    "with a priority": {"queue": NAME, "priority": 6},
    "with a priority of zero": {"queue": NAME, "priority": 0},
}


@pytest.fixture(params=["redis", "rabbitmq", "sqs", "database"])
def broker(request: pytest.FixtureRequest, tmp_path: Any) -> str:
    """The URL of an empty broker of each kind in turn."""
    if request.param == "database":
        return f"sqla+sqlite:///{tmp_path}/broker.db"
    return str(request.getfixturevalue(f"{request.param}_url"))


def contents(url: str) -> list[dict[str, Any]]:
    """What lies in the queue, taken off it."""
    if url.startswith("sqs:"):
        found: Contents = {NAME: [envelope(each["Body"]) for each in taken(url, NAME)]}
    else:
        found = take(url, NAME)
    # Redis has a list for each step of priorities, and sets.
    lists = {name: value for name, value in comparable(found).items() if isinstance(value, list)}
    messages = [{**each, "list": name} for name, value in lists.items() for each in value]
    for each in messages:
        if "expiration" in each["properties"]:
            each["properties"]["expiration"] = "later"
        each["headers"]["expires"] = each["headers"]["expires"] and "later"
        each["properties"].pop("application_headers", None)  # the headers, as RabbitMQ has them
    return messages


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tasks_with_a_queue_of_their_own_are_those_of_plain_celery(
    options: dict[str, object], broker: str, open_outbox: OpenOutbox, sqlite_url: str
) -> None:
    plain = Celery("shop", broker=broker, set_as_current=False)
    plain.task(add, name="shop.add", shared=False)
    for _ in range(3):
        plain.tasks["shop.add"].apply_async((1, 2), task_id="the-id", **options)
    expected = contents(broker)
    plain.close()
    kombu.pools.reset()
    outbox = open_outbox(broker, sqlite_url)
    for _ in range(3):
        task = outbox.app.tasks["shop.add"]
        task.apply_async((1, 2), task_id="the-id", via_outbox=True, **options)
    relay_once(outbox)
    assert rows(outbox) == []
    assert [each["headers"]["id"] for each in expected] == ["the-id"] * 3
    assert contents(broker) == expected


def store(outbox: Outbox, **options: Any) -> None:
    task = outbox.app.tasks["shop.add"]
    outbox.bulk([task.s(1, 2).set(**options) for _ in range(COUNT)])


@pytest.mark.parametrize(
    "name", ["by name", "with properties of SQS", "with a deadline", "with a priority"]
)
def test_kombu_writes_at_most_one_of_many_tasks_with_a_queue_of_their_own(
    name: str,
    broker: str,
    open_outbox: OpenOutbox,
    sqlite_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[object] = []
    real = Producer.publish

    def counting(self: Producer, *args: Any, **options: Any) -> object:
        calls.append(self)
        return real(self, *args, **options)

    monkeypatch.setattr(Producer, "publish", counting)
    outbox = open_outbox(broker, sqlite_url)
    store(outbox, **OPTIONS[name])
    relay_once(outbox)
    assert rows(outbox) == []
    assert len(calls) <= 1
    if not broker.startswith("amqp:"):
        assert calls


def test_redis_is_asked_for_bindings_once_in_a_batch(
    redis_url: str, open_outbox: OpenOutbox, sqlite_url: str
) -> None:
    outbox = open_outbox(redis_url, sqlite_url)
    queue = Queue(NAME, TOPIC, NAME)
    with redis.Redis.from_url(redis_url) as client:
        before = count_commands(client, "smembers")
        store(outbox, queue=queue)
        relay_once(outbox)
        assert client.llen(NAME) == COUNT
        assert count_commands(client, "smembers") == before + 1


def test_a_priority_inside_of_a_property_stays_where_it_is(
    redis_url: str, open_outbox: OpenOutbox, sqlite_url: str
) -> None:
    given = {"a": 1, "priority": None}
    outbox = open_outbox(redis_url, sqlite_url)
    sent = [send(outbox, MessageGroupId=given, priority=None) for _ in range(3)]
    relay_once(outbox)
    found = take(redis_url)["celery"]
    assert [each["headers"]["id"] for each in found] == sent
    assert all(each["properties"]["MessageGroupId"] == given for each in found)


def test_priorities_of_one_batch_go_to_their_own_lists(
    redis_url: str, open_outbox: OpenOutbox, sqlite_url: str
) -> None:
    outbox = open_outbox(redis_url, sqlite_url)
    steps = {None: "", 0: "", 3: "\x06\x163", 6: "\x06\x166", 9: "\x06\x169", 5: "\x06\x163"}
    sent: dict[str, list[str]] = {}
    for priority in [*steps, *reversed(steps)]:
        sent.setdefault(f"{NAME}{steps[priority]}", []).append(
            send(outbox, queue=NAME, priority=priority)
        )
    relay_once(outbox)
    found = take(redis_url)
    lists = {name: value for name, value in found.items() if isinstance(value, list)}
    assert {name: [each["headers"]["id"] for each in value] for name, value in lists.items()} == sent
    told = [each["properties"]["priority"] for each in lists[f"{NAME}\x06\x163"]]
    assert told == [3, 5, 5, 3]


def test_a_stored_priority_of_none_may_stand_anywhere(redis_url: str) -> None:
    publisher = connected(redis_url)
    first = {"priority": None, "delivery_mode": 2, "correlation_id": "c", "reply_to": ""}
    messages = [message(properties=properties) for properties in (first, {"priority": None}) * 2]
    assert publish(publisher, messages).accepted == {each.id for each in messages}
    publisher.close()
    found = take(redis_url)["celery"]
    assert [each["properties"]["priority"] for each in found] == [0] * 4
    assert [list(each["properties"]).count("priority") for each in found] == [1] * 4
