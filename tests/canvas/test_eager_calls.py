"""Eager mode: a call is finished when it returns, though its task runs later."""

from typing import Any

import pytest
from celery import chain, chord, group
from celery.exceptions import AlwaysEagerIgnored
from kombu.exceptions import EncodeError
from pydantic import BaseModel

from tests.canvas.stall import OpenStall, Stall


@pytest.fixture
def ran() -> list[Any]:
    """What the tasks of these tests have been called with, in order."""
    return []


@pytest.fixture
def eager_stall(open_stall: OpenStall, ran: list[Any]) -> Stall:
    """A stall in eager mode with a task that notes how it was called."""
    stall = open_stall(config={"task_always_eager": True})

    def note(task: Any, value: Any) -> Any:
        ran.append((value, (task.request.headers or {}).get("tenant")))
        return value

    stall.app.task(note, bind=True, name="stall.note", shared=False)
    return stall


def test_what_the_caller_changes_before_the_commit_changes_nothing(
    eager_stall: Stall, ran: list[Any]
) -> None:
    note = eager_stall.app.tasks["stall.note"]
    numbers, headers, linked = [1], {"tenant": ["a"]}, [2]
    link = note.s(linked).set(immutable=True)
    with eager_stall.transaction():
        note.apply_async((numbers,), headers=headers, link=[link], via_outbox=True)
        numbers.append(9)
        headers["tenant"].append("b")
        linked.append(9)
        link.args = ("changed",)
    assert ran == [([1], ["a"]), ([2], None)]


@pytest.mark.parametrize("kind", ["chain", "chord"])
def test_what_the_caller_changes_of_a_canvas_changes_nothing(
    kind: str, eager_stall: Stall, ran: list[Any]
) -> None:
    note, numbers = eager_stall.app.tasks["stall.note"], [1]
    make = {
        "chain": lambda: chain(note.s(numbers), note.si(2)),
        "chord": lambda: chord([note.s(numbers)], note.si(2)),
    }
    with eager_stall.transaction():
        make[kind]().apply_async(via_outbox=True)
        numbers.append(9)
    assert [value for value, _ in ran] == [[1], 2]


class Order(BaseModel):
    number: int


def test_arguments_of_pydantic_reach_the_task(open_stall: OpenStall) -> None:
    stall, seen = open_stall(config={"task_always_eager": True}), []

    def charge(order: Order) -> None:
        seen.append(order)

    task = stall.app.task(charge, name="stall.pydantic", shared=False, pydantic=True)
    with stall.transaction():
        task.apply_async((Order(number=7),), via_outbox=True)
    assert seen == [Order(number=7)]


def test_members_of_a_bulk_that_fails_never_run(eager_stall: Stall, ran: list[Any]) -> None:
    note = eager_stall.app.tasks["stall.note"]
    with eager_stall.transaction():
        with pytest.raises(EncodeError):
            eager_stall.outbox.bulk([note.s(1), note.s(2).set(via_outbox=False), note.s(object())])
        eager_stall.outbox.bulk([note.s(3)])
    assert [value for value, _ in ran] == [3]


def test_members_of_a_group_that_fails_never_run(eager_stall: Stall, ran: list[Any]) -> None:
    note = eager_stall.app.tasks["stall.note"]
    with eager_stall.transaction(), pytest.raises(EncodeError):
        group(note.s(1), note.s(object())).apply_async(via_outbox=True)
    assert ran == []


def test_direct_members_of_a_bulk_run_when_all_are_known(eager_stall: Stall, ran: list[Any]) -> None:
    note = eager_stall.app.tasks["stall.note"]
    with eager_stall.transaction():
        direct, stored = eager_stall.outbox.bulk([note.s(1).set(via_outbox=False), note.s(2)])
        before = direct.get(), stored.ready(), [value for value, _ in ran]
    assert before == (1, False, [1])
    assert stored.get() == 2


def test_a_task_sent_by_its_name_is_stored_for_celery_has_no_eager_mode_for_it(
    eager_stall: Stall, ran: list[Any]
) -> None:
    with eager_stall.transaction(), pytest.warns(AlwaysEagerIgnored):
        eager_stall.app.send_task("stall.note", (1,), via_outbox=True)
    assert (eager_stall.names, ran) == (["note"], [])


def test_a_class_with_its_own_apply_async_is_asked_once(open_stall: OpenStall) -> None:
    stall, asked = open_stall(config={"task_always_eager": True}), []

    class Tenant(stall.app.Task):  # type: ignore[misc, name-defined]  # Celery has no types
        def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
            asked.append(self.name)
            options.setdefault("headers", {})["tenant"] = "north"
            return super().apply_async(args, kwargs, **options)

    def tell(task: Any) -> Any:
        return task.request.headers["tenant"]

    task = stall.app.task(tell, bind=True, base=Tenant, name="stall.tenant", shared=False)
    with stall.transaction():
        result = task.apply_async(via_outbox=True)
    assert (result.get(), asked) == ("north", ["stall.tenant"])
