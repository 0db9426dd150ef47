"""What is said of messages that are parts of a chord, before they are forgotten."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery, chord, group

from celery_outbox import Outbox
from tests.desk.conftest import caller
from tests.relay.apps import rows
from tests.storage.rows import change

CHORD = "its chord can no longer finish"
GROUP = "it belongs to a group; if that is a chord's, the chord can no longer finish"

#: Makes a canvas of one task.
Make = Callable[[Any], Any]


def add(*numbers: int, **others: Any) -> int:
    """The task; Celery wants a function with a name."""
    return sum(numbers)


@pytest.fixture
def box(sqlite_url: str) -> Iterator[Outbox]:
    """An outbox whose app has a task "shop.add" and a result backend that counts by itself."""
    app = Celery(
        "shop", broker="redis://localhost:1/0", backend="cache+memory://", set_as_current=False
    )
    app.task(add, name="shop.add", shared=False)
    engine = sa.create_engine(sqlite_url)
    outbox = Outbox(app, databases={"default": engine})
    outbox.install()
    yield outbox
    app.close()
    engine.dispose()


def store(box: Outbox, make: Make, **options: Any) -> list[str]:
    """Store the canvas that ``make`` makes of the task; the ids of what was stored."""
    make(box.app.tasks["shop.add"]).apply_async(via_outbox=True, **options)
    return [row.task_id for row in rows(box)]


CANVASES: dict[str, tuple[Make, list[bool]]] = {
    "a chord": (lambda add: chord([add.s(1), add.s(2)], add.s()), [True, True]),
    "a chain in a chord": (lambda add: chord([add.s(1) | add.s(2), add.s(3)], add.s()), [True, True]),
    "a group": (lambda add: group(add.s(1), add.s(2)), [False, False]),
    "a chain": (lambda add: add.s(1) | add.s(2), [False]),
    "a chain that ends in a chord": (lambda add: add.s(1) | chord([add.s(2)] * 2, add.s()), [False]),
    "a task": (lambda add: add.s(1), [False]),
}


@pytest.mark.parametrize("protocol", [1, 2])
@pytest.mark.parametrize("name", CANVASES)
def test_a_warning_tells_members_of_chords_from_other_tasks(
    name: str, protocol: int, box: Outbox
) -> None:
    make, expected = CANVASES[name]
    box.app.conf.task_protocol = protocol
    ids = store(box, make)
    done = caller(box)("forget", *ids, "--force")
    assert done.exit_code == 0
    assert [
        f"Warning: {id_} (default, row {n}): {CHORD}" in done.stderr for n, id_ in enumerate(ids, 1)
    ] == expected
    assert done.stderr.count("Warning") == sum(expected)
    assert "[1]" not in done.output


HIDDEN: dict[str, dict[str, Any]] = {
    "compressed": {"compression": "zlib"},
    "pickled": {"serializer": "pickle"},
    "long": {"kwargs": {"text": "x" * 300_000}},
}


@pytest.mark.parametrize("how", HIDDEN)
@pytest.mark.parametrize("name", ["a chord", "a group", "a task"])
def test_where_a_body_is_not_read_a_group_may_be_a_chords(name: str, how: str, box: Outbox) -> None:
    ids = store(box, CANVASES[name][0], **HIDDEN[how])
    done = caller(box)("forget", ids[0], "--force")
    assert done.exit_code == 0
    assert (GROUP in done.stderr, CHORD in done.stderr) == (name != "a task", False)


def test_the_task_that_waits_for_a_chord_is_a_part_of_it(box: Outbox) -> None:
    box.app.send_task("celery.chord_unlock", via_outbox=True)
    (row,) = rows(box)
    assert CHORD in caller(box)("forget", row.task_id, "--force").stderr


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"headers": 3}', "[" * 100_000])
def test_what_cannot_be_read_belongs_to_nothing(text: str, box: Outbox) -> None:
    (task_id,) = store(box, CANVASES["a task"][0])
    change(box.databases["default"], message=text)
    done = caller(box)("forget", task_id, "--force")
    assert (done.exit_code, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "body", [b"", b"[1, 2, 3]", b'[1, 2, {"chain": 7}]', b'[1, 2, {"chain": ["x"]}]']
)
def test_a_strange_body_belongs_to_nothing(body: bytes, box: Outbox) -> None:
    (task_id,) = store(box, CANVASES["a task"][0])
    change(box.databases["default"], body=body)
    done = caller(box)("forget", task_id, "--force")
    assert (done.exit_code, done.stderr) == (0, "")


def test_of_many_messages_it_is_said_how_many_are_parts_of_chords(box: Outbox) -> None:
    store(box, CANVASES["a chord"][0])
    store(box, CANVASES["a task"][0])
    done = caller(box)("forget", "all", "--task", "shop.*", "--force")
    assert (done.exit_code, done.stdout) == (0, "default: forgot 3 messages\n")
    assert done.stderr == (
        "Warning: default: 2 of them are parts of chords or groups; a chord that lacks one can no "
        "longer finish\n"
    )


def test_code_that_forgets_a_part_of_a_chord_is_warned(
    box: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    member, _ = store(box, CANVASES["a chord"][0])
    *_, single = store(box, CANVASES["a task"][0])
    with caplog.at_level(logging.WARNING, "celery_outbox"):
        assert box.forget(single) is True
        assert caplog.records == []
        assert box.forget(member) is True
    (record,) = caplog.records
    assert record.getMessage() == f"A message was forgotten: {CHORD}"
    assert record.__dict__["task_id"] == member
