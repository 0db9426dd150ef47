"""The fake mode: everything is recorded and nothing is written."""

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from celery import chain, chord, group
from sqlalchemy.orm import Session

from celery_outbox.errors import OptionError
from celery_outbox.testing import OutboxRecorder
from tests.testing.conftest import OpenShop, Order, Shop, first_arguments


@pytest.fixture
def shop(url: str, open_shop: OpenShop) -> Shop:
    """A shop whose outbox was never installed."""
    return open_shop(url, installs=False)


@pytest.fixture
def statements(shop: Shop) -> list[str]:
    """Every statement that reaches the database."""
    seen: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        seen.append(statement)

    sa.event.listen(shop.engine, "before_cursor_execute", note)
    return seen


def test_no_statement_reaches_the_database(
    shop: Shop, outbox_fake: OutboxRecorder, session: Session, statements: list[str]
) -> None:
    shop.send(1)
    with session.begin():
        shop.send(2)
        group(shop.receipt.s(3), shop.receipt.s(4)).apply_async(via_outbox=True)
    with session.begin():
        shop.send(5)
        session.rollback()
    assert first_arguments(outbox_fake.stored) == [1, 2, 3, 4]
    assert first_arguments(outbox_fake.rolled_back) == [5]
    assert statements == []


def test_the_applications_own_data_is_written_as_ever(
    shop: Shop, outbox_fake: OutboxRecorder, session: Session
) -> None:
    with session.begin():
        session.add(Order(id=1))
        shop.send(1)
    with shop.engine.begin() as connection:
        connection.execute(sa.insert(Order).values(id=2))
        shop.send(2)
    assert session.scalars(sa.select(Order.id)).all() == [1, 2]
    outbox_fake.assert_stored(shop.receipt, count=2)
    assert not sa.inspect(shop.engine).has_table("celery_outbox")


def test_a_dispatch_is_refused_as_ever(shop: Shop, outbox_fake: OutboxRecorder) -> None:
    with pytest.raises(OptionError):
        shop.send(1, outbox_database="nowhere")
    outbox_fake.assert_nothing_stored()


@pytest.mark.parametrize(
    ("canvas", "stored"),
    [
        (lambda task: chain(task.s(1), task.si(2)), [1]),
        (lambda task: chord([task.s(1), task.s(2)], task.s()), [1, 2]),
        (lambda task: task.chunks([(1,), (2,)], 1).group(), None),
    ],
    ids=["chain", "chord", "chunks"],
)
def test_a_canvas_is_recorded_by_what_it_sends(
    shop: Shop,
    outbox_fake: OutboxRecorder,
    canvas: Callable[[Any], Any],
    stored: list[int] | None,
) -> None:
    shop.app.conf.result_backend = "cache+memory://"
    canvas(shop.receipt).apply_async(via_outbox=True)
    if stored is None:
        outbox_fake.assert_stored("celery.starmap", count=2)
    else:
        assert first_arguments(outbox_fake.assert_stored(shop.receipt)) == stored


def test_what_a_fake_recorded_can_be_drained(shop: Shop, outbox_fake: OutboxRecorder) -> None:
    shop.send(1)
    assert [result.get() for result in outbox_fake.drain()] == [1]
    assert shop.ran == [1]


def test_the_recorder_asked_for_last_counts(shop: Shop) -> None:
    shop.outbox.install()
    with OutboxRecorder(shop.app, is_fake=True) as faked:
        with OutboxRecorder(shop.app) as recorder:
            shop.send(1)
        shop.send(2)
    shop.send(3)
    assert first_arguments(recorder.stored) == [1]
    assert first_arguments(faked.stored) == [2]
    assert shop.rows() == 2
