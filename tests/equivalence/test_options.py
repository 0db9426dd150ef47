"""Every option of apply_async: the message is the one that plain Celery would have sent."""

import uuid
from datetime import UTC, date, datetime, timedelta, timezone
from datetime import time as time_of_day
from decimal import Decimal
from typing import Any

import pytest
from celery import Celery, Signature
from kombu import Exchange, Queue

from tests.equivalence.pairs import ID, TASK, Pair

# Kombu's tables use what SQLAlchemy 2.1 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")

INDIA = timezone(timedelta(hours=5, minutes=30))
#: No broker holds a message back that is due so soon. SQLite keeps milliseconds.
SOON = datetime.now(UTC).replace(microsecond=456000) + timedelta(minutes=10)

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "numbers and text": (1, -2.5, True, None, "é ह 漢 \U0001f600 \x00"),
    "aware datetime": (datetime(2030, 1, 2, 3, 4, 5, 6, tzinfo=INDIA), 0),
    "naive datetime": (datetime(2030, 1, 2, 3, 4, 5), 0),
    "date and time": (date(2030, 1, 2), time_of_day(3, 4, 5, 6)),
    "decimal": (Decimal("1.10"), Decimal("NaN")),
    "uuid": (uuid.UUID(ID), 0),
    "text bytes": (b"abc", 0),
    "binary bytes": (b"\xff\x00", 0),
    "containers": ((1, (2, [3, {"a": (4,)}])), {5: "int key"}),
    "not a number": (float("nan"), float("-inf")),
    "lone surrogate": ("\ud800", "\udfff"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_every_type_equal(name: str, shared_pair: Pair) -> None:
    shared_pair.apply(*ARGUMENTS[name])


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "keyword arguments": {"kwargs": {"z": [1, 2]}},
    "priority": {"priority": 3},
    "priority 0": {"priority": 0},
    "headers": {"headers": {"tenant": "a", "x": {"n": 1, "list": [1, None, "b"]}}},
    "headers without a value": {"headers": {"no": None}},
    "countdown": {"countdown": 20},
    "countdown in fractions": {"countdown": 1.75},
    "countdown zero": {"countdown": 0},
    "eta aware": {"eta": SOON.astimezone(INDIA)},
    "eta naive": {"eta": SOON.replace(tzinfo=None)},
    "eta text": {"eta": SOON.isoformat()},
    "eta past": {"eta": datetime(2001, 1, 2, tzinfo=UTC)},
    "expires in seconds": {"expires": 1200},
    "expires in fractions": {"expires": 1200.5},
    "expires aware": {"expires": SOON.astimezone(INDIA)},
    "expires naive": {"expires": SOON.replace(tzinfo=None)},
    "expires text": {"expires": SOON.isoformat()},
    "countdown and expires": {"countdown": 5, "expires": 600},
    "json": {"serializer": "json"},
    "pickle": {"serializer": "pickle"},
    "msgpack": {"serializer": "msgpack"},
    "yaml": {"serializer": "yaml"},
    "zlib": {"compression": "zlib"},
    "gzip": {"compression": "gzip"},
    "bzip2 of pickle": {"compression": "bzip2", "serializer": "pickle"},
    "zlib of msgpack": {"compression": "zlib", "serializer": "msgpack"},
    "shadow": {"shadow": "another name"},
    "time limits": {"time_limit": 30, "soft_time_limit": 20.5},
    "ignore_result": {"ignore_result": True},
    "reply_to": {"reply_to": "answers"},
    "argsrepr": {"argsrepr": "(secret)", "kwargsrepr": "{secret}"},
    "parent and root": {"parent_id": "parent", "root_id": "root"},
    "group": {"group_id": "group", "group_index": 7},
    "retries": {"retries": 2},
    "delivery mode": {"delivery_mode": 1},
    "no retry": {"retry": False},
    "retry policy": {"retry": True, "retry_policy": {"max_retries": 1, "interval_start": 0}},
    "properties of the user's": {"app_id": "checkout", "message_id": "m-1", "user_data": {"a": 1}},
    "properties of SQS": {"MessageGroupId": "tenant-7", "MessageDeduplicationId": "d-7"},
    "properties of the user's own": {"expiration": 600, "correlation_id": "c-1", "type": "order"},
    "timeouts of a publish": {"timeout": 5, "confirm_timeout": 5, "mandatory": True},
    "replaced_task_nesting": {"replaced_task_nesting": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_comes_out_as_in_plain_celery(name: str, shared_pair: Pair) -> None:
    shared_pair.apply(1, 2, **OPTIONS[name])


@pytest.mark.parametrize("broker", ["redis", "rabbitmq"])  # the database transport cannot write them
def test_headers_of_other_types_equal(broker: str, request: pytest.FixtureRequest) -> None:
    pair = request.getfixturevalue(f"{broker}_pair")
    pair.apply(1, 2, headers={"at": datetime(2030, 1, 2, tzinfo=UTC)})


@pytest.mark.parametrize("eta", ["", "2001", "2001-02", "2001-02-03T24:00"])
def test_an_eta_in_any_form_that_workers_read_equals(eta: str, redis_pair: Pair) -> None:
    redis_pair.apply(1, 2, eta=eta)


@pytest.mark.parametrize("option", ["link", "link_error"])
def test_linked_signatures_equal(option: str, shared_pair: Pair) -> None:
    def call(app: Celery, **choice: bool) -> None:
        linked = [
            app.tasks[TASK].s(5).set(task_id="linked", countdown=3, queue="later"),
            Signature("other.service.log", (1,), {"x": b"y"}, immutable=True),
        ]
        app.tasks[TASK].apply_async((1, 2), task_id=ID, **{option: linked}, **choice)

    shared_pair.compare(call)


def test_stamps_equal(shared_pair: Pair) -> None:
    def call(app: Celery, **choice: bool) -> None:
        signature = app.tasks[TASK].s(1, 2).set(task_id=ID, link=app.tasks[TASK].s(3))
        signature.stamp(monitoring_id="m1", tags=["a", "b"])
        signature.apply_async(**choice)

    shared_pair.compare(call)


def test_tasks_of_unknown_names_equal(shared_pair: Pair) -> None:
    def call(app: Celery, **choice: bool) -> None:
        app.send_task("other.service.run", (1,), {"k": "v"}, task_id=ID, priority=2, **choice)

    shared_pair.compare(call)


@pytest.mark.parametrize("protocol", [1, 2])
@pytest.mark.parametrize("options", [{}, {"countdown": 20, "expires": 600}], ids=["plain", "timed"])
def test_both_protocols_equal(protocol: int, options: dict[str, Any], pair: Pair) -> None:
    pair.configure(task_protocol=protocol)
    pair.apply(1, 2, **options)


@pytest.mark.parametrize(
    "config",
    [
        {"task_serializer": "yaml"},
        {"task_compression": "gzip"},
        {"task_default_priority": 4},
        {"task_default_delivery_mode": 1},
        {"task_store_eager_result": True},
        {"result_expires": 60},
        {"enable_utc": False, "timezone": "Asia/Kolkata"},
        {"timezone": "America/New_York"},
        {"task_ignore_result": True},
        {"task_inherit_parent_priority": True},
        {"argsrepr_maxsize": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"countdown": 20, "expires": 600}], ids=["plain", "timed"])
def test_settings_of_celery_take_effect_alike(
    config: dict[str, Any], options: dict[str, Any], redis_pair: Pair
) -> None:
    redis_pair.configure(**config)
    redis_pair.apply(1, 2, **options)


def test_a_large_compressed_body_equals(shared_pair: Pair) -> None:
    shared_pair.apply("x" * 5_000_000, 0, compression="zlib")


EXCHANGE = Exchange("vipx", "topic", durable=True)
VIP = Queue("vip", EXCHANGE, routing_key="vip.#", queue_arguments={"x-max-priority": 10})

DESTINATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "queue name": ({"queue": "reports"}, "reports"),
    "queue": ({"queue": Queue("reports")}, "reports"),
    "queue with an exchange": ({"queue": VIP, "routing_key": "vip.eu"}, "vip"),
    "queue and its own key": ({"queue": Queue("vip", Exchange("d"), routing_key="vip")}, "vip"),
    "exchange and key": ({"exchange": "vipx", "routing_key": "vip.eu", "declare": [VIP]}, "vip"),
    "exchange object": ({"exchange": EXCHANGE, "routing_key": "vip.x", "declare": [VIP]}, "vip"),
    "key alone": ({"exchange": "", "routing_key": "celery"}, "celery"),
}


@pytest.mark.parametrize("name", DESTINATIONS)
def test_a_destination_equals(name: str, pair: Pair) -> None:
    options, queue = DESTINATIONS[name]
    pair.apply(1, 2, queues=(queue,), **options)


@pytest.mark.parametrize(
    "config",
    [
        {"task_default_queue": "main"},
        {"task_routes": {TASK: {"queue": "main", "priority": 5}}},
        {
            "task_queues": [Queue("main", Exchange("mainx"), routing_key="m")],
            "task_default_queue": "main",
        },
        {
            "task_queues": [Queue("main", Exchange("mainx", "topic"), routing_key="m.*")],
            "task_routes": {TASK: {"queue": "main", "routing_key": "m.x"}},
        },
    ],
    ids=["default queue", "route", "queues", "queues and a route"],
)
def test_routes_and_queues_of_the_settings_equal(config: dict[str, Any], pair: Pair) -> None:
    pair.configure(**config)
    pair.apply(1, 2, queues=("main",))
