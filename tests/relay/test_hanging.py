"""What a relay's threads must bear: what hangs, what refuses, what raises."""

import threading
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import sqlalchemy as sa

from celery_outbox import Publisher
from celery_outbox.policy import RetryPolicy
from celery_outbox.publishing import Outcome
from celery_outbox.storage.database import Database
from tests.processes import HOST
from tests.relay.apps import rows_of
from tests.relay.conftest import MakeDatabase
from tests.relay.fakes import Broker, Gate, Messages, accept, lost, relay_of, running
from tests.relay.test_threads import fill, pause, refuse
from tests.storage.rows import add, change, hours_from_now, make_message
from tests.waiting import wait_until


def claimed(database: Database) -> int:
    return sum(bool(row.claim_token) for row in rows_of(database))


def on_statement(database: Database, word: str, do: Any) -> None:
    """Call ``do`` before each statement with a word that writes to the table."""
    with database.begin() as connection:
        engine = connection.engine

    @sa.event.listens_for(engine, "before_cursor_execute")
    def look(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if f"{word} celery_outbox " in statement.replace('"', ""):
            do()


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("where", ["publish", "connect"])
def test_a_broker_that_hangs_leaves_a_thread_for_the_others_in_every_database(
    where: str, concurrency: int, make_database: MakeDatabase
) -> None:
    databases, hung, good, gate = [make_database() for _ in range(2)], Broker(), Broker(), Gate()
    for each in databases:
        fill(each, 60, "hung")
    if where == "publish":
        hung.answer = gate.accept
    else:
        hung.reach = gate.pass_
    with running(databases, {"hung": hung, "good": good}, batch=2, concurrency=concurrency):
        try:
            wait_until(lambda: gate.waiting >= 1)
            for each in databases:
                fill(each, 10, "good")
            wait_until(lambda: len(good.taken) == 20)
        finally:
            gate.open()


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_database_that_hangs_leaves_a_thread_for_the_others(
    concurrency: int, make_database: MakeDatabase, postgresql_url: str, tcp_proxy: Any
) -> None:
    url = sa.make_url(postgresql_url)
    proxy = tcp_proxy(HOST, url.port or 0)
    hung = make_database(url.set(port=proxy.port).render_as_string(hide_password=False))
    good, brokers = make_database(), {"a": Broker(), "b": Broker(), "c": Broker()}
    for name in brokers:
        fill(hung, 1, name)
    with running([hung, good], brokers, concurrency=concurrency):
        wait_until(lambda: not rows_of(hung))
        proxy.stall()
        try:
            for _ in range(3):
                for name in brokers:
                    fill(good, 3, name)
                wait_until(lambda: not rows_of(good), timeout=5)
        finally:
            proxy.resume()


def test_a_closed_port_is_knocked_at_once_per_sleep_from_the_start(
    make_database: MakeDatabase,
) -> None:
    databases, broker, sleep = [make_database() for _ in range(3)], Broker(), 0.2
    broker.reach = refuse
    for each in databases:
        fill(each, 5)
    with running(databases, {"a": broker}, sleep=timedelta(seconds=sleep)):
        wait_until(lambda: len(broker.connects) >= 5)
    assert min(b - a for a, b in pairwise(broker.connects)) > 0.7 * sleep


def test_the_batch_in_hand_does_not_knock_at_a_broker_that_has_just_failed(database: Database) -> None:
    broker, gate = Broker(), Gate()

    def answer(messages: Messages) -> Outcome:
        gate.pass_()
        broker.reach = refuse
        return lost(messages)

    broker.answer = answer
    fill(database, 100)
    with running([database], {"a": broker}, batch=10, sleep=timedelta(hours=1)):
        wait_until(lambda: claimed(database) == 20)
        gate.open()
        wait_until(lambda: not claimed(database))
        assert len(broker.connects) == 1


def test_a_relay_that_was_stopped_before_it_ran_claims_nothing(database: Database) -> None:
    broker, claims = Broker(), list[int]()
    fill(database, 10)
    on_statement(database, "UPDATE", lambda: claims.append(1))
    for _ in range(20):
        relay = relay_of([database], {"a": broker}, batch=1)
        relay.stop()
        relay.run()
    assert (broker.taken, claims) == ([], [])


@pytest.mark.parametrize("where", ["line", "maker", "second maker", "claim", "settle"])
def test_an_error_that_nobody_expects_does_not_end_the_relay(where: str, database: Database) -> None:
    broker, failures, gate = Broker(), [2], Gate()
    sent = fill(database, 30)

    def fail(*_: Any) -> None:
        if failures[0]:
            failures[0] -= 1
            raise RuntimeError("out of order")

    def maker() -> Publisher:
        if where == "maker" or (where == "second maker" and broker.publishers):
            fail()
        return broker()

    if where == "line":
        broker.line = fail
    elif where == "second maker":
        broker.answer = lambda messages: gate.accept(messages) if failures[0] else accept(messages)
    elif where in {"claim", "settle"}:
        on_statement(database, "UPDATE" if where == "claim" else "DELETE FROM", fail)
    options: dict[str, Any] = {
        "retry": RetryPolicy(base_delay=timedelta(seconds=0.05), max_delay=timedelta(seconds=0.1)),
        "lease": timedelta(seconds=1),
    }
    with running([database], {"a": maker}, batch=10, concurrency=2, **options) as it:
        if where == "second maker":
            wait_until(lambda: not failures[0] or not it.is_alive)
            gate.open()
        wait_until(lambda: not rows_of(database) or not it.is_alive, timeout=15)
        assert it.is_alive
    assert failures == [0]
    assert set(broker.taken) == set(sent)


@pytest.mark.parametrize("stop_when_empty", [False, True])
def test_what_is_put_back_in_a_pause_leaves_in_its_order(
    *, stop_when_empty: bool, database: Database
) -> None:
    broker, gate, other = Broker(), Gate(), Broker()
    broker.answer = gate.accept
    sent = list[str]()

    def answer(messages: Messages) -> Outcome:
        sent.extend(fill(database, 50))
        return accept(messages)

    other.answer = answer
    fill(database, 1, "other")
    brokers = {"other": other, "a": broker}
    with running([database], brokers, batch=10, stop_when_empty=stop_when_empty) as it:
        wait_until(lambda: claimed(database) == 20 and len(rows_of(database)) == 50)
        pause(it, other)
        gate.open()
        wait_until(lambda: len(rows_of(database)) == 40 and not claimed(database))
        it.relay.resume()
        wait_until(lambda: not rows_of(database))
    assert broker.taken == sent


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("count", [1, 25, 60])
def test_as_many_messages_are_taken_as_were_asked_for(
    concurrency: int, count: int, database: Database
) -> None:
    broker = Broker()
    fill(database, 100)
    relay_of([database], {"a": broker}, batch=10, concurrency=concurrency, max_jobs=count).run()
    assert len(broker.taken) == count


def test_two_brokers_of_one_database_begin_together(database: Database) -> None:
    brokers = {"a": Broker(), "b": Broker()}
    for _ in range(10):
        for name in brokers:
            fill(database, 3, name)
        relay_of([database], brokers, concurrency=2, stop_when_empty=True).run()
        assert rows_of(database) == []


def test_a_slow_claim_of_all_that_may_be_taken_is_not_the_end(make_database: MakeDatabase) -> None:
    databases, broker, gate = [make_database(), make_database()], Broker(), Gate()
    for each in databases:
        fill(each, 20)

    def wait() -> None:
        if not gate.waiting:
            threading.Timer(1.5, gate.open).start()
            gate.pass_()

    on_statement(databases[0], "UPDATE", wait)
    relay_of(databases, {"a": broker}, batch=30, max_jobs=30).run()
    assert len(broker.taken) == 30


def test_what_is_deferred_holds_up_nobody_of_its_line(database: Database) -> None:
    broker, accepted = Broker(), list[str]()
    broker.line = lambda message: message.queue

    def answer(messages: Messages) -> Outcome:
        deferred = {each.id for each in messages if each.due_in is not None}
        accepted.extend(each.task_id for each in messages if each.id not in deferred)
        return Outcome(accepted={each.id for each in messages} - deferred, deferred=deferred)

    broker.answer = answer
    add(database, make_message("delayed", broker="a", countdown=0.0))
    change(database, "delayed", deliver_at=hours_from_now(1), scheduled_at=hours_from_now(-1))
    fill(database, 5)
    relay_of([database], {"a": broker}, batch=2, stop_when_empty=True).run()
    assert len(accepted) == 5


def test_what_was_published_is_settled_when_the_next_claim_fails(database: Database) -> None:
    broker = Broker()
    fill(database, 30)

    def fail() -> None:
        if broker.batches:
            raise sa.exc.OperationalError("claim", {}, Exception("out of order"))

    on_statement(database, "UPDATE", fail)
    relay_of([database], {"a": broker}, batch=10, stop_when_empty=True).run()
    assert broker.taken
    assert len(rows_of(database)) == 30 - len(broker.taken)
