"""Which apps have an Outbox, and that those without one never let our options travel."""

import pickle
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery, Task, shared_task

from celery_outbox import Outbox
from celery_outbox.errors import ConfigurationError, NoOutboxError
from tests.capture.shop import TASK_NAME, Shop, receipt, tasks

MakeApp = Callable[..., Celery]


@pytest.fixture(autouse=True)
def another_app_with_an_outbox(make_app: MakeApp) -> Outbox:
    return Outbox(make_app(), databases={"main": "sqlite://"})


OURS = [
    {"via_outbox": True},
    {"outbox_database": "main"},
    {"outbox_broker": "main"},
    {"outbox_retry": {"max_attempts": 3}},
    {"via_outbox": True, "outbox_database": "main"},
]


@pytest.mark.parametrize("options", OURS, ids=lambda options: "+".join(options))
@pytest.mark.parametrize("by_name", [True, False])
def test_a_plain_app_refuses_our_options(
    memory_app: Celery, options: dict[str, Any], by_name: bool
) -> None:
    send = memory_app.send_task if by_name else memory_app.tasks[TASK_NAME].apply_async
    arguments = ("elsewhere",) if by_name else ()
    with pytest.raises(NoOutboxError, match="Outbox"):
        send(*arguments, **options)
    assert Shop(app=memory_app, outbox=Outbox(), engines={}).sent == []


@pytest.mark.parametrize("value", [False, None])
def test_saying_off_to_a_plain_app_sends_without_our_option(
    memory_app: Celery, value: bool | None
) -> None:
    memory_app.tasks[TASK_NAME].apply_async(via_outbox=value, outbox_database=None)
    with memory_app.connection_for_read() as broker:
        message = broker.default_channel.basic_get(memory_app.conf.task_default_queue)
    said = {**message.headers, **message.properties}
    assert [name for name in said if "outbox" in name] == []


def test_a_task_that_always_stores_is_refused_by_a_plain_app(memory_app: Celery) -> None:
    task = memory_app.task(name="shop.always", shared=False, via_outbox=True)(receipt)
    with pytest.raises(NoOutboxError):
        task.delay()


def test_a_task_that_always_stores_may_be_sent_by_a_plain_app_that_says_off(
    memory_app: Celery,
) -> None:
    task = memory_app.task(name="shop.always", shared=False, via_outbox=True)(receipt)
    task.apply_async(via_outbox=False, task_id="a")
    assert Shop(app=memory_app, outbox=Outbox(), engines={}).sent == ["a"]


def test_an_outbox_that_was_never_given_its_app_gives_none_to_it(memory_app: Celery) -> None:
    outbox = Outbox(databases={"main": "sqlite://"})
    with pytest.raises(NoOutboxError):
        memory_app.tasks[TASK_NAME].apply_async(via_outbox=True)
    with pytest.raises(ConfigurationError, match="init_app"):
        outbox.install()


def test_an_app_pickled_and_back_has_no_outbox_and_refuses_our_options(
    memory_shop: Shop,
) -> None:
    copy = pickle.loads(pickle.dumps(memory_shop.app))
    with pytest.raises(NoOutboxError, match="pickled"):
        copy.send_task("elsewhere", via_outbox=True)
    memory_shop.send("a")
    assert memory_shop.tasks == ["a"]


def test_an_app_pickled_and_back_sends_directly(memory_shop: Shop) -> None:
    copy = pickle.loads(pickle.dumps(memory_shop.app))
    copy.send_task("elsewhere", task_id="a", queue=memory_shop.app.conf.task_default_queue)
    assert (memory_shop.tasks, memory_shop.sent) == ([], ["a"])


def test_an_app_pickled_and_back_may_be_given_an_outbox_of_its_own(memory_shop: Shop) -> None:
    copy = pickle.loads(pickle.dumps(memory_shop.app))
    Outbox(copy, databases={"main": memory_shop.engine})
    copy.send_task("elsewhere", task_id="a", via_outbox=True)
    assert memory_shop.tasks == ["a"]


def test_an_app_has_one_outbox(memory_shop: Shop) -> None:
    with pytest.raises(ConfigurationError, match="one Outbox for each app"):
        Outbox(memory_shop.app, databases={"main": memory_shop.engine})


def test_an_outbox_has_one_app(memory_shop: Shop, make_app: MakeApp) -> None:
    with pytest.raises(ConfigurationError, match="one Outbox for each app"):
        memory_shop.outbox.init_app(make_app())


def test_the_same_app_may_be_given_again(memory_shop: Shop) -> None:
    memory_shop.outbox.init_app(memory_shop.app)
    memory_shop.send("a")
    assert memory_shop.tasks == ["a"]


def test_two_apps_store_each_through_its_own_outbox(
    make_app: MakeApp, two_engines: dict[str, sa.Engine]
) -> None:
    for name, engine in two_engines.items():
        app = make_app()
        Outbox(app, databases={name: engine}).install()
        app.tasks[TASK_NAME].apply_async(task_id=name, via_outbox=True)
    assert [tasks(engine) for engine in two_engines.values()] == [["main"], ["billing"]]


# Tasks made before the Outbox


def by_decorator(app: Celery) -> str:
    return str(app.task(name=f"shop.{uuid.uuid4().hex}")(receipt).name)


def unevaluated(app: Celery) -> str:
    name = f"shop.{uuid.uuid4().hex}"
    app.task(name=name)(receipt)
    return name


def finalized(app: Celery) -> str:
    name = by_decorator(app)
    app.finalize()
    return name


def with_base(app: Celery) -> str:
    class Own(Task):
        pass

    return str(app.task(name=f"shop.{uuid.uuid4().hex}", base=Own)(receipt).name)


def shared(app: Celery) -> str:
    name = f"shop.{uuid.uuid4().hex}"
    shared_task(name=name)(receipt)
    return name


def registered_class(app: Celery) -> str:
    class Own(Task):
        name = f"shop.{uuid.uuid4().hex}"

        def run(self) -> None:
            pass

    return str(app.register_task(Own()).name)


def built_in(app: Celery) -> str:
    return "celery.backend_cleanup"


@pytest.mark.parametrize(
    "make",
    [by_decorator, unevaluated, finalized, with_base, shared, registered_class, built_in],
    ids=lambda make: make.__name__,
)
def test_tasks_made_before_the_outbox_store_through_it(
    make_app: MakeApp, sqlite_engine: sa.Engine, make: Callable[[Celery], str]
) -> None:
    app = make_app()
    name = make(app)
    task = app.tasks[name]
    Outbox(app, databases={"main": sqlite_engine}).install()
    task.apply_async(task_id="a", via_outbox=True)
    task.s().apply_async(task_id="b", via_outbox=True)
    assert tasks(sqlite_engine) == ["a", "b"]
