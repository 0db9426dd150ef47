"""Generated combinations of options: what is stored and relayed equals what plain Celery sends."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery, chain, group
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from kombu import Exchange, Queue

from tests.equivalence.pairs import ID, TASK, Pair, comparable
from tests.relay.apps import rows

# Kombu's tables use what SQLAlchemy 2.1 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")

generated = settings(
    max_examples=40,
    deadline=None,  # the clock stands still, and servers are asked
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # to shrink an example would ask the servers hundreds of times
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

QUEUES = ("celery", "orders", "reports", "vip")
EXCHANGE = Exchange("vipx", "topic")
VIP = Queue("vip", EXCHANGE, routing_key="vip.#", queue_arguments={"x-max-priority": 10})
INDIA = timezone(timedelta(hours=5, minutes=30))

texts = st.text(alphabet="abz é漢\U0001f600\x00\"'\\", max_size=8)
numbers = st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, width=32)
scalars = st.none() | st.booleans() | numbers | texts
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=6,
)
# RabbitMQ itself breaks down on some others.
header_values = st.sampled_from(["a", "é漢", "", 1, -5, 2.5, True, None, ["a", 1], {"n": {"m": None}}])
# Neither so soon that it passes meanwhile, nor so late that the outbox would keep it until then.
soon = st.integers(120, 600)


@st.composite
def instants(draw: st.DrawFn) -> Any:
    """A time of the next minutes in each form that Celery takes."""
    instant = datetime.now(UTC) + timedelta(seconds=draw(soon), milliseconds=draw(soon))
    form = draw(st.sampled_from(["aware", "elsewhere", "naive", "text"]))
    forms = {
        "aware": instant,
        "elsewhere": instant.astimezone(INDIA),
        "naive": instant.replace(tzinfo=None),
        "text": instant.isoformat(),
    }
    return forms[form]


DESTINATIONS: list[Mapping[str, Any]] = [
    {},
    {"queue": "reports"},
    {"queue": Queue("orders")},
    {"queue": VIP, "routing_key": "vip.eu"},
    {"exchange": "vipx", "routing_key": "vip.eu", "declare": [VIP]},
    {"exchange": EXCHANGE, "routing_key": "vip.x", "declare": [VIP]},
]

OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "kwargs": st.dictionaries(st.sampled_from(["k", "key"]), values, max_size=2),
    "priority": st.integers(0, 9),
    "countdown": st.just(0) | soon | soon.map(lambda seconds: seconds / 7 + 60),
    "eta": instants(),
    "expires": soon | soon.map(lambda seconds: seconds + 0.25) | instants(),
    "serializer": st.sampled_from(["json", "pickle", "msgpack", "yaml"]),
    "compression": st.sampled_from(["zlib", "gzip", "bzip2", None]),
    "headers": st.dictionaries(st.sampled_from(["tenant", "x-id", "é"]), header_values, max_size=2),
    "reply_to": st.just("answers"),
    "correlation_id": st.just("correlated"),
    "delivery_mode": st.sampled_from([1, 2]),
    "time_limit": st.integers(1, 100),
    "soft_time_limit": st.integers(1, 100) | st.just(2.5),
    "shadow": st.just("another name"),
    "argsrepr": st.just("(secret)"),
    "kwargsrepr": st.just("{secret}"),
    "retry": st.booleans(),
    "retry_policy": st.just({"max_retries": 1, "interval_start": 0}),
    "ignore_result": st.booleans(),
    "group_id": st.just("group"),
    "group_index": st.integers(0, 5),
    "parent_id": st.just("parent"),
    "root_id": st.just("root"),
    "retries": st.integers(0, 3),
    "app_id": st.just("checkout"),
}
calls = st.fixed_dictionaries({}, optional=OPTIONS)
signature_options = calls.map(lambda options: {k: v for k, v in options.items() if k != "kwargs"})
args = st.lists(values, max_size=3).map(tuple)
links = st.lists(st.fixed_dictionaries({}, optional={"priority": st.integers(0, 9)}), max_size=2)


@given(args=args, options=calls, destination=st.sampled_from(DESTINATIONS), links=links)
@generated
def test_any_options_of_apply_async_equal(
    args: tuple[Any, ...],
    options: dict[str, Any],
    destination: Mapping[str, Any],
    links: list[dict[str, Any]],
    shared_pair: Pair,
) -> None:
    def call(app: Celery, **choice: bool) -> None:
        task = app.tasks[TASK]
        linked = {
            name: [task.s(number).set(task_id=f"{name}-{number}", **each) for number, each in found]
            for name in ("link", "link_error")
            if (found := list(enumerate(links)))
        }
        task.apply_async(args, **{"task_id": ID} | options | destination | linked | choice)

    compare(shared_pair, call)


@given(options=calls, destination=st.sampled_from(DESTINATIONS), stamp=texts)
@settings(generated, max_examples=15)
def test_any_options_of_a_signature_equal(
    options: dict[str, Any], destination: Mapping[str, Any], stamp: str, shared_pair: Pair
) -> None:
    def call(app: Celery, **choice: bool) -> None:
        given_ = dict(options)
        kwargs = given_.pop("kwargs", {})
        signature = app.tasks[TASK].s(1, **kwargs).set(task_id=ID, **given_, **destination)
        signature.stamp(monitoring_id=stamp)
        signature.apply_async((2,), **choice)

    compare(shared_pair, call)


@given(
    members=st.lists(signature_options, min_size=1, max_size=3),
    together=st.fixed_dictionaries(
        {}, optional={"priority": st.integers(0, 9), "headers": st.just({})}
    ),
    is_chained=st.booleans(),
)
@settings(generated, max_examples=15)
def test_any_options_of_the_members_of_a_canvas_equal(
    members: list[dict[str, Any]], together: dict[str, Any], is_chained: bool, shared_pair: Pair
) -> None:
    def call(app: Celery, **choice: bool) -> None:
        signatures = []
        for number, options in enumerate(members):
            signature = app.tasks[TASK].s(number, 1).set(task_id=f"member-{number}", **options)
            # A step of a chain would tell its app's own.
            signatures.append(signature.set(reply_to="answers"))
        if is_chained:
            chain(*signatures).apply_async(task_id="last", **together, **choice)
        else:
            group(signatures, task_id="group").apply_async(**together, **choice)

    compare(shared_pair, call)


BAD: list[dict[str, Any]] = [
    {"expires": timedelta(seconds=600)},
    {"expires": "tomorrow"},
    {"eta": 600},
    {"countdown": "soon"},
    {"serializer": "none such"},
    {"link": 7},
    {"time_limit": 1, "soft_time_limit": 2},
    {"args": (object(),)},
    {"args": 7},
]


@given(bad=st.sampled_from(BAD), options=calls)
@settings(generated, max_examples=30)
def test_what_plain_celery_refuses_is_refused_at_the_call(
    bad: dict[str, Any], options: dict[str, Any], shared_pair: Pair
) -> None:
    def call(app: Celery, **choice: bool) -> None:
        given_: dict[str, Any] = {"args": (1, 2), "task_id": ID} | options | bad
        app.tasks[TASK].apply_async(**given_, **choice)

    compare(shared_pair, call)


def compare(pair: Pair, call: Callable[..., None]) -> None:
    """Assert that both apps put the same on the broker, or refuse the call alike."""
    refused = [error_of(lambda: call(pair.plain))]
    plain = pair.take(*QUEUES)
    refused.append(error_of(lambda: call(pair.outbox.app, via_outbox=True)))
    pair.relay()
    assert refused[1] is refused[0]
    assert rows(pair.outbox) == []
    assert comparable(pair.take(*QUEUES)) == comparable(plain)


def error_of(call: Callable[[], None]) -> type[Exception] | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is, both shall raise it
        return type(error)
    return None
