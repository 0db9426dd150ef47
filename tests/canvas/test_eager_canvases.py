"""Eager mode: what groups, chains and chords come to once their transaction has committed."""

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, chain, chord, group, states
from celery.result import GroupResult

from celery_outbox.errors import DispatchError, OptionError
from tests.canvas.stall import OpenStall, SoldOutError, Stall, add_tasks

Make = Callable[[Any], Any]


class Plain:
    """The tasks of a stall on an app that has no outbox."""

    def __init__(self) -> None:
        self.app = Celery("plain", set_as_current=False)
        self.app.conf.task_always_eager = True
        add_tasks(self.app)
        self.add, self.total, self.echo = (
            self.app.tasks[f"stall.{name}"] for name in ("add", "total", "echo")
        )


@pytest.fixture
def eager_stall(open_stall: OpenStall) -> Stall:
    return open_stall(config={"task_always_eager": True})


CANVASES: dict[str, Make] = {
    "group": lambda s: group(s.add.s(1, 1), s.add.s(2, 2)),
    "group of one": lambda s: group([s.add.s(1, 1)]),
    "group of a list": lambda s: group([s.add.s(number, 1) for number in range(3)]),
    "group in a group": lambda s: group([group(s.add.s(1, 1), s.add.s(2, 2)), s.echo.s(5)]),
    "group of chains": lambda s: group([chain(s.add.s(1, 1), s.add.s(2)), s.echo.s(5)]),
    "chain": lambda s: chain(s.add.s(1, 1), s.add.s(2), s.echo.s()),
    "chain of one": lambda s: chain(s.add.s(1, 1)),
    "chain that ends in a group": lambda s: chain(s.add.s(1, 1), group(s.add.s(1), s.add.s(2))),
    "chain that begins with a group": lambda s: chain(group(s.add.s(1, 1), s.add.s(2, 2)), s.total.s()),
    "chord": lambda s: chord([s.add.s(1, 1), s.add.s(2, 2)], s.total.s()),
    "chord with a group as its body": lambda s: chord(
        [s.add.s(1, 1), s.add.s(2, 2)], group(s.total.s(), s.echo.s())
    ),
    "chord in a chord": lambda s: chord(
        [chord([s.add.s(1, 1)], s.total.s()), s.echo.s(3)], s.total.s()
    ),
    "map": lambda s: s.echo.map([1, 2]),
    "chunks": lambda s: s.add.chunks([(1, 1), (2, 2), (3, 3)], 2),
}


@pytest.mark.parametrize("name", CANVASES)
def test_a_canvas_comes_to_what_it_comes_to_without_an_outbox(name: str, eager_stall: Stall) -> None:
    make = CANVASES[name]
    with eager_stall.transaction():
        result = make(eager_stall).apply_async(via_outbox=True)
        before = result.ready(), result.id
    expected = make(Plain()).apply_async()
    assert (result.get(), result.ready()) == (expected.get(), True)
    assert before == (False, result.id)
    assert isinstance(result, GroupResult) or result.state == states.SUCCESS
    assert eager_stall.names == []


@pytest.mark.parametrize("name", CANVASES)
def test_a_canvas_of_a_rolled_back_transaction_never_runs(name: str, eager_stall: Stall) -> None:
    with pytest.raises(SoldOutError), eager_stall.transaction():
        result = CANVASES[name](eager_stall).apply_async(via_outbox=True)
        raise SoldOutError
    assert not result.ready()


@pytest.mark.parametrize("name", ["group", "chain", "chord"])
def test_the_value_of_a_canvas_is_refused_before_the_commit(name: str, eager_stall: Stall) -> None:
    with eager_stall.transaction():
        result = CANVASES[name](eager_stall).set(via_outbox=True).apply_async()
        with pytest.raises(DispatchError, match="has not committed"):
            result.get()


@pytest.mark.parametrize("name", CANVASES)
def test_a_canvas_without_a_transaction_runs_at_once(name: str, eager_stall: Stall) -> None:
    result = CANVASES[name](eager_stall).apply_async(via_outbox=True)
    assert result.get() == CANVASES[name](Plain()).apply_async().get()


def test_members_of_a_group_run_each_by_its_own_choice(eager_stall: Stall) -> None:
    with eager_stall.transaction():
        result = group(
            eager_stall.echo.s(1).set(via_outbox=False),
            eager_stall.echo.s(2),
            eager_stall.charge.s(1, 2),
        ).apply_async()
        states_before = [each.state for each in result.results]
    assert states_before == [states.SUCCESS, states.SUCCESS, states.PENDING]
    assert result.get() == [1, 2, 3]


def test_a_group_in_a_group_keeps_its_choice(eager_stall: Stall) -> None:
    with eager_stall.transaction():
        result = group(
            [group([eager_stall.echo.s(1)]).set(via_outbox=False), eager_stall.echo.s(2)]
        ).apply_async(via_outbox=True)
        states_before = [each.state for each in result.results]
    assert states_before == [states.SUCCESS, states.PENDING]


def test_partial_arguments_reach_the_members(eager_stall: Stall) -> None:
    with eager_stall.transaction():
        result = group(eager_stall.add.s(1), eager_stall.add.si(5, 5)).apply_async(
            (10,), via_outbox=True
        )
        chained = chain(eager_stall.add.s(1), eager_stall.echo.s()).apply_async((10,), via_outbox=True)
    assert (result.get(), chained.get()) == ([11, 10], 11)


def test_a_link_to_a_group_is_refused_as_by_celery(eager_stall: Stall) -> None:
    for option in ("link", "link_error"):
        with eager_stall.transaction(), pytest.raises(TypeError, match="Cannot add link to group"):
            group(eager_stall.adds(2)).apply_async(via_outbox=True, **{option: eager_stall.echo.s()})


def test_a_failing_chain_fails_its_result(eager_stall: Stall) -> None:
    with pytest.raises(TypeError), eager_stall.transaction():
        result = chain(eager_stall.total.s("x"), eager_stall.echo.s()).apply_async(via_outbox=True)
    assert result.state == states.FAILURE
    with pytest.raises(TypeError):
        result.get()


def test_dispatching_leaves_the_canvas_as_it_was(eager_stall: Stall) -> None:
    for name, make in CANVASES.items():
        canvas = make(eager_stall).set(via_outbox=True)
        before = repr(canvas), repr(dict(canvas))
        with eager_stall.transaction():
            results = [canvas.apply_async() for _ in range(2)]
        assert (repr(canvas), repr(dict(canvas))) == before, name
        assert results[0].get() == results[1].get(), name


def test_a_canvas_on_two_databases_is_refused(open_stall: OpenStall, tmp_path: Any) -> None:
    stall = open_stall(
        databases={name: f"sqlite:///{tmp_path / name}.db" for name in ("main", "billing")},
        config={"task_always_eager": True},
    )
    members = [stall.add.s(1, 1), stall.add.s(2, 2).set(outbox_database="billing")]
    with pytest.raises(OptionError, match="'billing', 'main'"):
        chord(members, stall.total.s()).apply_async(via_outbox=True)
