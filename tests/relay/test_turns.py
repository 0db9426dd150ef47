"""Whose turn it is, asked of the turns themselves: a turn that must wait gives way to another."""

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from freezegun import freeze_time
from freezegun.api import FrozenDateTimeFactory

from celery_outbox.relay.turns import PROBE, Turn, Turns
from celery_outbox.storage.database import Database
from tests.waiting import wait_until

SLEEP = timedelta(seconds=1)
LONG = timedelta(seconds=2)  # any rest of SLEEP is over by then


@pytest.fixture
def clock() -> Iterator[FrozenDateTimeFactory]:
    with freeze_time(datetime(2030, 1, 1, tzinfo=UTC)) as it:
        yield it


def make_turns(
    *brokers: str, databases: int = 1, is_open: bool = True, sleep: timedelta = SLEEP, **options: Any
) -> Turns:
    named = [
        Database(f"database {number}", sa.make_url(f"sqlite:///nobody-{number}.db"), "celery_outbox")
        for number in range(databases)
    ]
    turns = Turns(named, brokers, sleep=sleep, **options)
    if is_open:
        turns.open()
    return turns


def take(turns: Turns) -> Turn:
    turn = turns.take()
    assert turn is not None
    return turn


def serve(turns: Turns, *, has_progressed: bool = True) -> str:
    """Serve the next turn; the name of its broker."""
    turn = take(turns)
    turns.give_back(turn, has_progressed=has_progressed)
    return turn.broker


