"""Every way to dispatch one task: it is stored, without a broker, in the caller's transaction."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery, Task, _state, chain, chord, group, shared_task, signature
from celery.beat import ScheduleEntry, Scheduler
from celery.canvas import StampingVisitor, xstarmap
from celery.schedules import schedule

from celery_outbox import Outbox
from celery_outbox.errors import NoOutboxError
from tests.canvas.stall import (
    OPTIONS,
    OpenStall,
    SoldOutError,
    Stall,
    add,
    echo,
    memory_config,
    running,
)

STORE = {"via_outbox": True}

Door = Callable[[Stall], Any]

DOORS: dict[str, tuple[Door, list[str]]] = {
    "apply_async": (lambda s: s.add.apply_async((1, 2), **STORE), ["add"]),
    "delay of a task that says so": (lambda s: s.charge.delay(1, 2), ["charge"]),
    "signature apply_async": (lambda s: s.add.s(1, 2).apply_async(**STORE), ["add"]),
    "set and delay": (lambda s: s.add.s(1, 2).set(**STORE).delay(), ["add"]),
    "set and apply_async": (lambda s: s.add.s(1, 2).set(**STORE).apply_async(), ["add"]),
    "options of the signature": (
        lambda s: s.app.signature("stall.add", (1, 2), options=STORE).delay(),
        ["add"],
    ),
    "signature of a name": (
        lambda s: signature("other.run", (1,), app=s.app).apply_async(**STORE),
        ["other.run"],
    ),
    "send_task of a registered name": (
        lambda s: s.app.send_task("stall.add", (1, 2), **STORE),
        ["add"],
    ),
    "send_task of an unknown name": (lambda s: s.app.send_task("other.run", **STORE), ["other.run"]),
    "partial signature": (lambda s: s.add.s(2).apply_async((1,), **STORE), ["add"]),
    "immutable signature": (lambda s: s.add.si(1, 2).apply_async((9,), **STORE), ["add"]),
    "group": (lambda s: group(s.adds(2)).apply_async(**STORE), ["add", "add"]),
    "group called": (lambda s: group(s.adds(2))(**STORE), ["add", "add"]),
    "group delayed": (lambda s: group(s.adds(2)).set(**STORE).delay(), ["add", "add"]),
    "chain": (lambda s: chain(s.add.s(1, 2), s.echo.s()).apply_async(**STORE), ["add"]),
    "chain called": (lambda s: chain(s.add.s(1, 2), s.echo.s()).set(**STORE)(), ["add"]),
    "pipe": (lambda s: (s.add.s(1, 2) | s.echo.s()).apply_async(**STORE), ["add"]),
    "chunks": (
        lambda s: s.add.chunks([(1, 2), (3, 4), (5, 6)], 2).apply_async(**STORE),
        ["celery.starmap"] * 2,
    ),
    "chunks called": (
        lambda s: s.add.chunks([(1, 2), (3, 4), (5, 6)], 2)(**STORE),
        ["celery.starmap"] * 2,
    ),
    "chunks with an option of their own": (
        lambda s: s.add.chunks([(1, 2), (3, 4), (5, 6)], 2).set(**STORE).delay(),
        ["celery.starmap"] * 2,
    ),
    "chunks of a task that says so": (
        lambda s: s.charge.chunks([(1, 2), (3, 4), (5, 6)], 2).delay(),
        ["celery.starmap"] * 2,
    ),
    "map": (lambda s: s.echo.map([1, 2]).apply_async(**STORE), ["celery.map"]),
    "map of a task that says so": (lambda s: s.charge.map([1, 2]).delay(), ["celery.map"]),
    "starmap": (lambda s: s.add.starmap([(1, 2)]).apply_async(**STORE), ["celery.starmap"]),
    "starmap with an option of its own": (
        lambda s: s.add.starmap([(1, 2)]).set(**STORE).delay(),
        ["celery.starmap"],
    ),
    "starmap of a task that says so": (
        lambda s: s.charge.starmap([(1, 2)]).delay(),
        ["celery.starmap"],
    ),
}


@pytest.mark.parametrize("name", DOORS)
def test_a_dispatch_is_stored_when_its_transaction_commits(name: str, stall: Stall) -> None:
    dispatch, expected = DOORS[name]
    with stall.transaction():
        result = dispatch(stall)
        before = stall.names
    assert (before, stall.names) == ([], expected)
    ids = [each.id for each in stall.stored()]
    assert [each.id for each in getattr(result, "results", [])] in ([], ids)
    assert not [word for each in stall.stored() for word in OPTIONS if word in each.text]


@pytest.mark.parametrize("name", DOORS)
def test_a_dispatch_vanishes_when_its_transaction_is_rolled_back(name: str, stall: Stall) -> None:
    dispatch, _ = DOORS[name]
    with pytest.raises(SoldOutError), stall.transaction():
        dispatch(stall)
        raise SoldOutError
    assert stall.names == []


def test_mapping_a_signature_follows_its_choice(stall: Stall) -> None:
    with stall.transaction():
        xstarmap(stall.add.s().set(**STORE), [(1, 2)], app=stall.app).delay()
    assert stall.names == ["celery.starmap"]


def test_shared_tasks_are_stored(stall: Stall, monkeypatch: pytest.MonkeyPatch) -> None:
    # What shared_task leaves behind for apps to come, and the current app, end with the test.
    monkeypatch.setattr(_state, "_on_app_finalizers", set(_state._on_app_finalizers))
    monkeypatch.setattr(_state._tls, "current_app", stall.app)
    task = shared_task(add, name="shared.add", via_outbox=True)
    with stall.transaction():
        task.delay(1, 2)
        stall.app.tasks["shared.add"].s(1, 2).delay()
    assert stall.names == ["shared.add", "shared.add"]


@pytest.mark.parametrize("is_default", [True, False])
def test_shared_tasks_sent_by_many_threads_are_stored_or_refused(
    is_default: bool, stall: Stall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_state, "_on_app_finalizers", set(_state._on_app_finalizers))
    # A thread knows the default app alone; without one Celery makes one up, whose broker is elsewhere.
    monkeypatch.setattr(_state, "default_app", stall.app if is_default else None)
    task = shared_task(add, name="shared.add")

    def send(number: int) -> str:
        with stall.transaction():
            result = task.apply_async((number, 1), via_outbox=True)
        return str(result.id)

    with ThreadPoolExecutor(20) as pool:
        sent = [pool.submit(send, number) for number in range(20)]
    if is_default:
        assert sorted(each.id for each in stall.stored()) == sorted(each.result() for each in sent)
    else:
        assert [type(each.exception()) for each in sent] == [NoOutboxError] * 20
        assert stall.names == []


@pytest.fixture
def unused(stall: Stall) -> Celery:
    """An app on the stall's database whose tasks nothing has used yet."""
    app = Celery("unused", broker="memory://", set_as_current=False)
    Outbox(app, databases={"default": stall.engine})
    return app


