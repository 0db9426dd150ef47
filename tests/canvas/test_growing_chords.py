"""Task.add_to_chord: what is added follows the choice that the chord was dispatched with."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from celery import Task, chord

from tests.canvas.stall import OpenStall, SoldOutError, Stall, memory_config, running


@pytest.fixture
def stall(open_stall: OpenStall, redis_url: str) -> Stall:
    """A stall whose chords can grow: of Celery's result backends only Redis lets them."""
    return open_stall(config={"result_backend": redis_url, **memory_config()})


@contextmanager
def member_of_a_chord(stall: Stall, **options: Any) -> Iterator[Task]:
    """Be inside a task of the header of a chord that was dispatched with ``options``."""
    header = [stall.echo.s(1), stall.echo.s(2)]
    chord(header, stall.total.s()).apply_async(**options)
    (first, _) = stall.sent or stall.stored()
    with stall.engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM celery_outbox")
    request = {"chord": first.embedded["chord"], "group": first.headers["group"], "group_index": 0}
    with running(stall.echo, **request) as task:
        yield task


def added(stall: Stall) -> int:
    """How many results more the backend waits for."""
    with redis.Redis.from_url(stall.app.conf.result_backend) as client:
        return sum(int(client.get(key)) for key in client.scan_iter("*.t"))


def lifetimes(stall: Stall) -> list[int]:
    """How many seconds each key of the result backend has, -1 for ever."""
    with redis.Redis.from_url(stall.app.conf.result_backend) as client:
        return [client.ttl(key) for key in client.scan_iter("*")]


def test_a_chord_leaves_nothing_for_ever_and_after_a_rollback_nothing(stall: Stall) -> None:
    canvas = chord([stall.echo.s(1)], stall.total.s())
    with pytest.raises(SoldOutError), stall.transaction():
        canvas.apply_async(via_outbox=True)
        raise SoldOutError
    rolled_back = lifetimes(stall)
    with stall.transaction():
        canvas.apply_async(via_outbox=True)
    assert rolled_back == []
    assert all(0 < seconds <= 86400 for seconds in lifetimes(stall))


def test_what_is_added_to_a_stored_chord_is_stored_and_counted_with_the_commit(stall: Stall) -> None:
    with member_of_a_chord(stall, via_outbox=True) as task, stall.transaction():
        task.add_to_chord(stall.add.s(5, 5))
        before = added(stall), stall.names
    (message,) = stall.stored()
    assert (before, added(stall), message.args, stall.sent) == ((0, []), 1, [5, 5], [])
    assert message.embedded["chord"]["task"] == "stall.total"
    assert "via_outbox" not in message.text


def test_what_is_added_and_rolled_back_is_not_waited_for(stall: Stall) -> None:
    with (
        member_of_a_chord(stall, via_outbox=True) as task,
        pytest.raises(SoldOutError),
        stall.transaction(),
    ):
        task.add_to_chord(stall.add.s(5, 5))
        raise SoldOutError
    assert (added(stall), stall.names, stall.sent) == (0, [], [])


def test_what_is_added_later_follows_the_chord_too(stall: Stall) -> None:
    with member_of_a_chord(stall, via_outbox=True) as task:
        later = task.add_to_chord(stall.add.s(5, 5), lazy=True)
        with stall.transaction():
            later.delay()
    assert (stall.names, stall.sent) == (["add"], [])


def test_what_is_added_to_a_direct_chord_is_sent(stall: Stall) -> None:
    with member_of_a_chord(stall) as task, stall.transaction():
        task.add_to_chord(stall.add.s(5, 5))
    assert (added(stall), stall.names, stall.sent_names) == (1, [], ["add"])


def test_what_says_to_be_sent_is_sent(stall: Stall) -> None:
    with member_of_a_chord(stall, via_outbox=True) as task, stall.transaction():
        task.add_to_chord(stall.add.s(5, 5).set(via_outbox=False))
    assert (added(stall), stall.names, stall.sent_names) == (1, [], ["add"])


def test_what_says_to_be_stored_is_stored(stall: Stall) -> None:
    with member_of_a_chord(stall) as task, stall.transaction():
        task.add_to_chord(stall.charge.s(5, 5))
    assert (added(stall), stall.names, stall.sent) == (1, ["charge"], [])


def test_a_task_of_no_chord_is_refused_as_by_celery(stall: Stall) -> None:
    with running(stall.echo) as task, pytest.raises(ValueError, match="not member of any chord"):
        task.add_to_chord(stall.add.s(5, 5))


@pytest.mark.parametrize("options", [{}, {"via_outbox": True}], ids=str)
def test_a_backend_whose_chords_cannot_grow_refuses_as_by_celery(
    options: dict[str, Any], open_stall: OpenStall, tmp_path: Any
) -> None:
    backend = f"db+sqlite:///{tmp_path / 'results.db'}"
    stall = open_stall(config={"result_backend": backend, **memory_config()})
    request = {"chord": dict(stall.total.s()), "group": "g"}
    with stall.transaction(), running(stall.echo, **request) as task:
        added_ = stall.add.s(5, 5).set(**options)
        with pytest.raises(NotImplementedError, match="add_to_chord"):
            task.add_to_chord(added_)
    assert (stall.names, stall.sent) == ([], [])
