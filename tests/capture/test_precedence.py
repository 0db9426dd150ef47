"""Stored or sent: the call beats the task, the task beats the app."""

import uuid
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery, Task, shared_task

from celery_outbox import Outbox
from celery_outbox.errors import OptionError
from tests.capture.shop import OpenShop, Shop, receipt, tasks


def where(shop: Shop) -> str:
    """Say where the one task went."""
    main, billing = (len(tasks(engine)) for engine in shop.engines.values())
    found = {"main": main, "billing": billing, "sent": len(shop.sent)}
    (place,) = [name for name, count in found.items() for _ in range(count)]
    return place


def make_task(app: Celery, **options: Any) -> Task:
    return app.task(name=f"shop.{uuid.uuid4().hex}", shared=False, **options)(receipt)


ON, OFF, BILLING = {"via_outbox": True}, {"via_outbox": False}, {"outbox_database": "billing"}
NONE, NO_DATABASE = {"via_outbox": None}, {"outbox_database": None}

CASES = [
    # app, task, call, place
    (False, {}, {}, "sent"),
    (False, {}, ON, "main"),
    (False, {}, OFF, "sent"),
    (False, {}, NONE, "sent"),
    (False, {}, BILLING, "billing"),
    (False, {}, ON | BILLING, "billing"),
    (False, {}, NONE | BILLING, "billing"),
    (False, {}, NO_DATABASE, "sent"),
    (False, {}, ON | NO_DATABASE, "main"),
    (False, ON, {}, "main"),
    (False, ON, OFF, "sent"),
    (False, ON, NONE, "sent"),
    (False, ON, BILLING, "billing"),
    (False, ON, NO_DATABASE, "main"),
    (False, OFF, {}, "sent"),
    (False, OFF, ON, "main"),
    (False, OFF, BILLING, "billing"),
    (False, BILLING, {}, "billing"),
    (False, BILLING, ON, "billing"),
    (False, BILLING, OFF, "sent"),
    (False, BILLING, {"outbox_database": "main"}, "main"),
    (False, BILLING, NO_DATABASE, "sent"),
    (False, BILLING, ON | NO_DATABASE, "main"),
    (False, ON | BILLING, {}, "billing"),
    (False, ON | BILLING, NO_DATABASE, "main"),
    (True, {}, {}, "main"),
    (True, {}, OFF, "sent"),
    (True, {}, NONE, "main"),
    (True, {}, BILLING, "billing"),
    (True, ON, OFF, "sent"),
    (True, OFF, {}, "sent"),
    (True, OFF, NONE, "main"),
    (True, OFF, ON, "main"),
    (True, BILLING, {}, "billing"),
    (True, BILLING, NO_DATABASE, "main"),
]


@pytest.mark.parametrize(("default", "of_task", "of_call", "place"), CASES)
def test_call_then_task_then_app(
    two_engines: dict[str, sa.Engine],
    memory_app: Celery,
    open_shop: OpenShop,
    default: bool,
    of_task: dict[str, Any],
    of_call: dict[str, Any],
    place: str,
) -> None:
    shop = open_shop(two_engines, app=memory_app, default=default, require_transaction=False)
    make_task(shop.app, **of_task).apply_async((1,), **of_call)
    assert where(shop) == place


def test_a_task_that_contradicts_itself_is_refused_at_the_call(memory_shop: Shop) -> None:
    with pytest.raises(OptionError, match="via_outbox=False"):
        make_task(memory_shop.app, **OFF | BILLING).apply_async()
    assert (memory_shop.tasks, memory_shop.sent) == ([], [])


# Ways to call


def test_delay_follows_the_task(memory_shop: Shop) -> None:
    make_task(memory_shop.app, **ON).delay(1)
    assert where(memory_shop) == "main"


def test_a_call_of_the_task_runs_it_here(memory_shop: Shop) -> None:
    assert make_task(memory_shop.app, **ON)(1) is None
    assert (memory_shop.tasks, memory_shop.sent) == ([], [])


def test_a_signature_keeps_its_choice(memory_shop: Shop) -> None:
    make_task(memory_shop.app).s(1).set(outbox_database="billing").apply_async()
    assert where(memory_shop) == "billing"


def test_a_call_of_a_signature_beats_what_was_set(memory_shop: Shop) -> None:
    make_task(memory_shop.app).s(1).set(via_outbox=True).apply_async(via_outbox=False)
    assert where(memory_shop) == "sent"


def test_a_signature_that_contradicts_the_call_is_refused_with_the_way_out(
    memory_shop: Shop,
) -> None:
    signature = make_task(memory_shop.app).s(1).set(outbox_database="billing")
    with pytest.raises(OptionError, match=r"\.set\(outbox_database=None\)"):
        signature.apply_async(via_outbox=False)
    signature.set(outbox_database=None).apply_async(via_outbox=False)
    assert where(memory_shop) == "sent"


