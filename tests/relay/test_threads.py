"""A relay's threads: what they share, what they leave to each other, and how they end."""

import threading
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from celery_outbox.errors import ConfigurationError
from celery_outbox.message import ClaimedMessage
from celery_outbox.publishing import Outcome
from celery_outbox.signals import outbox_published
from celery_outbox.storage.database import Database
from tests.relay.apps import rows_of
from tests.relay.conftest import MakeDatabase
from tests.relay.fakes import Broker, Gate, Messages, Running, accept, lost, relay_of, running
from tests.storage.rows import add, make_message
from tests.waiting import wait_until


def fill(database: Database, count: int, broker: str = "a", **values: Any) -> list[str]:
    """Store messages; their task ids."""
    ids = [f"{broker} {number}" for number in range(count)]
    add(database, *(make_message(each, broker=broker, **values) for each in ids))
    return ids


def assert_put_back(database: Database, count: int) -> None:
    found = [(row.attempts, row.claim_token, row.error) for row in rows_of(database)]
    assert found == [(0, None, None)] * count


def test_one_at_a_time_messages_leave_in_the_order_in_which_they_were_claimed(
    database: Database,
) -> None:
    broker, sent = Broker(), fill(database, 300)
    relay_of([database], {"a": broker}, batch=7, stop_when_empty=True).run()
    assert broker.taken == sent
    assert (broker.most, len(broker.publishers)) == (1, 1)
    assert rows_of(database) == []


def test_each_of_several_threads_has_a_connection_of_its_own(database: Database) -> None:
    broker, sent, together = Broker(), fill(database, 400), threading.Barrier(4)

    def answer(messages: Messages) -> Outcome:
        if len(broker.batches) <= 4:
            together.wait(timeout=30)  # all four are under way at once
        return accept(messages)

    broker.answer = answer
    relay_of([database], {"a": broker}, batch=10, concurrency=4, stop_when_empty=True).run()
    assert sorted(broker.taken) == sorted(sent)
    assert (broker.most, len(broker.publishers)) == (4, 4)
    assert not any(each.was_shared for each in broker.publishers)
    assert not any(each.is_connected for each in broker.publishers)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_one_batch_more_than_are_published_is_claimed_ahead(
    concurrency: int, database: Database
) -> None:
    broker, gate = Broker(), Gate()
    broker.answer = gate.accept
    fill(database, 100)
    with running([database], {"a": broker}, batch=10, concurrency=concurrency):
        ahead = 10 * (concurrency + 1)
        wait_until(lambda: gate.waiting == concurrency)
        wait_until(lambda: sum(bool(row.claim_token) for row in rows_of(database)) == ahead)
        assert len(broker.batches) == concurrency
        gate.open()
        wait_until(lambda: not rows_of(database))


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_relay_that_stops_when_empty_leaves_nothing_that_is_ready(
    concurrency: int, make_database: MakeDatabase
) -> None:
    databases, brokers = [make_database() for _ in range(3)], {"a": Broker(), "b": Broker()}
    for number, database in enumerate(databases):
        fill(database, 10 * number, "a")
        fill(database, 25, "b")
    relay_of(databases, brokers, batch=5, concurrency=concurrency, stop_when_empty=True).run()
    assert [rows_of(database) for database in databases] == [[], [], []]
    assert (len(brokers["a"].taken), len(brokers["b"].taken)) == (30, 75)


def test_a_relay_that_stops_when_empty_does_not_wait_for_what_failed(
    make_database: MakeDatabase, tmp_path: Path
) -> None:
    database, bad, good = make_database(), Broker(), Broker()
    bad.reach = refuse
    broken = Database("broken", sa.make_url(f"sqlite:///{tmp_path}/no/folder.db"), "celery_outbox")
    fill(database, 20, "bad")
    fill(database, 50, "good")
    sleep = timedelta(hours=1)
    brokers = {"bad": bad, "good": good}
    relay_of([broken, database], brokers, batch=10, sleep=sleep, stop_when_empty=True).run()
    assert len(good.taken) == 50
    assert_put_back(database, 20)


def refuse() -> None:
    raise ConnectionRefusedError("nobody listens")


