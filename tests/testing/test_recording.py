"""What a recorder says of tasks, whatever becomes of the transactions that they were dispatched in."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from celery import group
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from celery_outbox.errors import SchemaError
from celery_outbox.testing import OutboxRecorder
from tests.testing.conftest import OpenShop, Order, Shop, first_arguments


@pytest.fixture
def bare_shop(sqlite_url: str, open_shop: OpenShop) -> Shop:
    """A shop whose outbox was never installed."""
    return open_shop(sqlite_url, installs=False)


def test_a_task_is_pending_until_its_session_commits(
    shop: Shop, outbox: OutboxRecorder, session: Session
) -> None:
    shop.send(1)
    assert not outbox.pending  # stored alone: no transaction had begun
    session.begin()
    shop.send(2)
    assert first_arguments(outbox.pending) == [2]
    assert first_arguments(outbox.stored) == [1]
    session.commit()
    assert first_arguments(outbox.stored) == [1, 2]
    assert not outbox.pending
    assert shop.rows() == 2


@pytest.mark.parametrize("end", [Session.rollback, Session.close, Session.invalidate])
def test_a_task_whose_session_ends_otherwise_is_rolled_back(
    shop: Shop, outbox: OutboxRecorder, session: Session, end: Callable[[Session], None]
) -> None:
    session.add(Order(id=1))
    session.flush()
    shop.send(1)
    end(session)
    assert first_arguments(outbox.rolled_back) == [1]
    assert not outbox.stored
    assert not outbox.pending


def test_a_task_whose_session_is_forgotten_is_rolled_back(shop: Shop, outbox: OutboxRecorder) -> None:
    session = Session(shop.engine)
    session.begin()
    shop.send(1)
    del session
    gc.collect()
    assert first_arguments(outbox.rolled_back) == [1]


def test_a_savepoint_rolls_back_the_tasks_dispatched_since(
    shop: Shop, outbox: OutboxRecorder, session: Session
) -> None:
    with session.begin():
        shop.send(1)
        savepoint = session.begin_nested()
        shop.send(2)
        savepoint.rollback()
        with session.begin_nested():
            shop.send(3)
    assert first_arguments(outbox.stored) == [1, 3]
    assert first_arguments(outbox.rolled_back) == [2]
    assert shop.rows() == 2


def test_a_commit_whose_flush_fails_stores_nothing(
    shop: Shop, outbox: OutboxRecorder, session: Session
) -> None:
    session.add(Order(id=1))
    session.commit()
    session.expunge_all()
    session.add(Order(id=1))
    shop.send(1)
    with pytest.raises(IntegrityError):
        session.commit()
    session.rollback()
    assert first_arguments(outbox.rolled_back) == [1]
    outbox.assert_nothing_stored()


def test_what_cannot_be_written_at_the_call_is_not_recorded(bare_shop: Shop) -> None:
    with OutboxRecorder(bare_shop.app) as recorder, pytest.raises(SchemaError):
        bare_shop.send(1)
    recorder.assert_nothing_stored()
    assert not recorder.rolled_back


def test_a_commit_whose_insert_fails_stores_nothing(bare_shop: Shop) -> None:
    with OutboxRecorder(bare_shop.app) as recorder:
        with pytest.raises(SchemaError), Session(bare_shop.engine) as session, session.begin():
            bare_shop.send(1)
        assert first_arguments(recorder.rolled_back) == [1]
        recorder.assert_nothing_stored()


@pytest.mark.parametrize("begin", [Session.begin, sa.Connection.begin], ids=["session", "connection"])
def test_a_commit_that_the_database_refuses_stores_nothing(
    postgresql_url: str, open_shop: OpenShop, begin: Callable[[Any], Any]
) -> None:
    shop = open_shop(postgresql_url)
    with shop.engine.begin() as connection:
        connection.execute(
            sa.text("ALTER TABLE orders ADD other int REFERENCES orders INITIALLY DEFERRED")
        )
    owner = Session(shop.engine) if begin is Session.begin else shop.engine.connect()
    with OutboxRecorder(shop.app) as recorder, owner:
        with pytest.raises(IntegrityError), begin(owner):
            shop.send(1)
            owner.execute(sa.text("INSERT INTO orders (id, other) VALUES (1, 2)"))
        assert shop.rows() == 0
        assert first_arguments(recorder.rolled_back) == [1]


def test_a_connection_stores_at_the_call_until_it_rolls_back(
    shop: Shop, outbox: OutboxRecorder
) -> None:
    with shop.engine.connect() as connection:
        with connection.begin():
            shop.send(1)
            assert first_arguments(outbox.stored) == [1]
        connection.begin()
        shop.send(2)
    assert first_arguments(outbox.stored) == [1]
    assert first_arguments(outbox.rolled_back) == [2]
    assert shop.rows() == 1


def test_a_savepoint_of_a_connection_rolls_back_the_tasks_dispatched_since(
    shop: Shop, outbox: OutboxRecorder
) -> None:
    with shop.engine.begin() as connection:
        shop.send(1)
        savepoint = connection.begin_nested()
        shop.send(2)
        savepoint.rollback()
        with connection.begin_nested():
            shop.send(3)
    assert shop.rows() == 2
    assert first_arguments(outbox.stored) == [1, 3]
    assert first_arguments(outbox.rolled_back) == [2]


def test_the_members_of_a_group_and_of_bulk_are_recorded_each(
    shop: Shop, outbox: OutboxRecorder, session: Session
) -> None:
    with session.begin():
        group(shop.receipt.s(number) for number in range(3)).apply_async(via_outbox=True)
        shop.outbox.bulk([shop.receipt.s(3), shop.receipt.s(4)])
    assert first_arguments(outbox.stored) == [0, 1, 2, 3, 4]


def test_a_direct_dispatch_is_not_recorded(outbox: OutboxRecorder, shop: Shop) -> None:
    shop.app.conf.broker_url = "memory://"
    shop.receipt.delay(1)
    shop.receipt.apply((2,))
    outbox.assert_nothing_stored()
    shop.app.close()


def test_a_task_tells_what_its_message_holds(shop: Shop, outbox: OutboxRecorder) -> None:
    task_id = shop.send(
        1, kwargs={"to": "me"}, queue="mail", countdown=60, headers={"tenant": 7}, priority=3
    )
    [task] = outbox.stored
    assert (task.id, task.name, task.args, task.kwargs) == (task_id, "shop.receipt", [1], {"to": "me"})
    assert (task.queue, task.countdown, task.eta) == ("mail", 60, None)
    assert (task.headers["tenant"], task.properties["priority"]) == (7, 3)
    assert (task.database, task.broker) == ("default", shop.app.main)


def test_nothing_is_recorded_before_and_after_the_recorder(shop: Shop) -> None:
    shop.send(1)
    with OutboxRecorder(shop.outbox) as recorder:
        shop.send(2)
    shop.send(3)
    assert first_arguments(recorder.stored) == [2]
    assert shop.rows() == 3


def test_the_event_of_a_task_is_stored_but_not_listed(shop: Shop, outbox: OutboxRecorder) -> None:
    shop.app.conf.task_send_sent_event = True
    shop.send(1)
    assert first_arguments(outbox.stored) == [1]
    assert shop.rows() == 2
