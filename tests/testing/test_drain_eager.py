"""drain(): what is stored runs in this process, and what a worker would send after it."""

from typing import Any

import pytest
from celery import Task, chain, chord, current_app, group
from celery.exceptions import MaxRetriesExceededError
from sqlalchemy.orm import Session

from celery_outbox.errors import ConfigurationError, OptionError
from celery_outbox.testing import OutboxRecorder
from tests.testing.conftest import Shop


def test_only_what_is_stored_runs_and_once(
    shop: Shop, outbox: OutboxRecorder, session: Session
) -> None:
    shop.send(1)
    with session.begin():
        shop.send(2)
        session.rollback()
    session.begin()
    shop.send(3)
    assert [result.get() for result in outbox.drain()] == [1]
    session.commit()
    assert [result.get() for result in outbox.drain()] == [3]
    assert outbox.drain() == []
    assert shop.ran == [1, 3]
    outbox.assert_stored(shop.receipt, count=2)  # drained or not


@pytest.mark.parametrize("protocol", [1, 2])
def test_a_task_runs_with_its_stored_id_arguments_and_headers(
    shop: Shop, outbox: OutboxRecorder, protocol: int
) -> None:
    shop.app.conf.task_protocol = protocol
    seen: list[Any] = []

    @shop.task(bind=True)
    def look(self: Task, *args: Any, **kwargs: Any) -> None:
        request = self.request
        seen.append((request.id, args, kwargs, request.is_eager, request.headers["tenant"]))

    given = look.apply_async(
        ((1, 2),),
        {"to": "me"},
        via_outbox=True,
        headers={"tenant": 7},
        countdown=3600,
        compression="zlib",
    )
    [result] = outbox.drain()
    assert seen == [(given.id, ([1, 2],), {"to": "me"}, True, 7)]
    assert result.id == given.id


def test_stamps_arrive(shop: Shop, outbox: OutboxRecorder) -> None:
    seen: list[Any] = []

    @shop.task(bind=True)
    def look(self: Task) -> None:
        seen.append((self.request.stamped_headers, self.request.stamps))

    signature = look.s()
    signature.stamp(order="7")
    signature.apply_async(via_outbox=True)
    outbox.drain()
    assert seen == [(["order"], {"order": ["7"]})]


def test_what_a_task_stores_is_left_to_the_next_drain(shop: Shop, outbox: OutboxRecorder) -> None:
    @shop.task()
    def place_order() -> None:
        shop.send(1)

    place_order.apply_async(via_outbox=True)
    outbox.drain()
    assert shop.ran == []
    outbox.assert_stored(shop.receipt, [1])
    outbox.drain()
    assert shop.ran == [1]


def test_a_chain_with_its_links_runs_to_the_end(shop: Shop, outbox: OutboxRecorder) -> None:
    @shop.task()
    def add(one: int, other: int) -> int:
        return one + other

    first, last = add.s(1, 1), add.s(100)
    first.link(shop.receipt.s())
    last.link(chain(shop.receipt.s(), shop.receipt.si("linked")))
    chain(first, add.s(10), last).apply_async(via_outbox=True)
    outbox.assert_stored(add, [1, 1], count=1)
    [result] = outbox.drain()
    assert result.get() == 2
    assert shop.ran == [2, 112, "linked"]


def test_a_chain_with_a_group_in_it_runs_to_the_end(shop: Shop, outbox: OutboxRecorder) -> None:
    shop.app.conf.result_backend = "cache+memory://"

    @shop.task()
    def add(one: int, other: int) -> int:
        return one + other

    chain(add.s(1, 1), group(add.s(1), add.s(2)), shop.receipt.s()).apply_async(via_outbox=True)
    outbox.drain()
    assert shop.ran == [[3, 4]]


def test_the_app_is_the_current_one_while_its_tasks_run(shop: Shop, outbox: OutboxRecorder) -> None:
    @shop.task()
    def look() -> str | None:
        name: str | None = current_app.main
        return name

    look.apply_async(via_outbox=True)
    before = current_app.main
    assert [result.get() for result in outbox.drain()] == [shop.app.main]
    assert current_app.main == before != shop.app.main