class StoredTask(Task):  # type: ignore[misc]  # Celery has no types
    via_outbox = True


def test_send_task_follows_a_task_that_nothing_has_used(stall: Stall, unused: Celery) -> None:
    unused.conf.task_annotations = {"tests.annotated": {"via_outbox": True}}
    unused.task(add, name="tests.own", shared=False, via_outbox=True, priority=7)
    unused.task(add, name="tests.base", shared=False, base=StoredTask)
    unused.task(add, name="tests.annotated", shared=False)
    unused.task(add, shared=False, via_outbox=True)
    with stall.transaction():
        for name in ("tests.own", "tests.base", "tests.annotated", f"{add.__module__}.add"):
            unused.send_task(name, (1, 2))
    assert stall.names == ["tests.own", "tests.base", "tests.annotated", f"{add.__module__}.add"]
    assert not unused.finalized
    # As Celery itself sends them: what else their tasks say is not known yet.
    assert {each.properties.get("priority") for each in stall.stored()} == {None}


def test_send_task_sends_what_does_not_choose_the_outbox(stall: Stall, unused: Celery) -> None:
    unused.task(add, name="tests.plain", shared=False)
    with stall.transaction():
        unused.send_task("tests.plain", (1, 2))
        unused.send_task("tests.elsewhere", (1, 2))
    assert stall.names == []
    assert not unused.finalized


def test_a_task_made_before_the_outbox_is_stored(stall: Stall) -> None:
    app = Celery("late", broker="memory://", set_as_current=False)
    early = app.task(add, name="late.add", shared=False)
    before = early.name  # evaluates it
    Outbox(app, databases={"default": stall.engine})
    with stall.transaction():
        early.apply_async((1, 2), via_outbox=True)
    assert (before, stall.names) == ("late.add", ["late.add"])


def test_the_default_of_the_app_stores_every_dispatch(open_stall: OpenStall) -> None:
    stall = open_stall(default=True)
    with stall.transaction():
        stall.add.delay(1, 2)
        group(stall.adds(2)).delay()
        stall.app.send_task("other.run")
        stall.add.starmap([(1, 2)]).delay()
    assert stall.names == ["add", "add", "add", "other.run", "celery.starmap"]


def test_the_call_beats_the_task_and_the_task_beats_the_app(open_stall: OpenStall) -> None:
    stall = open_stall(default=True, config=memory_config())
    stall.app.task(echo, name="stall.aloud", shared=False, via_outbox=False)
    aloud = stall.app.tasks["stall.aloud"]
    with stall.transaction():
        stall.charge.apply_async((1, 2), via_outbox=False)
        stall.add.s(1, 2).set(via_outbox=False).delay()
        aloud.delay(1)
        aloud.apply_async((1,), via_outbox=True)
    assert (stall.names, stall.sent_names) == (["aloud"], ["charge", "add", "aloud"])


