"""Groups, chains and what nests in them: who is stored, who is sent, and in how many statements."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery, chain, chord, group
from kombu import Exchange, Queue
from kombu.exceptions import EncodeError

from celery_outbox.errors import NoOutboxError
from tests.canvas.stall import (
    OPTIONS,
    SoldOutError,
    Stall,
    add_tasks,
    counted_inserts,
    memory_config,
    running,
    take_sent,
)

Make = Callable[[Stall], Any]

CANVASES: dict[str, tuple[Make, list[str]]] = {
    "group of chains": (
        lambda s: group(chain(s.add.s(1, 1), s.echo.s()), chain(s.add.s(2, 2), s.echo.s())),
        ["add", "add"],
    ),
    "group in a group": (
        lambda s: group(group(s.adds(2)), s.echo.s(1), group(group(s.add.s(5, 5)))),
        ["add", "add", "echo", "add"],
    ),
    "group of one": (lambda s: group([s.add.s(1, 1)]), ["add"]),
    "group of a generator": (lambda s: group(each for each in s.adds(3)), ["add"] * 3),
    "empty group": (lambda s: group([]), []),
    "group of an empty group": (lambda s: group(group([])), []),
    "group of dictionaries": (
        lambda s: group([dict(each) for each in s.adds(2)], app=s.app),
        ["add", "add"],
    ),
    "chain of one": (lambda s: chain(s.add.s(1, 1)), ["add"]),
    "empty chain": (lambda s: chain(app=s.app), []),
    "chain in a chain": (lambda s: chain(chain(s.add.s(1, 1), s.echo.s()), s.echo.s()), ["add"]),
    "chain that ends in a group": (
        lambda s: chain(s.add.s(1, 1), group(s.add.s(1), s.add.s(2))),
        ["add"],
    ),
    "chain that begins with a group of one": (
        lambda s: chain(group([s.add.s(1, 1)]), s.echo.s()),
        ["add"],
    ),
    "chain that begins with a map": (
        lambda s: chain(s.echo.map([1, 2]), s.total.s()),
        ["celery.map"],
    ),
    "group of maps": (
        lambda s: group(s.echo.map([1]), s.add.starmap([(1, 2)])),
        ["celery.map", "celery.starmap"],
    ),
    "group of chunks": (
        lambda s: group(s.add.chunks([(1, 2), (3, 4)], 1), s.echo.s(1)),
        ["celery.chunks", "echo"],
    ),
}


@pytest.mark.parametrize("name", CANVASES)
def test_a_canvas_stores_its_first_tasks(name: str, stall: Stall) -> None:
    make, expected = CANVASES[name]
    with stall.transaction():
        make(stall).apply_async(via_outbox=True)
    assert stall.names == expected
    assert not [word for each in stall.stored() for word in OPTIONS if word in each.text]


@pytest.mark.parametrize("name", CANVASES)
def test_a_canvas_with_an_option_of_its_own_stores_the_same(name: str, stall: Stall) -> None:
    make, expected = CANVASES[name]
    with stall.transaction():
        make(stall).set(via_outbox=True).apply_async()
    assert stall.names == expected


def test_an_empty_group_gives_an_empty_result(stall: Stall) -> None:
    assert group([], app=stall.app).apply_async(via_outbox=True).results == []


def test_the_members_of_a_group_have_its_id_and_their_places(stall: Stall) -> None:
    with stall.transaction():
        result = group(stall.adds(3)).apply_async(via_outbox=True)
    headers = [each.headers for each in stall.stored()]
    assert [each["group"] for each in headers] == [result.id] * 3
    assert [each["group_index"] for each in headers] == [0, 1, 2]
    assert [each["id"] for each in headers] == [each.id for each in result]


def test_partial_arguments_reach_every_member(stall: Stall) -> None:
    with stall.transaction():
        group(stall.add.s(1), stall.add.si(5, 6), stall.add.s(2)).apply_async((10,), via_outbox=True)
        chain(stall.add.s(1), stall.echo.s()).apply_async((20,), via_outbox=True)
    assert [each.args for each in stall.stored()] == [[10, 1], [5, 6], [10, 2], [20, 1]]


def test_options_of_celery_reach_the_members_of_a_stored_group(stall: Stall) -> None:
    with stall.transaction():
        group(stall.adds(2)).apply_async(via_outbox=True, priority=4, headers={"tenant": "a"})
    assert [each.properties["priority"] for each in stall.stored()] == [4, 4]
    assert [each.headers["tenant"] for each in stall.stored()] == ["a", "a"]


def test_a_group_of_100_whose_caller_raises_leaves_nothing(stall: Stall) -> None:
    with pytest.raises(SoldOutError), stall.transaction():
        group(stall.adds(100)).apply_async(via_outbox=True)
        raise SoldOutError
    assert stall.names == []


def test_a_group_of_1000_takes_a_handful_of_statements(stall: Stall) -> None:
    with counted_inserts(stall.engine) as inserts, stall.transaction():
        group(stall.adds(1000)).apply_async(via_outbox=True)
    assert (len(stall.names), len(inserts) <= 3) == (1000, True)


@pytest.mark.parametrize("has_transaction", [True, False])
def test_one_bad_member_leaves_nothing_of_its_group(has_transaction: bool, mixed_stall: Stall) -> None:
    stall = mixed_stall
    members = stall.adds(100)
    members[50] = stall.add.s(object(), 1)

    def dispatch() -> None:
        with pytest.raises(EncodeError):
            group(members).apply_async(via_outbox=True)

    if has_transaction:
        with stall.transaction():
            dispatch()
    else:
        dispatch()
    assert (stall.names, stall.sent) == ([], [])


def test_a_group_without_a_transaction_is_stored_at_once(stall: Stall) -> None:
    with counted_inserts(stall.engine) as inserts:
        group(stall.adds(10)).apply_async(via_outbox=True)
    assert (len(stall.names), len(inserts)) == (10, 1)


def test_a_members_own_choice_beats_its_groups(mixed_stall: Stall) -> None:
    stall = mixed_stall
    with stall.transaction():
        group(
            stall.add.s(0, 1).set(via_outbox=False),
            stall.add.s(1, 1),
            chain(stall.echo.s(2), stall.add.s(1)).set(via_outbox=False),
            group(stall.total.s([3]), stall.charge.s(3, 1)).set(via_outbox=False),
        ).apply_async(via_outbox=True)
        group(stall.add.s(4, 1), stall.charge.s(5, 1)).apply_async(via_outbox=False)
        group(stall.add.s(6, 1), stall.charge.s(7, 1)).apply_async()
    assert [each.args[0] for each in stall.stored()] == [1, 7]
    assert [each.args[0] for each in stall.sent] == [0, 2, [3], 3, 4, 5, 6]


def test_a_chains_choice_concerns_its_first_task_only(stall: Stall) -> None:
    with stall.transaction():
        chain(stall.add.s(1, 1), stall.echo.s().set(via_outbox=True), stall.charge.s(3)).apply_async(
            via_outbox=True
        )
    (first,) = stall.stored()
    last, middle = first.embedded["chain"]
    assert (first.name, middle["task"], last["task"]) == ("stall.add", "stall.echo", "stall.charge")
    assert middle["options"]["via_outbox"] is True
    assert "via_outbox" not in last["options"]
    assert first.text.count("via_outbox") == 1


KEPT: dict[str, Make] = {
    "of a chain at the beginning of another": lambda s: chain(
        chain(s.add.s(1, 1), s.echo.s()).set(via_outbox=True), s.echo.s()
    ),
    "of a chain that is continued": lambda s: (
        chain(s.add.s(1, 1), s.echo.s()).set(via_outbox=True) | s.echo.s()
    ),
    "of a chain that is continued with a chain": lambda s: (
        chain(s.add.s(1, 1), s.echo.s()).set(via_outbox=True) | chain(s.echo.s(), s.echo.s())
    ),
    "of a chain that is continued with a group": lambda s: (
        chain(s.add.s(1, 1), s.echo.s()).set(via_outbox=True) | group(s.add.s(1), s.add.s(2))
    ),
    "of a task that is continued": lambda s: s.add.s(1, 1).set(via_outbox=True) | s.echo.s(),
    "of a chain in a group": lambda s: group(chain(s.add.s(1, 1), s.echo.s()).set(via_outbox=True)),
    "of a group in a group": lambda s: group([group([s.add.s(1, 1)]).set(via_outbox=True)]),
    "of a chain in a group of one": lambda s: chain(
        group([chain(s.add.s(1, 1), s.echo.s()).set(via_outbox=True)]), s.echo.s()
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_the_choice_is_kept_when_celery_takes_a_canvas_apart(name: str, stall: Stall) -> None:
    with stall.transaction():
        KEPT[name](stall).apply_async()
    assert stall.names == ["add"]
    assert "via_outbox" not in stall.stored()[0].text


UNROLLED: dict[str, Make] = {
    "at the beginning of a chain": lambda s: chain(
        group([s.add.s(1, 1)]).set(via_outbox=True), s.echo.s()
    ),
    "at the beginning of a chain in a chain": lambda s: chain(
        chain(group([s.add.s(1, 1)]).set(via_outbox=True), s.echo.s()), s.echo.s()
    ),
    "at the beginning of a chain in a group": lambda s: group(
        [chain(group([s.add.s(1, 1)]).set(via_outbox=True), s.echo.s())]
    ),
}


@pytest.mark.parametrize("name", UNROLLED)
def test_a_group_of_one_keeps_its_choice(name: str, stall: Stall) -> None:
    with stall.transaction():
        UNROLLED[name](stall).apply_async()
    assert stall.names == ["add"]
    assert "via_outbox" not in stall.stored()[0].text


def test_a_later_group_of_one_keeps_its_choice(stall: Stall) -> None:
    member = stall.echo.s()
    canvas = chain(stall.add.s(1, 1), group([member]).set(via_outbox=True), stall.echo.s())
    with stall.transaction():
        canvas.apply_async(via_outbox=True)
    (first,) = stall.stored()
    assert [each["options"].get("via_outbox") for each in first.embedded["chain"]] == [None, True]
    assert member.options == {}


OBJECTS: dict[str, Make] = {
    "signature": lambda s: s.add.s(1, 1),
    "group": lambda s: group(s.adds(3)),
    "chain": lambda s: chain(s.add.s(1, 1), s.echo.s()),
    "chunks": lambda s: s.add.chunks([(1, 2), (3, 4)], 1),
    "map": lambda s: s.echo.map([1, 2]),
    "nested": lambda s: group(chain(s.add.s(1, 1), group(s.adds(2))), group(s.adds(2))),
    "chain of a chain": lambda s: chain(
        chain(s.add.s(1, 1), s.echo.s()).set(via_outbox=True), s.echo.s()
    ),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_dispatching_leaves_the_callers_objects_as_they_were(name: str, stall: Stall) -> None:
    canvas = OBJECTS[name](stall)
    canvas.set(via_outbox=True, priority=3)
    before = repr(canvas), dict(canvas.options), repr(dict(canvas))
    with stall.transaction():
        canvas.apply_async()
        once = [(each.name, each.args) for each in stall_after(stall, canvas)]
    assert (repr(canvas), dict(canvas.options), repr(dict(canvas))) == before
    both = [(each.name, each.args) for each in stall.stored()]
    assert both == once * 2


def stall_after(stall: Stall, canvas: Any) -> list[Any]:
    """Dispatch once more, in a thread without a transaction, and return what that stored."""
    thread = threading.Thread(target=canvas.apply_async)
    thread.start()
    thread.join()
    return stall.stored()


def test_one_canvas_may_be_dispatched_by_two_threads_at_once(stall: Stall) -> None:
    canvas = group(stall.adds(10))
    canvas.set(via_outbox=True)
    both_ready = threading.Barrier(2, timeout=10)
    groups: list[str] = []

    def dispatch() -> None:
        both_ready.wait()
        groups.append(canvas.apply_async().id)

    threads = [threading.Thread(target=dispatch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stored = {each: [m.args for m in stall.stored() if m.headers["group"] == each] for each in groups}
    assert list(stored.values()) == [[[number, 1] for number in range(10)]] * 2
    assert len({each.id for each in stall.stored()}) == 20


def test_what_the_caller_changes_afterwards_changes_nothing_stored(stall: Stall) -> None:
    numbers, headers, linked = [1, 2], {"tenant": {"id": 1}}, stall.echo.s()
    member = stall.total.s(numbers)
    options = {"headers": headers, "link": [linked], "via_outbox": True}
    with stall.transaction():
        member.apply_async(**options)
        stall.total.apply_async((numbers,), **options)
        group([member]).apply_async(via_outbox=True)
        chain(member, linked).apply_async(via_outbox=True)
        numbers.append(3)
        headers["tenant"]["id"] = 2
        linked.set(queue="elsewhere").args = (5,)
        member.args = ("changed",)
        member.options["priority"] = 9
        options.clear()
    stored = stall.stored()
    assert [each.args for each in stored] == [[[1, 2]]] * 4
    assert [each.headers.get("tenant") for each in stored] == [{"id": 1}, {"id": 1}, None, None]
    assert "elsewhere" not in "".join(each.text for each in stored)
    assert [each.properties.get("priority") for each in stored] == [None] * 4


def test_queues_and_keywords_that_the_caller_changes_afterwards_change_nothing_stored(
    stall: Stall,
) -> None:
    stall.app.conf.result_backend = "cache+memory://"
    queue = Queue("vip", Exchange("vipx", "topic"), routing_key="vip.#", queue_arguments={"x": ["a"]})
    keywords, declared = {"value": {"id": ["a"]}}, [queue]
    canvas = chord([stall.echo.s(keywords)], stall.echo.s(keywords))
    with stall.transaction():
        stall.echo.apply_async(kwargs=keywords, queue=queue, routing_key="vip.eu", via_outbox=True)
        stall.echo.s(1).set(declare=declared).apply_async(via_outbox=True)
        canvas.apply_async(via_outbox=True)
        queue.name = queue.exchange.name = queue.routing_key = "changed"
        queue.queue_arguments["x"].append("changed")
        declared.append(Queue("changed"))
        keywords["value"]["id"].append("changed")
        canvas.body.set(queue="changed").args = canvas.tasks[0].args = ("changed",)
    with stall.engine.connect() as connection:
        rows = connection.execute(sa.text("SELECT message, body FROM celery_outbox")).all()
    assert len(rows) == 3
    assert [text for row in rows for text in row if "changed" in str(text)] == []
    assert ["vipx" in message for message, _ in rows] == [True, True, False]


def test_a_group_names_the_database_of_its_members(two_stall: Stall) -> None:
    stall = two_stall
    group(
        stall.add.s(1, 1), stall.add.s(2, 1).set(outbox_database="main"), stall.charge.s(3, 1)
    ).apply_async(outbox_database="billing")
    assert [each.args[0] for each in stall.stored("billing")] == [1, 3]
    assert [each.args[0] for each in stall.stored("main")] == [2]


def test_a_group_inside_a_task_is_the_tasks_child(stall: Stall) -> None:
    with stall.transaction(), running(stall.echo, id="parent", root_id="root") as task:
        result = group(stall.adds(2)).apply_async(via_outbox=True)
        children = list(task.request.children)
    assert children == [result]
    assert [each.headers["parent_id"] for each in stall.stored()] == ["parent"] * 2


def test_after_a_canvas_that_failed_dispatches_are_what_they_were(mixed_stall: Stall) -> None:
    stall = mixed_stall
    with pytest.raises(EncodeError):
        group(stall.add.s(object(), 1)).apply_async(via_outbox=True)
    stall.echo.delay(1)
    stall.charge.delay(1, 1)
    assert (stall.names, stall.sent_names) == (["charge"], ["echo"])


def test_a_canvas_of_an_app_without_an_outbox_is_refused() -> None:
    plain = Celery("plain", set_as_current=False)
    plain.conf.update(memory_config())
    add_tasks(plain)
    add, total = plain.tasks["stall.add"], plain.tasks["stall.total"]
    canvases = [group(add.s(1, 1), add.s(2, 2)), chain(add.s(1, 1), add.s(2)), add.chunks([(1, 1)], 1)]
    for canvas in canvases:
        with pytest.raises(NoOutboxError):
            canvas.apply_async(via_outbox=True)
        with pytest.raises(NoOutboxError):
            canvas.set(outbox_database="default").delay()
    with pytest.raises(NoOutboxError):
        group(add.s(1, 1), total.s([1]).set(via_outbox=True)).apply_async()
    take_sent(plain)
    group(add.s(1, 1), add.s(2, 2)).apply_async(via_outbox=False)
    assert len(take_sent(plain)) == 2