@pytest.mark.parametrize("backend", ["cache+memory://", "db+sqlite://"])
def test_the_body_of_a_chord_runs_after_its_header(
    shop: Shop, outbox: OutboxRecorder, session: Session, backend: str
) -> None:
    shop.app.conf.result_backend = backend

    @shop.task()
    def double(number: int) -> int:
        return 2 * number

    with session.begin():
        header = [shop.receipt.s(1), chain(shop.receipt.s(2), double.s()), shop.receipt.s(3)]
        chord(header, shop.receipt.s()).apply_async(via_outbox=True)
        chord([double.s(5)], shop.receipt.s()).apply_async(via_outbox=True)
    outbox.drain()
    assert shop.ran == [1, 2, 3, [1, 4, 3], [10]]


def test_the_body_of_a_chord_does_not_run_when_a_task_of_its_header_fails(
    shop: Shop, outbox: OutboxRecorder
) -> None:
    shop.app.conf.result_backend = "cache+memory://"

    @shop.task()
    def fail() -> None:
        raise LookupError("no such order")

    chord([shop.receipt.s(1), fail.s(), shop.receipt.s(2)], shop.receipt.s()).apply_async(
        via_outbox=True
    )
    assert [result.state for result in outbox.drain(throw=False)] == ["SUCCESS", "FAILURE", "SUCCESS"]
    assert shop.ran == [1, 2]


def test_the_error_of_a_task_is_raised_and_the_rest_is_left(shop: Shop, outbox: OutboxRecorder) -> None:
    @shop.task()
    def fail() -> None:
        raise LookupError("no such order")

    shop.send(1)
    fail.apply_async(via_outbox=True)
    shop.send(2)
    with pytest.raises(LookupError, match="no such order"):
        outbox.drain()
    assert shop.ran == [1]
    outbox.drain()
    assert shop.ran == [1, 2]


def test_without_throw_a_failure_is_a_result_and_its_errback_runs(
    shop: Shop, outbox: OutboxRecorder
) -> None:
    # The setting is for other eager calls.
    shop.app.conf.task_eager_propagates = True

    @shop.task()
    def fail() -> None:
        raise LookupError("no such order")

    @shop.task()
    def note(task_id: str) -> None:
        shop.ran.append(task_id)

    links = {"link": shop.receipt.si("linked"), "link_error": note.s()}
    failed = fail.apply_async(via_outbox=True, **links)
    chain(fail.si(), shop.receipt.si("next")).apply_async(via_outbox=True)
    assert [result.state for result in outbox.drain(throw=False)] == ["FAILURE", "FAILURE"]
    assert shop.ran == [failed.id]


@pytest.mark.parametrize("tries", [2, 5])
def test_a_task_that_retries_is_tried_again_here(
    shop: Shop, outbox: OutboxRecorder, tries: int
) -> None:
    @shop.task(bind=True, max_retries=3)
    def flaky(self: Task) -> int:
        if self.request.retries < tries:
            raise self.retry(countdown=60)
        retries: int = self.request.retries
        return retries

    flaky.apply_async(via_outbox=True)
    if tries > 3:
        with pytest.raises(MaxRetriesExceededError):
            outbox.drain()
    else:
        assert [result.get() for result in outbox.drain()] == [tries]


def test_a_task_that_is_not_registered_is_refused_before_any_runs(
    shop: Shop, outbox: OutboxRecorder
) -> None:
    shop.send(1)
    shop.app.send_task("warehouse.pack", (1,), via_outbox=True)
    with pytest.raises(ConfigurationError, match=r"\['warehouse.pack'\]"):
        outbox.drain()
    assert shop.ran == []
    outbox.assert_stored("warehouse.pack", [1])


def test_a_drain_into_something_else_is_refused(shop: Shop, outbox: OutboxRecorder) -> None:
    shop.send(1)
    with pytest.raises(OptionError, match="'worker'"):
        outbox.drain("worker")  # type: ignore[arg-type]  # that is the point
    assert shop.ran == []


def test_the_rows_stay(shop: Shop, outbox: OutboxRecorder) -> None:
    shop.app.conf.task_send_sent_event = True
    shop.send(1)
    outbox.drain()
    assert shop.rows() == 2
