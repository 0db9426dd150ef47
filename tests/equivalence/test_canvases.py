"""Every message of a canvas, and what is inside it, is the one that plain Celery would have sent."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, chord, group

from tests.equivalence.conftest import MakePair
from tests.equivalence.pairs import TASK, Pair, comparable
from tests.relay.wire import Contents

# Kombu's tables use what SQLAlchemy 2.1 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")

UUID = re.compile("[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")

#: Each is made of a signature of the task.
CANVASES: dict[str, Callable[[Any], Any]] = {
    "group": lambda s: group(s(1, 2), s(3, 4).set(priority=3, countdown=5, expires=600)),
    "group in a group": lambda s: group(s(1, 2), group(s(3, 4), s(5, 6))),
    "group of chains": lambda s: group(chain(s(1, 2), s(3)), chain(s(4, 5), s(6))),
    "chain": lambda s: chain(s(1, 2), s(3).set(queue="reports", headers={"tenant": "a"}), s(4)),
    "chain into a group": lambda s: chain(s(1, 2), group(s(3), s(4))),
    "chain from a group": lambda s: chain(group(s(1, 2), s(3, 4)), s(5)),
    "chord": lambda s: chord([s(1, 2), s(3, 4)], s(5).set(priority=3, link=s(6))),
    "chord of chains": lambda s: chord([chain(s(1, 2), s(3)), s(4, 5)], chain(s(6), s(7))),
    "chord in a chord": lambda s: chord([chord([s(1, 2), s(3, 4)], s(5)), s(6, 7)], s(8)),
    "chord without a header": lambda s: chord([], s(1)),
    "chunks": lambda s: s(1, 2).type.chunks([(1, 2), (3, 4), (5, 6)], 2),
}


@pytest.mark.parametrize("name", CANVASES)
def test_every_message_of_a_canvas_equals(name: str, every_pair: Pair) -> None:
    assert_alike(every_pair, CANVASES[name], "celery.starmap" if name == "chunks" else TASK)


def test_the_helper_of_a_polled_result_backend_equals(
    make_pair: MakePair, redis_url: str, tmp_path: Path
) -> None:
    pair = make_pair(redis_url, result_backend=f"db+sqlite:///{tmp_path / 'results.db'}")
    assert_alike(pair, CANVASES["chord"], "celery.chord_unlock")


def assert_alike(pair: Pair, canvas: Callable[[Any], Any], expected: str) -> None:
    def call(app: Celery, **choice: bool) -> None:
        canvas(app.tasks[TASK].s).apply_async(**choice)

    plain, stored = pair.contents(call)
    # Redis has a list for each priority.
    queues = [messages for messages in plain.values() if isinstance(messages, list)]
    assert expected in {message["headers"]["task"] for queue in queues for message in queue}
    assert with_ids_by_order(comparable(stored)) == with_ids_by_order(comparable(plain))


def with_ids_by_order(contents: Contents) -> Any:
    """Put the order of their first appearance in the place of the ids that Celery made."""
    seen: dict[str, str] = {}

    def of_text(text: str) -> str:
        return UUID.sub(lambda found: seen.setdefault(found[0], f"id {len(seen)}"), text)

    def of(value: Any) -> Any:
        if isinstance(value, bytes):
            return of_text(value.decode("latin-1"))
        if isinstance(value, dict):
            return {key: of(each) for key, each in value.items()}
        if isinstance(value, list):
            return [of(each) for each in value]
        return of_text(value) if isinstance(value, str) else value

    return of(contents)