@pytest.mark.parametrize(("options", "place"), [({}, "sent"), (ON, "main"), (BILLING, "billing")])
def test_send_task_by_name_takes_the_same_options(memory_shop: Shop, options: dict, place: str) -> None:
    memory_shop.app.send_task("elsewhere.task", (1,), **options)
    assert where(memory_shop) == place


def test_send_task_by_name_follows_a_task_that_is_registered_here(memory_shop: Shop) -> None:
    task = make_task(memory_shop.app, **ON)
    memory_shop.app.send_task(task.name, (1,))
    assert where(memory_shop) == "main"


def test_send_task_with_everything_by_position(memory_shop: Shop) -> None:
    result = memory_shop.app.send_task("elsewhere.task", (1,), {}, None, None, "a", via_outbox=True)
    assert (result.id, memory_shop.tasks) == ("a", ["a"])


# Ways to say it for a task


def by_decorator(app: Celery) -> Task:
    return make_task(app, via_outbox=True)


def by_base(app: Celery) -> Task:
    class Stored(Task):
        via_outbox = True

    return make_task(app, base=Stored)


def by_base_of_the_app(app: Celery) -> Task:
    class Stored(app.Task):  # type: ignore[name-defined]
        abstract = True
        via_outbox = True

    return make_task(app, base=Stored)


def by_class(app: Celery) -> Task:
    class Receipt(Task):
        name = f"shop.{uuid.uuid4().hex}"
        via_outbox = True

        def run(self, *args: Any) -> None:
            pass

    return app.register_task(Receipt())


def by_shared_task(app: Celery) -> Task:
    name = f"shop.{uuid.uuid4().hex}"
    shared_task(name=name, via_outbox=True)(receipt)
    return app.tasks[name]


def by_annotation(app: Celery) -> Task:
    app.conf.task_annotations = {"*": {"via_outbox": True}}
    return make_task(app)


def by_annotation_of_the_name(app: Celery) -> Task:
    app.conf.task_annotations = {"shop.annotated": {"via_outbox": True}}
    return app.task(name="shop.annotated", shared=False)(receipt)


def by_attribute(app: Celery) -> Task:
    task = make_task(app)
    task.via_outbox = True
    return task


@pytest.mark.parametrize(
    "say",
    [
        by_decorator,
        by_base,
        by_base_of_the_app,
        by_class,
        by_shared_task,
        by_annotation,
        by_annotation_of_the_name,
        by_attribute,
    ],
    ids=lambda say: say.__name__,
)
def test_a_task_says_it_in_any_of_celerys_ways(memory_shop: Shop, say: Any) -> None:
    task = say(memory_shop.app)
    task.delay(1)
    stored = where(memory_shop)
    task.apply_async((1,), via_outbox=False)
    assert (stored, len(memory_shop.sent)) == ("main", 1)


# Ways to say it for an app


class WithNamespace:
    CELERY_OUTBOX_DEFAULT = True
    CELERY_OUTBOX_TABLE = "waiting"


class WithoutNamespace:
    outbox_default = True
    outbox_table = "waiting"


@pytest.mark.parametrize(
    ("configuration", "namespace"),
    [
        (WithoutNamespace, None),
        (WithNamespace, "CELERY"),
        ({"outbox_default": True, "outbox_table": "waiting"}, None),
    ],
    ids=["object", "namespace", "mapping"],
)
@pytest.mark.parametrize("order", ["before", "after"])
def test_the_app_says_it_in_its_configuration_whenever_that_is_loaded(
    make_app: Callable[..., Celery],
    sqlite_engine: sa.Engine,
    configuration: Any,
    namespace: str | None,
    order: str,
) -> None:
    app = make_app()
    if order == "before":
        app.config_from_object(configuration, namespace=namespace)
    outbox = Outbox(app, databases={"main": sqlite_engine})
    if order == "after":
        app.config_from_object(configuration, namespace=namespace)
    outbox.install()
    make_task(app).apply_async((1,), task_id="a")
    assert tasks(sqlite_engine, "waiting") == ["a"]


def test_every_setting_may_stand_in_the_configuration(
    make_app: Callable[..., Celery], sqlite_engine: sa.Engine
) -> None:
    app = make_app(outbox_databases={"main": sqlite_engine}, outbox_default=True)
    outbox = Outbox()
    outbox.init_app(app)
    outbox.install()
    make_task(app).apply_async((1,), task_id="a")
    assert tasks(sqlite_engine) == ["a"]


def test_an_argument_of_the_outbox_beats_the_configuration(
    make_app: Callable[..., Celery], sqlite_engine: sa.Engine
) -> None:
    app = make_app(outbox_databases={"unused": "sqlite://"}, outbox_default=False)
    Outbox(app, databases={"main": sqlite_engine}, default=True).install()
    make_task(app).apply_async((1,), task_id="a")
    assert tasks(sqlite_engine) == ["a"]
