"""assert_stored and assert_nothing_stored: what matches, and what a failure tells."""

from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from unittest.mock import ANY
from uuid import UUID

import pytest
from sqlalchemy.orm import Session

from celery_outbox import Outbox
from celery_outbox.testing import OutboxRecorder
from tests.testing.conftest import Shop

ARGUMENTS = (1, "é", (2, [3.5, None]), {"a": (1,)}, b"bytes")
JSON_ARGUMENTS = (datetime(2030, 1, 2, tzinfo=UTC), UUID(int=7), Decimal("1.50"), {1: 2})


@pytest.mark.parametrize(
    "options",
    [
        {"serializer": "json"},
        {"serializer": "pickle"},
        {"serializer": "yaml"},
        {"serializer": "msgpack"},
        {"serializer": "json", "compression": "zlib"},
        {"serializer": "pickle", "compression": "bzip2"},
    ],
    ids=lambda options: "-".join(options.values()),
)
@pytest.mark.parametrize("protocol", [1, 2])
def test_arguments_match_as_they_were_given(
    shop: Shop, outbox: OutboxRecorder, options: Mapping[str, Any], protocol: int
) -> None:
    shop.app.conf.task_protocol = protocol
    shop.send(*ARGUMENTS, kwargs={"to": ("me",)}, **options)
    [task] = outbox.assert_stored(shop.receipt, ARGUMENTS, {"to": ("me",)}, count=1)
    outbox.assert_stored(task.name, task.args, task.kwargs, count=1)
    outbox.assert_stored(shop.receipt, kwargs={}, count=0)


def test_arguments_of_types_that_json_lacks_match_as_they_were_given(
    shop: Shop, outbox: OutboxRecorder
) -> None:
    shop.send(*JSON_ARGUMENTS)
    outbox.assert_stored(shop.receipt, args=JSON_ARGUMENTS, count=1)


def test_matchers_stand_for_arguments(shop: Shop, outbox: OutboxRecorder) -> None:
    shop.send(1, 2, kwargs={"at": "noon", "to": "me"})
    outbox.assert_stored(shop.receipt, (1, ANY), {"at": ANY, "to": "me"})
    outbox.assert_stored(shop.receipt, (pytest.approx(1.0000001), 2))
    outbox.assert_stored(shop.receipt, (2, ANY), count=0)


def test_a_task_counts_by_its_name_or_itself_and_by_its_arguments(
    shop: Shop, outbox: OutboxRecorder
) -> None:
    for number in (1, 2, 2):
        shop.send(number)
    assert [task.args for task in outbox.assert_stored("shop.receipt", count=3)] == [[1], [2], [2]]
    outbox.assert_stored(shop.receipt, [2], count=2)
    outbox.assert_stored(shop.receipt, [2], {}, count=2)
    outbox.assert_stored("shop.charge", count=0)


def test_a_failure_lists_what_was_stored_what_is_pending_and_what_was_rolled_back(
    shop: Shop, outbox: OutboxRecorder, session: Session
) -> None:
    shop.send(1, kwargs={"to": "me"})
    with session.begin():
        shop.send(2)
        session.rollback()
    session.begin()
    shop.send(3, "x" * 500)
    with pytest.raises(AssertionError) as caught:
        outbox.assert_stored(shop.receipt, args=(3,), count=2)
    first, *lines = str(caught.value).splitlines()
    assert first == (
        "expected shop.receipt to be stored 2 times with args [3] and kwargs None (None: any), found 0."
    )
    assert lines[:4] == ["stored:", "  shop.receipt(1, to='me')", "pending:", lines[3]]
    assert lines[3].startswith("  shop.receipt(3, 'xxx")
    assert len(lines[3]) < 300
    assert lines[4:] == ["rolled_back:", "  shop.receipt(2)"]


def test_a_failure_says_that_nothing_was_stored(outbox: OutboxRecorder) -> None:
    with pytest.raises(AssertionError, match="at least once") as caught:
        outbox.assert_stored("shop.receipt")
    assert str(caught.value).splitlines()[1:] == [
        "stored: nothing",
        "pending: nothing",
        "rolled_back: nothing",
    ]


def test_nothing_stored_means_that_nothing_is_pending_either(
    shop: Shop, outbox: OutboxRecorder, session: Session
) -> None:
    outbox.assert_nothing_stored()
    session.begin()
    shop.send(1)
    with pytest.raises(AssertionError, match=r"pending:\n  shop.receipt\(1\)"):
        outbox.assert_nothing_stored()
    session.rollback()
    outbox.assert_nothing_stored()
    shop.send(2)
    with pytest.raises(AssertionError, match=r"stored:\n  shop.receipt\(2\)"):
        outbox.assert_nothing_stored()


def test_a_recorder_takes_an_app_or_its_outbox_and_nothing_else(shop: Shop) -> None:
    for given in (shop.app, shop.outbox):
        with OutboxRecorder(given) as recorder:
            shop.send(1)
        recorder.assert_stored(shop.receipt, count=1)
    assert isinstance(shop.outbox, Outbox)
