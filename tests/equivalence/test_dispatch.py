"""What surrounds a message: signals, events, the selector, dispatches that choose no outbox."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import amqp
import kombu.pools
import pytest
import sqlalchemy as sa
from celery import Celery, chain, chord, group
from celery.signals import after_task_publish, before_task_publish
from kombu.utils.json import register_type

from celery_outbox.app import Outbox
from tests.equivalence.conftest import MakePair
from tests.equivalence.pairs import ID, TASK, Pair, comparable
from tests.relay.apps import add, make_outbox, relay_once, rows, send
from tests.relay.wire import amqp_connection, redis_envelopes, take

# Kombu's tables use what SQLAlchemy 2.1 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")

OPTIONS = ("via_outbox", "outbox_database", "outbox_broker", "outbox_retry")


class Money:
    """A type that an application teaches Kombu's JSON."""

    def __init__(self, cents: int) -> None:
        self.cents = cents


register_type(Money, "tests.money", lambda money: money.cents, Money)


@contextmanager
def receiving(signal: Any, receiver: Any) -> Iterator[None]:
    signal.connect(receiver, weak=False)
    try:
        yield
    finally:
        signal.disconnect(receiver)


def test_types_that_the_application_registered_equal(pair: Pair) -> None:
    pair.apply(Money(7), 0)


def test_registered_types_in_headers_equal(pair: Pair) -> None:
    pair.apply(1, 2, headers={"deep": {"nested": [{"__type__": "unknown", "__value__": 1}]}})


def test_a_task_sent_event_is_stored_and_relayed_beside_its_task(rabbitmq_pair: Pair) -> None:
    rabbitmq_pair.configure(task_send_sent_event=True)
    with amqp_connection(rabbitmq_pair.url) as connection:
        channel = connection.channel()
        channel.exchange_declare("celeryev", "topic", durable=True, auto_delete=False)
        channel.queue_declare("events", auto_delete=False)
        channel.queue_bind("events", "celeryev", "#")
    sent: list[dict[str, Any]] = []
    contents = []
    for app, choice in ((rabbitmq_pair.plain, {}), (rabbitmq_pair.outbox.app, {"via_outbox": True})):

        def call(app: Celery, choice: dict[str, bool] = choice, **_: bool) -> None:
            app.tasks[TASK].apply_async((1, 2), task_id=ID, countdown=5, **choice)

        call(app)
        relay_once(rabbitmq_pair.outbox)
        contents.append(comparable(rabbitmq_pair.take("celery", "events")))
    for each in contents:
        (event,) = each["events"]
        sent.append(json.loads(event.pop("body")))
        event["properties"] = {**event["properties"]}
        event["headers"] = {**event["headers"]}
    assert contents[1] == contents[0]
    assert sent[1].items() >= {"type": "task-sent", "uuid": ID, "name": TASK}.items()
    # Events keep the clock that Celery found at its import, frozen or not.
    plain, stored = (each.pop("timestamp") for each in sent)
    assert stored == pytest.approx(plain, abs=20)
    assert sent[1] == sent[0]


def test_an_event_goes_with_a_rolled_back_task(redis_url: str, engine: sa.Engine) -> None:
    outbox = make_outbox(redis_url, engine)
    outbox.app.conf.task_send_sent_event = True
    with pytest.raises(KeyError), engine.begin() as connection, outbox.using(connection):
        send(outbox)
        raise KeyError
    assert rows(outbox) == []
    outbox.app.close()


def test_publish_signals_fire_once_at_the_dispatch(redis_pair: Pair) -> None:
    fired: list[tuple[str, str]] = []

    def before(sender: str, **_: Any) -> None:
        fired.append(("before", sender))

    def after(sender: str, **_: Any) -> None:
        fired.append(("after", sender))

    with receiving(before_task_publish, before), receiving(after_task_publish, after):
        send(redis_pair.outbox)
        assert fired == [("before", TASK), ("after", TASK)]
        relay_once(redis_pair.outbox)
    assert fired == [("before", TASK), ("after", TASK)]
    assert len(redis_envelopes(redis_pair.url)) == 1


def test_what_a_handler_changes_is_what_is_sent(pair: Pair) -> None:
    def change(headers: dict[str, Any], properties: dict[str, Any], **_: Any) -> None:
        headers["x-request-id"] = "r-1"
        headers["eta"] = None
        properties["priority"] = 5

    def call(app: Celery, **choice: bool) -> None:
        with receiving(before_task_publish, change):
            app.tasks[TASK].apply_async((1, 2), task_id=ID, **choice)

    plain, stored = pair.contents(call)
    assert comparable(stored) == comparable(plain)
    assert "r-1" in repr(stored)


