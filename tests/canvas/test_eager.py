"""Eager mode: a task that would have been stored runs after the commit that would have stored it."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from celery import states
from celery.result import AsyncResult
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from celery_outbox.errors import DispatchError, OptionError, TransactionError
from tests.canvas.stall import OpenStall, SoldOutError, Stall


class Notes(list[Any]):
    """What the task ``note`` has been told, in order."""


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def eager_stall(open_stall: OpenStall, notes: Notes) -> Stall:
    """A stall in eager mode with a task that takes notes."""
    stall = open_stall(config={"task_always_eager": True})
    add_note(stall, notes)
    return stall


def add_note(stall: Stall, notes: Notes) -> None:
    def note(value: Any) -> Any:
        notes.append(value)
        return value

    stall.app.task(note, name="stall.note", shared=False)


def send(stall: Stall, value: Any, **options: Any) -> AsyncResult:
    return stall.app.tasks["stall.note"].apply_async((value,), **{"via_outbox": True} | options)


@contextmanager
def session(engine: sa.Engine) -> Iterator[Session]:
    with Session(engine) as it, it.begin():
        yield it


@contextmanager
def scoped(engine: sa.Engine) -> Iterator[Any]:
    registry = scoped_session(sessionmaker(engine))
    try:
        with registry.begin():
            yield registry
    finally:
        registry.remove()


@contextmanager
def connection(engine: sa.Engine) -> Iterator[sa.Connection]:
    with engine.begin() as it:
        yield it


@contextmanager
def session_of_a_connection(engine: sa.Engine) -> Iterator[Session]:
    with engine.connect() as outer, outer.begin(), Session(bind=outer) as it:
        yield it
        it.commit()


WAYS = [session, scoped, connection, session_of_a_connection]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


@every_way
@pytest.mark.parametrize("writes", [True, False], ids=["with SQL", "without SQL"])
def test_a_task_runs_after_the_commit(
    way: Callable[..., Any], writes: bool, eager_stall: Stall, notes: Notes
) -> None:
    with way(eager_stall.engine) as where:
        if writes:
            where.execute(sa.text("CREATE TABLE orders (id INTEGER)"))
        result = send(eager_stall, "a")
        assert (notes, result.state) == ([], states.PENDING)
    assert (notes, result.get(), result.state) == (["a"], "a", states.SUCCESS)
    assert eager_stall.names == []


@every_way
def test_a_task_of_a_rolled_back_transaction_never_runs(
    way: Callable[..., Any], eager_stall: Stall, notes: Notes
) -> None:
    with pytest.raises(SoldOutError), way(eager_stall.engine):
        result = send(eager_stall, "a")
        raise SoldOutError
    assert (notes, result.ready()) == ([], False)


@every_way
def test_a_savepoints_release_runs_nothing(
    way: Callable[..., Any], eager_stall: Stall, notes: Notes
) -> None:
    with way(eager_stall.engine) as where:
        with where.begin_nested():
            send(eager_stall, "a")
        released = list(notes)
        with pytest.raises(SoldOutError), where.begin_nested():
            send(eager_stall, "b")
            raise SoldOutError
        send(eager_stall, "c")
    assert (released, notes) == ([], ["a", "c"])


def test_a_session_on_an_outer_transaction_waits_for_that(eager_stall: Stall, notes: Notes) -> None:
    with eager_stall.engine.connect() as outer, outer.begin() as transaction:
        with Session(bind=outer) as inner:
            send(eager_stall, "a")
            inner.commit()
            after_inner = list(notes)
        transaction.rollback()
    with eager_stall.engine.connect() as outer, outer.begin():
        with Session(bind=outer) as inner:
            send(eager_stall, "b")
            inner.commit()
        still = list(notes)
    assert (after_inner, still, notes) == ([], [], ["b"])


def test_a_session_that_joins_with_savepoints_waits_for_the_outer_commit(
    eager_stall: Stall, notes: Notes
) -> None:
    with eager_stall.engine.connect() as outer:
        outer.begin()
        with Session(bind=outer, join_transaction_mode="create_savepoint") as inner:
            for value, end in (("a", inner.commit), ("b", inner.rollback)):
                inner.execute(sa.text("SELECT 1"))
                send(eager_stall, value)
                end()
        before = list(notes)
        outer.commit()
    assert (before, notes) == ([], ["a"])


def test_a_task_sees_what_its_transaction_committed(eager_stall: Stall) -> None:
    def count() -> Any:
        with eager_stall.engine.connect() as another:
            return another.execute(sa.text("SELECT count(*) FROM orders")).scalar()

    task = eager_stall.app.task(count, name="stall.count", shared=False)
    with eager_stall.engine.begin() as setting_up:
        setting_up.execute(sa.text("CREATE TABLE orders (id INTEGER)"))
    with eager_stall.transaction() as it:
        it.execute(sa.text("INSERT INTO orders VALUES (1)"))
        result = task.apply_async(via_outbox=True)
    assert result.get() == 1


def test_a_task_without_a_transaction_runs_at_once(eager_stall: Stall, notes: Notes) -> None:
    result = send(eager_stall, "a")
    assert (notes, result.get()) == (["a"], "a")


def test_a_direct_task_runs_at_once(eager_stall: Stall, notes: Notes) -> None:
    with eager_stall.transaction():
        direct = send(eager_stall, "direct", via_outbox=None)
        refused = send(eager_stall, "off", via_outbox=False)
        eager_stall.app.tasks["stall.note"].apply(("applied",))
        during = list(notes)
    assert during == notes == ["direct", "off", "applied"]
    assert (direct.get(), refused.get()) == ("direct", "off")


def test_the_default_of_a_task_holds_in_eager_mode(eager_stall: Stall) -> None:
    with eager_stall.transaction():
        result = eager_stall.charge.delay(1, 2)
        state = result.state
    assert (state, result.get()) == (states.PENDING, 3)


def test_tasks_run_in_the_order_of_their_dispatch(eager_stall: Stall, notes: Notes) -> None:
    with eager_stall.transaction():
        for number in range(5):
            send(eager_stall, number)
    assert notes == [0, 1, 2, 3, 4]


def test_the_id_is_known_before_the_commit(eager_stall: Stall) -> None:
    with eager_stall.transaction():
        given = send(eager_stall, "a", task_id="order-77")
        made = send(eager_stall, "b")
        ids = given.id, made.id
    assert ids == (given.id, made.id) == ("order-77", made.id)
    assert made.id


def test_asking_for_a_result_before_the_commit_is_an_error(eager_stall: Stall) -> None:
    with eager_stall.transaction():
        result = send(eager_stall, "a")
        with pytest.raises(DispatchError, match="has not committed"):
            result.get(timeout=5)
    assert result.get(timeout=5) == "a"


def test_a_task_that_fails_fails_its_result_not_the_commit(eager_stall: Stall) -> None:
    with eager_stall.transaction():
        result = eager_stall.total.apply_async(("not a number",), via_outbox=True)
    assert (result.state, result.failed()) == (states.FAILURE, True)
    with pytest.raises(TypeError):
        result.get()


def test_an_error_that_is_to_propagate_comes_out_of_the_commit(open_stall: OpenStall) -> None:
    stall = open_stall(config={"task_always_eager": True, "task_eager_propagates": True})
    with stall.engine.begin() as setting_up:
        setting_up.execute(sa.text("CREATE TABLE orders (id INTEGER)"))
    with pytest.raises(TypeError), stall.transaction() as it:
        it.execute(sa.text("INSERT INTO orders VALUES (1)"))
        result = stall.total.apply_async(("not a number",), via_outbox=True)
    with stall.engine.connect() as witness:
        assert witness.execute(sa.text("SELECT count(*) FROM orders")).scalar() == 1
    assert result.state == states.FAILURE
    with pytest.raises(TypeError):
        result.get()


def test_a_session_works_on_after_an_error_that_came_out_of_its_commit(open_stall: OpenStall) -> None:
    stall = open_stall(config={"task_always_eager": True, "task_eager_propagates": True})
    with Session(stall.engine) as it:
        it.execute(sa.text("CREATE TABLE orders (id INTEGER)"))
        stall.total.apply_async(("not a number",), via_outbox=True)
        with pytest.raises(TypeError):
            it.commit()
        it.execute(sa.text("INSERT INTO orders VALUES (1)"))
        result = stall.add.apply_async((1, 2), via_outbox=True)
        it.commit()
    assert result.get() == 3


def test_results_are_stored_when_eager_results_are(open_stall: OpenStall, tmp_path: Any) -> None:
    stall = open_stall(
        config={
            "task_always_eager": True,
            "task_store_eager_result": True,
            "result_backend": f"file://{tmp_path}",
        }
    )
    with stall.transaction():
        result = stall.add.apply_async((1, 2), via_outbox=True)
        before = stall.app.AsyncResult(result.id).state
    assert (before, stall.app.AsyncResult(result.id).get()) == (states.PENDING, 3)


def test_arguments_are_those_of_the_call(eager_stall: Stall, notes: Notes) -> None:
    numbers = [1, 2]
    with eager_stall.transaction():
        send(eager_stall, numbers)
        numbers.append(3)
    assert notes == [[1, 2]]


def test_links_run_with_their_task(eager_stall: Stall, notes: Notes) -> None:
    note = eager_stall.app.tasks["stall.note"]
    with eager_stall.transaction():
        eager_stall.add.apply_async((1, 2), link=note.s(), via_outbox=True)
        eager_stall.total.apply_async(("x",), link_error=note.si("failed"), via_outbox=True)
        before = list(notes)
    assert (before, notes) == ([], [3, "failed"])


def test_a_task_dispatched_by_a_task_runs_in_its_turn(eager_stall: Stall, notes: Notes) -> None:
    def outer() -> None:
        send(eager_stall, "no transaction is open here")
        with eager_stall.transaction():
            send(eager_stall, "inner")
            notes.append("outer")

    task = eager_stall.app.task(outer, name="stall.outer", shared=False)
    with eager_stall.transaction():
        task.apply_async(via_outbox=True)
    assert notes == ["no transaction is open here", "outer", "inner"]


def test_retries_go_on_at_once(eager_stall: Stall, notes: Notes) -> None:
    def stubborn(task: Any, value: Any) -> Any:
        notes.append(task.request.retries)
        if task.request.retries < 2:
            raise task.retry(countdown=0)
        return value

    task = eager_stall.app.task(
        stubborn, bind=True, name="stall.stubborn", shared=False, via_outbox=True
    )
    with eager_stall.transaction():
        result = task.delay("done")
        before = list(notes)
    assert (before, notes, result.get()) == ([], [0, 1, 2], "done")


WRONG: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"args": (object(),)}, Exception),
    ({"args": (1, 2, 3)}, TypeError),
    ({"args": (1,), "outbox_database": "nowhere"}, OptionError),
    ({"args": (1,), "outbox_broker": "nowhere"}, OptionError),
    ({"args": (1,), "via_outbox": False, "outbox_database": "default"}, OptionError),
    ({"args": (1,), "via_outbox": "yes"}, OptionError),
]


@pytest.mark.parametrize(("options", "error"), WRONG, ids=str)
def test_errors_are_those_of_a_stored_dispatch(
    options: dict[str, Any],
    error: type[Exception],
    eager_stall: Stall,
    open_stall: OpenStall,
    notes: Notes,
) -> None:
    stored = open_stall()
    add_note(stored, notes)
    raised = []
    for stall in (eager_stall, stored):
        with stall.transaction(), pytest.raises(error) as caught:
            stall.app.tasks["stall.note"].apply_async(**{"via_outbox": True} | options)
        raised.append(type(caught.value))
    assert raised[0] is raised[1]
    assert (notes, stored.names) == ([], [])


def test_a_required_transaction_is_required_in_eager_mode(open_stall: OpenStall) -> None:
    stall = open_stall(config={"task_always_eager": True}, require_transaction=True)
    with pytest.raises(TransactionError):
        stall.add.apply_async((1, 2), via_outbox=True)


def test_a_result_can_be_pickled_after_the_commit(eager_stall: Stall) -> None:
    with eager_stall.transaction():
        result = eager_stall.add.apply_async((1, 2), via_outbox=True)
    assert pickle.loads(pickle.dumps(result)).get() == 3