def test_a_backlog_does_not_hold_up_another_broker_nor_another_database(
    database: Database, make_database: MakeDatabase
) -> None:
    databases, deep, flat = [database, make_database()], Broker(), Broker()
    fill(databases[0], 150, "deep")

    def answer(messages: Messages) -> Outcome:
        if len(deep.batches) == 1:
            fill(databases[0], 1, "flat")
            fill(databases[1], 1, "flat")
        return accept(messages)

    deep.answer = answer
    sleep = timedelta(seconds=0.01)
    with running(databases, {"deep": deep, "flat": flat}, batch=1, sleep=sleep):
        wait_until(lambda: len(flat.taken) == 2)
        assert len(deep.taken) < 150
        wait_until(lambda: len(deep.taken) == 150)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_broker_that_refuses_connections_is_asked_once_per_sleep(
    concurrency: int, make_database: MakeDatabase
) -> None:
    databases, broker, sleep = [make_database() for _ in range(3)], Broker(), 0.2
    broker.reach = refuse
    for database in databases:
        fill(database, 5)
    with running(
        databases, {"a": broker}, concurrency=concurrency, sleep=timedelta(seconds=sleep)
    ) as it:

        def has_tried() -> bool:
            for database in databases:
                it.relay.wake(database)  # as the commits of others do
            return len(broker.connects) >= concurrency + 6

        wait_until(has_tried)
        for database in databases:
            assert_put_back(database, 5)
    # At the very start nothing is known of it.
    later = broker.connects[concurrency:]
    assert min(b - a for a, b in pairwise(later)) > 0.7 * sleep


def test_a_broker_that_breaks_every_connection_gets_one_small_batch_at_a_time(
    database: Database,
) -> None:
    broker = Broker()
    broker.answer = lost
    fill(database, 200)
    with running([database], {"a": broker}, batch=50, concurrency=4) as it:
        wait_until(lambda: len(broker.batches) >= 10)
        it.relay.stop()
        it.wait()
    assert {len(batch) for batch in broker.batches[5:]} == {10}
    assert_put_back(database, 200)
    broker.answer = accept
    relay_of([database], {"a": broker}, batch=50, stop_when_empty=True).run()
    assert rows_of(database) == []


def test_what_was_claimed_ahead_is_put_back_when_the_relay_stops(database: Database) -> None:
    broker, gate = Broker(), Gate()
    broker.answer = gate.accept
    fill(database, 50)
    with running([database], {"a": broker}, batch=10) as it:
        wait_until(lambda: sum(bool(row.claim_token) for row in rows_of(database)) == 20)
        it.relay.stop()
        gate.open()
        it.wait()
    assert len(broker.taken) < 50
    assert_put_back(database, 50 - len(broker.taken))


def pause(it: Running, idle: Broker) -> None:
    """Pause a relay, until it has noticed: it then looks after the connections that are idle."""
    looks: list[None] = []
    idle.keep_alive = lambda: looks.append(None)

    def has_noticed() -> bool:
        it.relay.pause()
        return len(looks) >= 2  # the first one may have begun before

    wait_until(has_noticed)


def test_what_was_claimed_ahead_is_put_back_in_a_pause_and_leaves_after_it(
    database: Database,
) -> None:
    broker, gate, other = Broker(), Gate(), Broker()
    broker.answer = gate.accept
    sent, brokers = list[str](), {"other": other, "a": broker}

    def answer(messages: Messages) -> Outcome:
        sent.extend(fill(database, 50))
        return accept(messages)

    other.answer = answer
    fill(database, 1, "other")
    with running([database], brokers, batch=10) as it:
        wait_until(lambda: sum(row.broker == "a" for row in rows_of(database)) == 50)
        wait_until(lambda: sum(bool(row.claim_token) for row in rows_of(database)) == 20)
        wait_until(lambda: len(rows_of(database)) == 50)
        pause(it, other)
        gate.open()
        wait_until(lambda: len(rows_of(database)) == 40)
        wait_until(lambda: not any(row.claim_token for row in rows_of(database)))
        assert_put_back(database, 40)
        assert it.is_alive
        it.relay.resume()
        wait_until(lambda: not rows_of(database))
    assert sorted(broker.taken) == sorted(sent)


def test_a_relay_that_is_told_twice_leaves_a_hung_broker_and_its_connection_ends_later(
    database: Database,
) -> None:
    broker, gate = Broker(), Gate()
    broker.answer = gate.accept
    fill(database, 10)
    with running([database], {"a": broker}) as it:
        wait_until(lambda: gate.waiting == 1)
        it.relay.stop()
        assert it.is_alive
        it.relay.stop()
        it.wait(timeout=5)
        assert it.relay.is_abandoned
        (publisher,) = broker.publishers
        assert publisher.is_connected
        gate.open()
        wait_until(lambda: not publisher.is_connected)
        wait_until(lambda: not rows_of(database))  # it was settled all the same


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_wish_to_stop_in_any_thread_ends_the_relay_with_it(
    error: type[BaseException], concurrency: int, database: Database
) -> None:
    broker = Broker()

    def answer(messages: Messages) -> Outcome:
        raise error

    broker.answer = answer
    fill(database, 5)
    with pytest.raises(error):
        relay_of([database], {"a": broker}, concurrency=concurrency).run()
    assert len(rows_of(database)) == 5