def test_a_handler_that_raises_changes_nothing(
    redis_pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("a broken handler")

    with receiving(before_task_publish, fail), receiving(after_task_publish, fail):
        redis_pair.apply(1, 2)
    assert "a broken handler" in caplog.text


HEADERS_THAT_LOOK_LIKE_OTHERS = [
    {"type": "invoice"},
    {"uuid": "u-1"},
    {"task_id": "t-1"},
    {"exchange": "x", "queue": "q"},
    {"v": 9, "body": "b"},
]


@pytest.mark.parametrize("headers", HEADERS_THAT_LOOK_LIKE_OTHERS, ids=str)
def test_a_header_of_any_name_is_only_a_header(headers: dict[str, Any], redis_pair: Pair) -> None:
    redis_pair.apply(1, 2, headers=headers)
    send(redis_pair.outbox, task_id="mine", countdown=3600, headers=headers)
    (row,) = rows(redis_pair.outbox)
    with redis_pair.outbox.databases["default"].begin() as connection:
        connection.execute(sa.delete(redis_pair.outbox.databases["default"].tables.messages))
    assert (row.task_id, row.task_name) == ("mine", TASK)
    assert row.deliver_at is not None


def test_a_header_named_id_is_only_a_header_in_protocol_1(redis_pair: Pair) -> None:
    redis_pair.configure(task_protocol=1)
    redis_pair.apply(1, 2, headers={"id": "h-1"})
    send(redis_pair.outbox, task_id="mine", headers={"id": "h-1"})
    (row,) = rows(redis_pair.outbox)
    relay_once(redis_pair.outbox)
    assert row.task_id == "mine"


def canvases(app: Celery) -> dict[str, Any]:
    task = app.tasks[TASK]
    return {
        "call": lambda **choice: task.apply_async((1, 2), **choice),
        "link": lambda **choice: task.apply_async((1, 2), link=task.s(3), **choice),
        "signature": lambda **choice: task.s(1, 2).set(**choice).apply_async(),
        "group": lambda **choice: group(task.s(1, 2), task.s(3, 4)).apply_async(**choice),
        "chain": lambda **choice: chain(task.s(1, 2), task.s(3)).apply_async(**choice),
        "chord": lambda **choice: chord([task.s(1, 2), task.s(3, 4)], task.s(5)).apply_async(**choice),
        "send_task": lambda **choice: app.send_task("other.run", (1,), **choice),
    }


@pytest.mark.parametrize("name", ["call", "link", "signature", "group", "chain", "chord", "send_task"])
def test_no_option_of_ours_is_ever_in_a_message(name: str, make_pair: MakePair, redis_url: str) -> None:
    pair = make_pair(redis_url, result_backend="cache+memory://")
    canvases(pair.outbox.app)[name](via_outbox=True, outbox_database="default", outbox_retry={})
    relay_once(pair.outbox)
    contents = take(redis_url)
    assert contents["celery"]
    assert [option for option in OPTIONS if option in repr(contents)] == []


@pytest.mark.parametrize("options", [{}, {"via_outbox": False}, {"via_outbox": None}], ids=str)
def test_a_dispatch_that_chooses_no_outbox_is_plain_celery(
    options: dict[str, Any], pair: Pair, engine: sa.Engine
) -> None:
    statements: list[str] = []

    def note(connection: object, cursor: object, statement: str, *rest: object) -> None:
        statements.append(statement)

    sa.event.listen(engine, "before_cursor_execute", note)
    pair.plain.tasks[TASK].apply_async((1, 2), task_id=ID)
    plain = pair.take("celery")
    kombu.pools.reset()  # what was declared once is not declared again
    result = pair.outbox.app.tasks[TASK].apply_async((1, 2), task_id=ID, **options)
    sa.event.remove(engine, "before_cursor_execute", note)
    assert comparable(pair.take("celery")) == comparable(plain)
    assert result.id == ID
    assert statements == []


def test_a_dispatch_that_chooses_no_outbox_works_without_the_table(redis_url: str) -> None:
    app = Celery("shop", broker=redis_url, set_as_current=False)
    Outbox(app, databases={"default": "sqlite:///no/such/directory/x.db"})
    app.task(add, name=TASK).delay(1, 2)
    assert len(redis_envelopes(redis_url)) == 1
    app.close()


def test_two_messages_of_one_given_id_are_both_sent(redis_pair: Pair) -> None:
    for _ in range(2):
        send(redis_pair.outbox, task_id="order-77")
    relay_once(redis_pair.outbox)
    envelopes = redis_envelopes(redis_pair.url)
    assert [each["headers"]["id"] for each in envelopes] == ["order-77", "order-77"]
    assert [each["properties"]["correlation_id"] for each in envelopes] == ["order-77", "order-77"]


def test_the_reply_goes_to_the_process_that_dispatched(redis_pair: Pair) -> None:
    send(redis_pair.outbox)
    relay_once(redis_pair.outbox)
    (envelope,) = redis_envelopes(redis_pair.url)
    assert envelope["properties"]["reply_to"] == redis_pair.outbox.app.thread_oid


def test_an_amqp_message_says_persistent_as_plain_celery_does(rabbitmq_pair: Pair) -> None:
    send(rabbitmq_pair.outbox)
    relay_once(rabbitmq_pair.outbox)
    with amqp_connection(rabbitmq_pair.url) as connection:
        message: amqp.Message = connection.channel().basic_get("celery", no_ack=True)
    assert message.properties["delivery_mode"] == 2