@pytest.mark.parametrize("protocol", [1, 2])
def test_links_travel_with_the_stored_task(protocol: int, open_stall: OpenStall) -> None:
    stall = open_stall(config={"task_protocol": protocol})
    with stall.transaction():
        result = stall.add.apply_async(
            (1, 2), link=stall.echo.s(), link_error=stall.total.s().set(queue="errors"), via_outbox=True
        )
    (message,) = stall.stored()
    where = message.embedded if protocol == 2 else message.body
    assert (message.id, message.name) == (result.id, "stall.add")
    assert [each["task"] for each in where["callbacks"]] == ["stall.echo"]
    assert [each["options"]["queue"] for each in where["errbacks"]] == ["errors"]
    assert not [word for word in OPTIONS if word in message.text]


def test_a_choice_set_on_a_link_stays_on_that_link_alone(stall: Stall) -> None:
    with stall.transaction():
        stall.add.s(1, 2).set(link=stall.echo.s().set(via_outbox=True)).apply_async(via_outbox=True)
        stall.add.apply_async((1, 2), link=stall.charge.s(3), via_outbox=True)
    first, second = stall.stored()
    (link,) = first.embedded["callbacks"]
    assert link["options"] == {"via_outbox": True}
    assert first.text.count("via_outbox") == 1
    assert "via_outbox" not in second.text


class Tenant(StampingVisitor):  # type: ignore[misc]  # Celery has no types
    """Stamps every signature with a tenant."""

    def on_signature(self, sig: Any, **headers: Any) -> dict[str, Any]:
        return {"tenant": "ada", "stamped_headers": ["tenant"]}


def test_what_a_stamping_visitor_adds_is_stored(stall: Stall) -> None:
    canvas = group(stall.add.s(1, 2), chain(stall.add.s(3, 4), stall.add.s(5)))
    canvas.stamp(visitor=Tenant())
    with stall.transaction():
        canvas.apply_async(via_outbox=True)
    first, beginning = stall.stored()
    assert first.headers["stamps"] == beginning.headers["stamps"] == {"tenant": "ada"}
    assert first.headers["stamped_headers"] == ["tenant"]
    (later,) = beginning.embedded["chain"]
    assert later["options"]["tenant"] == "ada"


def test_stamps_are_stored(stall: Stall) -> None:
    signature_ = stall.add.s(1, 2)
    signature_.stamp(monitoring_id="m1")
    members = group(stall.adds(2))
    members.stamp(monitoring_id="m2")
    with stall.transaction():
        signature_.apply_async(via_outbox=True)
        members.apply_async(via_outbox=True)
    stamps = [each.headers["stamps"] for each in stall.stored()]
    assert [each["monitoring_id"] for each in stamps] == ["m1", "m2", "m2"]
    assert [each.headers["stamped_headers"] for each in stall.stored()] == [["monitoring_id"]] * 3


def test_a_dispatch_inside_a_task_tells_its_parent_and_root(stall: Stall) -> None:
    with stall.transaction(), running(stall.echo, id="parent", root_id="root") as task:
        result = stall.add.apply_async((1, 2), via_outbox=True)
        group(stall.adds(1)).apply_async(via_outbox=True)
        children = [child.id for child in task.request.children]
    assert [each.headers["parent_id"] for each in stall.stored()] == ["parent", "parent"]
    assert [each.headers["root_id"] for each in stall.stored()] == ["root", "root"]
    assert result.id in children


def test_apply_and_calls_of_the_task_run_it_at_once(open_stall: OpenStall) -> None:
    stall = open_stall(default=True)
    with stall.transaction():
        values = [
            stall.charge(1, 2),
            stall.charge.apply((1, 2)).get(),
            stall.charge.s(1, 2)(),
            stall.charge.s(1).apply((2,)).get(),
            (stall.charge.s(1, 2) | stall.echo.s()).apply().get(),
            *group(stall.adds(2)).apply().get(),
            chord(stall.adds(2), stall.total.s()).apply().get(),
        ]
    assert (values, stall.names) == ([3, 3, 3, 3, 3, 1, 2, 3], [])


ENTRIES = {
    "option": ("stall.add", {"via_outbox": True}),
    "task default": ("stall.charge", {}),
    "unknown name": ("other.run", {"via_outbox": True}),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_entries_of_beat_are_stored(name: str, mixed_stall: Stall) -> None:
    stall, (task, options) = mixed_stall, ENTRIES[name]
    stall.app.finalize()
    scheduler = Scheduler(app=stall.app)
    entry = ScheduleEntry(
        name="nightly",
        task=task,
        schedule=schedule(timedelta(seconds=60)),
        args=(1, 2),
        options=options,
        app=stall.app,
    )
    scheduler.apply_entry(entry, producer=scheduler.producer)
    (message,) = stall.stored()
    assert (message.name, message.args, stall.sent) == (task, [1, 2], [])
    assert not [word for word in OPTIONS if word in message.text]