def test_a_listener_that_raises_changes_nothing(database: Database) -> None:
    broker, heard = Broker(), list[int]()
    sent = fill(database, 30)

    def hear(sender: object, messages: Messages, **_: Any) -> None:
        heard.append(len(messages))
        raise RuntimeError("out of order")

    outbox_published.connect(hear)
    try:
        relay_of([database], {"a": broker}, batch=10, stop_when_empty=True).run()
    finally:
        outbox_published.disconnect(hear)
    assert (broker.taken, sum(heard)) == (sent, 30)
    assert rows_of(database) == []


def test_a_publisher_that_raises_while_it_is_idle_is_let_go_of_and_used_again(
    database: Database,
) -> None:
    broker = Broker()
    fill(database, 1)

    def raise_(*_: Any) -> None:
        raise RuntimeError("out of order")

    with running([database], {"a": broker}):
        wait_until(lambda: len(broker.taken) == 1)
        broker.keep_alive = raise_
        wait_until(lambda: not broker.publishers[0].is_connected)
        broker.keep_alive = lambda: None
        add(database, make_message("later", broker="a"))
        wait_until(lambda: "later" in broker.taken)
    assert (len(broker.connects), len(broker.publishers)) == (2, 1)


def test_what_was_not_sent_is_not_overtaken_by_what_was_claimed_meanwhile(
    database: Database,
) -> None:
    """Of one line: the next batch was in hand when the first one came back."""
    broker, gate, accepted = Broker(), Gate(), list[str]()
    broker.line = lambda message: message.queue
    sent = fill(database, 20)

    def answer(messages: Messages) -> Outcome:
        if len(broker.batches) == 1:
            gate.pass_()
            return Outcome(unsent={each.id for each in messages})
        accepted.extend(each.task_id for each in messages)
        return accept(messages)

    broker.answer = answer
    with running([database], {"a": broker}, batch=5):
        wait_until(lambda: sum(bool(row.claim_token) for row in rows_of(database)) == 10)
        gate.open()
        wait_until(lambda: not rows_of(database))
    assert accepted == sent


def test_batches_that_are_published_at_once_have_no_line_in_common(database: Database) -> None:
    broker, lock, under_way = Broker(), threading.Lock(), set[str]()
    clashes = list[str]()
    add(
        database,
        *(make_message(f"{n}", broker="a", queue=f"line {n % 7}") for n in range(140)),
    )

    def line(message: ClaimedMessage) -> str:
        return message.queue

    def answer(messages: Messages) -> Outcome:
        mine = {each.queue for each in messages}
        with lock:
            clashes.extend(under_way & mine)
            under_way.update(mine)
        rows_of(database)  # takes a while
        refused = {each.id: "no" for each in messages if each.attempts == 1 and each.id % 50 == 0}
        with lock:
            under_way.difference_update(mine)
        stuck = {each.queue for each in messages if each.id in refused}
        unsent = {each.id for each in messages if each.queue in stuck and each.id not in refused}
        done = {each.id for each in messages} - refused.keys() - unsent
        return Outcome(accepted=done, errors=refused, unsent=unsent)

    broker.line, broker.answer = line, answer
    with running([database], {"a": broker}, batch=3, concurrency=4):
        wait_until(lambda: not rows_of(database), timeout=30)
    assert clashes == []


@pytest.mark.parametrize("stop_when_empty", [False, True])
def test_a_pool_of_one_connection_is_enough_for_one_at_a_time(
    *, stop_when_empty: bool, make_database: MakeDatabase, postgresql_url: str
) -> None:
    database = make_database(postgresql_url, pool_size=1, max_overflow=0)
    broker, sent = Broker(), fill(database, 100)
    with running([database], {"a": broker}, batch=10, stop_when_empty=stop_when_empty):
        wait_until(lambda: not rows_of(database))
    assert broker.taken == sent


def test_a_pool_smaller_than_the_concurrency_is_refused(
    make_database: MakeDatabase, postgresql_url: str
) -> None:
    small = make_database(postgresql_url, pool_size=2, max_overflow=1)
    with pytest.raises(ConfigurationError, match="found a pool of 3"):
        relay_of([small], {"a": Broker()}, concurrency=4)
    relay_of([small], {"a": Broker()}, concurrency=3)


def test_a_database_in_memory_is_served_by_one_thread(make_database: MakeDatabase) -> None:
    database = make_database(
        "sqlite://", poolclass=sa.StaticPool, connect_args={"check_same_thread": False}
    )
    broker, sent = Broker(), fill(database, 100)
    relay_of([database], {"a": broker}, batch=10, stop_when_empty=True).run()
    assert broker.taken == sent
    with pytest.raises(ConfigurationError, match="several threads"):
        relay_of([database], {"a": broker}, concurrency=2)