def test_the_one_that_was_served_longest_ago_is_next() -> None:
    turns = make_turns("a", "b", "c")
    assert [serve(turns) for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_what_made_no_progress_is_asked_again_after_the_sleep(clock: FrozenDateTimeFactory) -> None:
    turns = make_turns("a", "b")
    assert serve(turns, has_progressed=False) == "a"
    assert [serve(turns) for _ in range(3)] == ["b", "b", "b"]
    clock.tick(LONG)
    assert serve(turns) == "a"


def test_a_whole_look_that_is_owed_shortens_the_sleep(clock: FrozenDateTimeFactory) -> None:
    turns = make_turns("a", "b")
    turn = take(turns)
    turn.horizon.take(None, lambda: clock.tick(0.01))
    turn.horizon.claimed(datetime.now(UTC))
    turn.horizon.is_empty(turn.horizon.since, lambda: True)
    turns.give_back(turn, has_progressed=False)
    assert serve(turns) == "b"
    clock.tick(0.11)
    assert serve(turns) == "a"


def test_what_is_new_is_looked_at_at_once(clock: FrozenDateTimeFactory) -> None:
    turns = make_turns("a", "b")
    turn = take(turns)
    turns.give_back(turn, has_progressed=False)
    assert serve(turns) == "b"
    turns.wake(turn.database)
    assert serve(turns) == "a"


def test_what_comes_while_a_thread_looks_is_not_overlooked(clock: FrozenDateTimeFactory) -> None:
    turns = make_turns("a", "b")
    turn = take(turns)
    turns.wake(turn.database)
    turns.give_back(turn, has_progressed=False)
    assert [serve(turns, has_progressed=False) for _ in range(2)] == ["b", "a"]


def test_only_the_database_that_has_something_new_is_looked_at(clock: FrozenDateTimeFactory) -> None:
    turns = make_turns("a", databases=3)
    found = [take(turns) for _ in range(3)]
    for turn in found:
        turns.give_back(turn, has_progressed=False)
    turns.wake(found[1].database)
    assert [take(turns)] == found[1:2]


@pytest.mark.parametrize("what", ["broker", "database"])
def test_what_has_failed_rests_whatever_comes_in(what: str, clock: FrozenDateTimeFactory) -> None:
    turns = make_turns("bad", databases=2) if what == "database" else make_turns("bad", "good")
    failed = take(turns)
    name = failed.broker if what == "broker" else failed.database.name
    turns.rest(**{what: name})  # type: ignore[arg-type]
    turns.give_back(failed, has_progressed=False)
    for _ in range(3):
        turns.wake(failed.database)
        other = take(turns)
        assert other is not failed
        turns.give_back(other, has_progressed=True)
    clock.tick(LONG)
    assert take(turns) is failed


def test_a_failure_that_took_long_is_not_risked_again_before_as_long(
    clock: FrozenDateTimeFactory,
) -> None:
    turns = make_turns("bad", "good")
    turns.rest(broker="bad", took=20)
    clock.tick(14)
    assert (serve(turns), serve(turns)) == ("good", "good")
    assert turns.is_resting("bad")
    clock.tick(12)
    assert not turns.is_resting("bad")
    assert serve(turns) == "bad"


def test_a_broker_rests_in_all_databases_and_others_in_none(clock: FrozenDateTimeFactory) -> None:
    turns = make_turns("bad", "good", databases=3)
    turns.rest(broker="bad")
    assert turns.is_resting("bad")
    assert not turns.is_resting("good")
    assert [take(turns).broker for _ in range(3)] == ["good"] * 3


def test_the_brokers_of_a_database_that_failed_can_be_contacted_for_others() -> None:
    turns = make_turns("a", databases=2)
    turns.rest(database="database 0")
    assert not turns.is_resting("a")
    assert take(turns).database.name == "database 1"


def test_a_backlog_is_served_by_several_threads_and_nothing_else_is() -> None:
    turns = make_turns("deep", "flat")
    deep, flat = take(turns), take(turns)
    assert (deep.broker, flat.broker) == ("deep", "flat")
    turns.note_depth(deep, is_deep=True)
    assert [take(turns), take(turns)] == [deep, deep]
    turns.note_depth(deep, is_deep=False)
    turns.give_back(flat, has_progressed=True)
    assert take(turns) is flat


def test_a_backlog_is_no_reason_to_overlook_the_others() -> None:
    turns = make_turns("deep", "flat")
    deep = take(turns)
    turns.note_depth(deep, is_deep=True)
    assert [serve(turns) for _ in range(4)] == ["flat", "deep", "flat", "deep"]


def test_a_broker_that_has_failed_is_probed_by_one_thread_whatever_the_backlog() -> None:
    turns = make_turns("bad", "good", databases=2, sleep=timedelta())
    for each in turns.all:
        turns.note_depth(each, is_deep=True)
    turns.rest(broker="bad")
    first = take(turns)
    assert (first.broker, first.limit) == ("bad", PROBE)
    turns.note_depth(first, is_deep=True)  # as many as were asked for
    assert [take(turns).broker for _ in range(4)] == ["good"] * 4
    first.limit = None  # it has taken some
    turns.note_depth(first, is_deep=True)
    other = take(turns)
    assert other.broker == "bad"
    assert other is not first


def test_a_probe_that_ends_lets_the_next_one_begin() -> None:
    turns = make_turns("bad", databases=2, sleep=timedelta())
    turns.rest(broker="bad")
    first, found = take(turns), list[Turn | None]()
    waiting = threading.Thread(target=lambda: found.append(turns.take()))
    waiting.start()
    turns.give_back(first, has_progressed=True)
    waiting.join(timeout=10)
    assert len(found) == 1


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_database_that_has_failed_is_asked_by_one_thread_until_it_answers(
    is_empty: bool, clock: FrozenDateTimeFactory
) -> None:
    turns = make_turns("a", "b", databases=2)
    turns.rest(database="database 0")
    clock.tick(LONG)
    taken = [take(turns) for _ in range(3)]
    assert [each.database.name for each in taken] == ["database 0", "database 1", "database 1"]
    if is_empty:
        turns.give_back(taken[0], has_progressed=False)
        clock.tick(LONG)
        assert take(turns).database is taken[0].database
    else:
        turns.note_depth(taken[0], is_deep=False)
    assert take(turns).database is taken[0].database


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_one_thread_is_left_for_other_brokers_whatever_a_backlog_has(threads: int) -> None:
    turns = make_turns("deep", "flat", threads=threads)
    assert serve(turns) == "deep"
    flat = take(turns)
    deep = take(turns)
    turns.note_depth(deep, is_deep=True)
    for _ in range(threads - 2):
        assert take(turns) is deep
    turns.give_back(flat, has_progressed=True)
    assert take(turns) is flat


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_one_thread_is_left_for_other_databases_whatever_one_has(threads: int) -> None:
    turns = make_turns("a", databases=2, threads=threads)
    deep = take(turns)
    turns.note_depth(deep, is_deep=True)
    other = take(turns)
    assert other.database is not deep.database
    for _ in range(threads - 2):
        assert take(turns) is deep
    turns.give_back(other, has_progressed=True)
    assert take(turns) is other


def test_with_spare_threads_a_healthy_broker_is_served_in_every_database() -> None:
    # One at a time, and one more for each kind of thing that may hang.
    turns = make_turns("hung", "good", databases=2, threads=4)
    for each in turns.all:
        turns.note_depth(each, is_deep=True)
    served = [take(turns) for _ in range(4)]
    assert {turn.database.name for turn in served if turn.broker == "good"} == {
        "database 0",
        "database 1",
    }


def test_one_thread_alone_serves_all() -> None:
    turns = make_turns("a", "b", databases=2, threads=1)
    assert [serve(turns) for _ in range(4)] == ["a", "b", "a", "b"]


def test_no_thread_joins_one_whose_database_does_not_answer(clock: FrozenDateTimeFactory) -> None:
    turns = make_turns("a", "b", databases=2)
    hung = take(turns)
    with turns.asking(hung):
        clock.tick(3)
        others = [take(turns), take(turns)]
        assert hung.database not in [turn.database for turn in others]
    assert take(turns).database is hung.database


def test_nothing_is_handed_out_before_the_start_while_paused_and_after_the_end() -> None:
    turns = make_turns("a", is_open=False)
    assert turns.take() is None
    turns.open()
    turns.pause(is_paused=True)
    assert not turns.is_open
    found: list[Turn | None] = []
    threads = [threading.Thread(target=lambda: found.append(turns.take())) for _ in range(3)]
    for thread in threads:
        thread.start()
    turns.pause(is_paused=False)
    wait_until(lambda: found == turns.all)  # to one of them
    turns.close()
    for thread in threads:
        thread.join(timeout=10)
    assert found == [*turns.all, None, None]
    assert turns.take() is None


class Finite:
    """Turns that end when nothing is left, and what they have said of it."""

    def __init__(self, *brokers: str) -> None:
        self.said = 0
        self.turns = make_turns(*brokers, is_finite=True, done=self._say)

    def _say(self) -> None:
        self.said += 1


def test_it_is_done_when_everything_was_empty_since_the_last_progress() -> None:
    finite = Finite("a", "b")
    turns = finite.turns
    assert serve(turns, has_progressed=False) == "a"
    assert serve(turns, has_progressed=True) == "b"
    assert serve(turns, has_progressed=False) == "a"
    assert (turns.is_done, finite.said) == (False, 0)
    assert serve(turns, has_progressed=False) == "b"
    assert (turns.is_done, finite.said) == (True, 1)
    assert turns.take() is None


def test_it_is_not_done_while_a_thread_is_under_way() -> None:
    turns = Finite("a", "b").turns
    a, b = take(turns), take(turns)
    turns.give_back(a, has_progressed=False)
    assert not turns.is_done
    turns.give_back(b, has_progressed=True)
    assert not turns.is_done
    assert take(turns) is a


def test_what_failed_counts_as_empty_and_its_rest_is_not_waited_for(
    clock: FrozenDateTimeFactory,
) -> None:
    finite = Finite("bad", "good")
    turns = finite.turns
    failed = take(turns)
    turns.rest(broker="bad")
    turns.give_back(failed, has_progressed=True)  # some were taken before it broke
    assert serve(turns, has_progressed=False) == "good"
    assert finite.said == 1
    clock.tick(LONG)
    assert turns.is_done
    assert turns.take() is None


def test_what_is_put_back_for_a_pause_is_left_to_do() -> None:
    turns = Finite("a").turns
    turn = take(turns)
    turns.pause(is_paused=True)
    turns.give_back(turn, has_progressed=False)
    assert not turns.is_done
    turns.pause(is_paused=False)
    assert take(turns) is turn
    assert not turns.is_done


def test_a_pause_that_ends_before_a_batch_is_put_back_leaves_it_to_do() -> None:
    turns = Finite("a").turns
    turn = take(turns)
    turns.pause(is_paused=True)
    turns.pause(is_paused=False)
    turns.give_back(turn, has_progressed=False)
    assert not turns.is_done
    assert take(turns) is turn


def test_nothing_to_serve_is_done_at_once() -> None:
    assert Finite().turns.is_done
    assert not make_turns().is_done
