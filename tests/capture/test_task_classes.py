"""Users' own task classes, and what other libraries do to Celery's methods, keep working."""

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery, Task

from celery_outbox import Outbox
from tests.capture.shop import TASK_NAME, MakeEngine, Shop, receipt, tasks

MakeApp = Callable[..., Celery]


class Tenant(Task):
    """Adds a header of its own to whatever is sent."""

    abstract = True
    calls: list[str] = []  # noqa: RUF012 - shared on purpose

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        self.calls.append(self.name)
        options.setdefault("headers", {})["tenant"] = "north"
        return super().apply_async(args, kwargs, **options)


@pytest.fixture(autouse=True)
def no_calls_yet() -> None:
    Tenant.calls.clear()


def envelopes(engine: sa.Engine) -> list[dict[str, Any]]:
    with engine.connect() as connection:
        found = connection.scalars(sa.text("SELECT message FROM celery_outbox ORDER BY id"))
        return [json.loads(each) for each in found]


def as_base(make_app: MakeApp) -> Task:
    return make_app().task(name="shop.tenant", shared=False, base=Tenant)(receipt)


def as_task_cls(make_app: MakeApp) -> Task:
    return make_app(task_cls=Tenant).tasks[TASK_NAME]


def as_attribute_of_the_app(make_app: MakeApp) -> Task:
    app = make_app()
    app.task_cls = Tenant
    return app.task(name="shop.tenant", shared=False)(receipt)


every_way = pytest.mark.parametrize(
    "make", [as_base, as_task_cls, as_attribute_of_the_app], ids=lambda make: make.__name__
)


@every_way
def test_an_overridden_apply_async_is_called_once_and_keeps_its_header(
    make_app: MakeApp, sqlite_engine: sa.Engine, make: Callable[[MakeApp], Task]
) -> None:
    task = make(make_app)
    Outbox(task.app, databases={"main": sqlite_engine}).install()
    task.apply_async((1,), via_outbox=True)
    (envelope,) = envelopes(sqlite_engine)
    assert (envelope["headers"]["tenant"], Tenant.calls) == ("north", [task.name])


@every_way
def test_a_signature_and_delay_pass_through_the_override(
    make_app: MakeApp, sqlite_engine: sa.Engine, make: Callable[[MakeApp], Task]
) -> None:
    task = make(make_app)
    task.via_outbox = True
    Outbox(task.app, databases={"main": sqlite_engine}).install()
    task.delay(1)
    task.s(1).delay()
    tenants = [each["headers"]["tenant"] for each in envelopes(sqlite_engine)]
    assert (tenants, Tenant.calls) == (["north", "north"], [task.name, task.name])


# Others wrap Celery's methods, before and after


def wrapped_well(function: Callable[..., Any], heard: list[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        heard.append(function.__name__)
        return function(*args, **kwargs)

    return wrapper


def wrapped_carelessly(function: Callable[..., Any], heard: list[str]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        heard.append(function.__name__)
        return function(*args, **kwargs)

    return wrapper


WRAPPERS = [wrapped_well, wrapped_carelessly]
PLACES = [(Task, "apply_async"), (Celery, "send_task")]
every_wrapper = pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
every_place = pytest.mark.parametrize(
    ("owner", "name"), PLACES, ids=["Task.apply_async", "Celery.send_task"]
)


@every_place
@every_wrapper
@pytest.mark.parametrize("new_outbox", [True, False])
@pytest.mark.parametrize("by", ["call", "task"])
def test_a_method_of_celery_that_others_wrap_is_called_and_the_task_stored_once(
    memory_shop: Shop,
    make_engine: MakeEngine,
    make_app: MakeApp,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    wrap: Callable[..., Any],
    new_outbox: bool,
    by: str,
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(owner, name, wrap(getattr(owner, name), heard))
    if new_outbox:
        Outbox(make_app(), databases={"main": make_engine("sqlite://")})
    task = memory_shop.app.tasks[TASK_NAME]
    if by == "task":
        task.via_outbox = True
    task.apply_async((1,), task_id="a", **({"via_outbox": True} if by == "call" else {}))
    assert (memory_shop.tasks, memory_shop.sent, heard) == (["a"], [], [name])


@every_place
@every_wrapper
def test_what_is_sent_directly_passes_through_what_others_wrapped(
    memory_shop: Shop,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    wrap: Callable[..., Any],
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(owner, name, wrap(getattr(owner, name), heard))
    memory_shop.app.tasks[TASK_NAME].apply_async((1,), task_id="a")
    assert (memory_shop.tasks, memory_shop.sent, heard) == ([], ["a"], [name])


def test_an_apply_async_replaced_later_may_pass_arguments_by_position(
    memory_shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Task.apply_async

    def apply_async(
        self: Task, args: Any = None, kwargs: Any = None, task_id: Any = None, *more: Any, **rest: Any
    ) -> Any:
        return original(self, args, kwargs, task_id, *more, **rest)

    monkeypatch.setattr(Task, "apply_async", apply_async)
    memory_shop.app.tasks[TASK_NAME].apply_async((1,), {}, "a", None, None, None, via_outbox=True)
    assert memory_shop.tasks == ["a"]


def test_a_subclass_of_celery_with_its_own_send_task_is_called(
    make_app: MakeApp, sqlite_engine: sa.Engine
) -> None:
    heard: list[str] = []

    class Shouting(Celery):
        def send_task(self, name: str, *args: Any, **kwargs: Any) -> Any:
            heard.append(name)
            return super().send_task(name, *args, **kwargs)

    app = Shouting("shouting", broker="memory://", set_as_current=False)
    Outbox(app, databases={"main": sqlite_engine}).install()
    app.send_task("elsewhere", task_id="a", via_outbox=True)
    assert (tasks(sqlite_engine), heard) == (["a"], ["elsewhere"])


def test_a_send_task_replaced_on_the_app_itself_is_called(
    make_app: MakeApp, sqlite_engine: sa.Engine
) -> None:
    heard: list[str] = []
    app = make_app()
    app.send_task = wrapped_carelessly(app.send_task, heard)
    Outbox(app, databases={"main": sqlite_engine}).install()
    app.tasks[TASK_NAME].apply_async((1,), task_id="a", via_outbox=True)
    assert (tasks(sqlite_engine), heard) == (["a"], ["send_task"])


@pytest.mark.parametrize("protocol", [1, 2])
def test_either_protocol_of_messages_is_stored(
    make_app: MakeApp, sqlite_engine: sa.Engine, protocol: int
) -> None:
    app = make_app(task_protocol=protocol)
    Outbox(app, databases={"main": sqlite_engine}).install()
    app.tasks[TASK_NAME].apply_async((1,), task_id="a", countdown=60, via_outbox=True)
    with sqlite_engine.connect() as connection:
        rows = connection.execute(
            sa.text("SELECT task_id, task_name, deliver_at IS NOT NULL FROM celery_outbox")
        ).all()
    (envelope,) = envelopes(sqlite_engine)
    assert rows == [("a", TASK_NAME, 1)]
    assert ("id" in envelope["headers"]) == (protocol == 2)
