"""With task_always_eager: what would be stored is recorded, and runs after the commit."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import chain, chord, group
from kombu.exceptions import EncodeError
from sqlalchemy.orm import Session

from celery_outbox.errors import ConfigurationError
from celery_outbox.testing import OutboxRecorder, RecordedTask
from tests.testing.conftest import OpenShop, Shop, first_arguments


@pytest.fixture
def shop(sqlite_url: str, open_shop: OpenShop) -> Shop:
    shop = open_shop(sqlite_url)
    shop.app.conf.task_always_eager = True
    return shop


def test_a_task_is_pending_until_its_session_commits_and_stored_when_it_has_run(
    shop: Shop, outbox: OutboxRecorder, session: Session
) -> None:
    with session.begin():
        shop.send(1)
        before = first_arguments(outbox.pending), first_arguments(outbox.stored), list(shop.ran)
    outbox.assert_stored(shop.receipt, (1,), count=1)
    assert (before, shop.ran, outbox.pending, shop.rows()) == (([1], [], []), [1], [], 0)


def test_a_task_of_a_rolled_back_transaction_or_savepoint_is_rolled_back(
    shop: Shop, outbox: OutboxRecorder, session: Session
) -> None:
    with session.begin():
        shop.send(1)
        session.rollback()
    with session.begin():
        with pytest.raises(LookupError), session.begin_nested():
            shop.send(2)
            raise LookupError
        shop.send(3)
    assert (first_arguments(outbox.rolled_back), first_arguments(outbox.stored)) == ([1, 2], [3])
    assert shop.ran == [3]


def test_a_task_without_a_transaction_is_stored_at_once(shop: Shop, outbox: OutboxRecorder) -> None:
    shop.send(1)
    outbox.assert_stored(shop.receipt, [1])
    assert shop.ran == [1]


def test_what_a_task_stores_is_recorded_after_it(shop: Shop, outbox: OutboxRecorder) -> None:
    @shop.task()
    def place_order() -> None:
        shop.send(1)

    place_order.apply_async(via_outbox=True)
    assert [task.name for task in outbox.stored] == ["shop.place_order", "shop.receipt"]


def test_direct_and_refused_dispatches_are_not_recorded(shop: Shop, outbox: OutboxRecorder) -> None:
    shop.receipt.delay(1)
    with pytest.raises(EncodeError):
        shop.send(object())
    outbox.assert_nothing_stored()


AT = datetime.now(UTC) + timedelta(days=1)

OPTIONS: list[dict[str, Any]] = [
    {},
    {"kwargs": {"to": ("me",)}},
    {"queue": "mail", "priority": 3},
    {"countdown": 60},
    {"countdown": 0},
    {"eta": AT},
    {"eta": AT.replace(tzinfo=None)},
    {"eta": AT.isoformat(), "countdown": 0},
    {"headers": {"tenant": {"id": 7}}},
    {"MessageGroupId": "tenant-7", "reply_to": "answers"},
    {"serializer": "pickle", "compression": "zlib"},
    {"group_id": "g", "group_index": 1, "retries": 2},
    {"stamped_headers": ["order"], "order": ["7"]},
    {"outbox_broker": "other"},
]


def told(task: RecordedTask) -> dict[str, Any]:
    """All that is recorded, but for what no message has in eager mode, or a clock decides."""
    told = {name: getattr(task, name) for name in RecordedTask.__slots__ if name != "message"}
    apart = dict.fromkeys(["eta", "argsrepr", "kwargsrepr", "compression"])
    for name in ("headers", "about"):
        told[name] = {**told[name], **apart}
    told["properties"] = {"delivery_mode": 2, "priority": 0, **task.properties}
    return told


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_task_is_recorded_as_it_would_be_stored(
    options: dict[str, Any], sqlite_url: str, open_shop: OpenShop
) -> None:
    shop = open_shop(sqlite_url, outbox_brokers={"other": "memory://"})
    with OutboxRecorder(shop.app) as recorder:
        for is_eager in (True, False):
            shop.app.conf.task_always_eager = is_eager
            link = shop.receipt.s(5).set(task_id="linked")
            shop.send((1, 2), task_id="order-77", link=link, link_error=[link], **options)
    eager, stored = recorder.stored
    assert told(eager) == told(stored)
    assert eager.message is None


def test_members_of_a_group_and_of_bulk_are_recorded_each(
    shop: Shop, outbox: OutboxRecorder, session: Session
) -> None:
    with session.begin():
        group(shop.receipt.s(number) for number in range(3)).apply_async(via_outbox=True)
        shop.outbox.bulk([shop.receipt.s(3), shop.receipt.s(4).set(via_outbox=False)])
    assert first_arguments(outbox.stored) == [0, 1, 2, 3]
    assert sorted(shop.ran) == [0, 1, 2, 3, 4]


CANVASES: dict[str, tuple[Callable[[Any], Any], list[Any], list[Any]]] = {
    "chain": (lambda task: chain(task.s(1), task.si(2)), [1], [1, 2]),
    "chord": (
        lambda task: chord([task.s(1), task.s(2).set(via_outbox=False)], task.si(3)),
        [1],
        [1, 2, 3],
    ),
    "group of a chain": (
        lambda task: group([chain(task.s(1), task.si(2)), task.s(3)]),
        [1, 3],
        [1, 2, 3],
    ),
}


@pytest.mark.parametrize("name", CANVASES)
def test_a_canvas_is_recorded_by_what_it_sends(
    name: str, shop: Shop, outbox: OutboxRecorder, session: Session
) -> None:
    make, recorded, ran = CANVASES[name]
    with session.begin():
        make(shop.receipt).apply_async(via_outbox=True)
        session.rollback()
    with session.begin():
        make(shop.receipt).apply_async(via_outbox=True)
        pending = first_arguments(outbox.pending)
    assert (pending, first_arguments(outbox.stored)) == (recorded, recorded)
    assert (first_arguments(outbox.rolled_back), shop.ran) == (recorded, ran)


def test_in_a_wrapped_test_what_the_application_commits_is_stored_and_drained_once(
    shop: Shop, outbox: OutboxRecorder
) -> None:
    with shop.engine.connect() as connection:
        transaction = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            session.begin()
            shop.send(1)
            session.commit()
            session.begin()
            shop.send(2)
            session.rollback()
        assert (first_arguments(outbox.stored), shop.ran) == ([1], [])
        assert [result.get() for result in outbox.drain()] == [1]
        assert outbox.drain() == []
        transaction.commit()
    assert shop.ran == [1]


@pytest.mark.parametrize("propagates", [True, False])
def test_a_drained_tasks_error_is_raised_or_is_its_result(
    propagates: bool, shop: Shop, outbox: OutboxRecorder
) -> None:
    shop.app.conf.task_eager_propagates = propagates

    @shop.task()
    def fail() -> None:
        raise LookupError("no such order")

    with shop.engine.connect() as connection, connection.begin() as transaction:
        fail.apply_async(via_outbox=True)
        [result] = outbox.drain(throw=False)
        fail.apply_async(via_outbox=True)
        with pytest.raises(LookupError, match="no such order"):
            outbox.drain()
        transaction.rollback()
    assert result.state == "FAILURE"


def test_what_ran_after_its_commit_is_not_drained(
    shop: Shop, outbox: OutboxRecorder, session: Session
) -> None:
    with session.begin():
        shop.send(1)
    assert outbox.drain() == []
    assert shop.ran == [1]


def test_there_is_no_message_for_a_broker(shop: Shop, outbox: OutboxRecorder) -> None:
    shop.send(1)
    with pytest.raises(ConfigurationError, match="task_always_eager"):
        outbox.drain("broker")


def test_a_fake_records_the_same(shop: Shop, outbox_fake: OutboxRecorder, session: Session) -> None:
    with session.begin():
        shop.send(1)
    outbox_fake.assert_stored(shop.receipt, [1], count=1)
    assert shop.ran == [1]
