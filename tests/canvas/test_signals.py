"""Publish signals and the task-sent event: once, at the dispatch, stored as handlers leave them."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import chain, group
from celery.signals import after_task_publish, before_task_publish
from celery.utils.dispatch import Signal
from kombu.exceptions import EncodeError

from tests.canvas.stall import OpenStall, SoldOutError, Stall, memory_config

Connect = Callable[[Signal, Callable[..., Any]], None]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Connect handlers until the test ends."""
    connected: list[tuple[Signal, Callable[..., Any]]] = []

    def connect_(signal: Signal, handler: Callable[..., Any]) -> None:
        signal.connect(handler, weak=False)
        connected.append((signal, handler))

    yield connect_
    for signal, handler in connected:
        signal.disconnect(handler)


@pytest.fixture
def heard(connect: Connect) -> list[str]:
    """Which publish signals were sent, in order, and for what."""
    heard: list[str] = []
    connect(before_task_publish, lambda sender, **_: heard.append(f"before {sender}"))
    connect(after_task_publish, lambda sender, **_: heard.append(f"after {sender}"))
    return heard


def test_the_signals_are_sent_once_at_the_dispatch(stall: Stall, heard: list[str]) -> None:
    with stall.transaction():
        stall.add.apply_async((1, 2), via_outbox=True)
        at_once = list(heard)
    assert at_once == heard == ["before stall.add", "after stall.add"]


def test_the_signals_are_sent_once_for_each_task_of_a_canvas(
    open_stall: OpenStall, heard: list[str]
) -> None:
    stall = open_stall(config=memory_config())
    with stall.transaction():
        group(stall.adds(2)).apply_async(via_outbox=True)
        stall.outbox.bulk([stall.echo.s(1), stall.total.s([1]).set(via_outbox=False)])
        chain(stall.echo.s(1), stall.add.s(1)).apply_async(via_outbox=True)
    names = ["add", "add", "echo", "total", "echo"]
    assert heard == [f"{when} stall.{name}" for name in names for when in ("before", "after")]


def test_a_handler_learns_what_plain_celery_would_tell(open_stall: OpenStall, connect: Connect) -> None:
    stall = open_stall(config=memory_config())
    told: list[dict[str, Any]] = []
    connect(before_task_publish, lambda **what: told.append(what))
    connect(after_task_publish, lambda **what: told.append(what))
    for via_outbox in (False, True):
        stall.add.apply_async(
            (1, 2), task_id="same", priority=3, headers={"tenant": "a"}, via_outbox=via_outbox
        )
    for each in told:
        del each["signal"]
    assert told[2:] == told[:2]
    assert set(told[0]) == {
        "sender", "body", "exchange", "routing_key", "declare", "headers", "properties", "retry_policy",
    }  # fmt: skip


def test_what_handlers_change_is_stored(stall: Stall, connect: Connect) -> None:
    def change(headers: Any, properties: Any, body: Any, **_: Any) -> None:
        headers["x-request-id"] = "r-1"
        properties["priority"] = 5
        body[1]["y"] = 40

    connect(before_task_publish, change)
    with stall.transaction():
        stall.add.apply_async((1,), {"y": 2}, via_outbox=True)
    (message,) = stall.stored()
    assert message.headers["x-request-id"] == "r-1"
    assert message.properties["priority"] == 5
    assert message.body[:2] == [[1], {"y": 40}]


def test_a_handler_that_raises_is_logged_and_the_task_is_stored(
    stall: Stall, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(**_: Any) -> None:
        raise SoldOutError

    connect(before_task_publish, fail)
    connect(after_task_publish, fail)
    with stall.transaction(), caplog.at_level(logging.ERROR, "celery.utils.dispatch.signal"):
        stall.add.apply_async((1, 2), via_outbox=True)
    assert (stall.names, len(caplog.records)) == (["add"], 2)


def test_a_handlers_own_dispatch_knows_nothing_of_the_canvas(
    open_stall: OpenStall, connect: Connect
) -> None:
    stall = open_stall(config=memory_config())

    def audit(sender: str, **_: Any) -> None:
        if sender == "stall.add":
            stall.echo.delay("direct")
            stall.charge.delay(5, 5)

    connect(before_task_publish, audit)
    with pytest.raises(SoldOutError), stall.transaction():
        group(stall.adds(2)).apply_async(via_outbox=True)
        raise SoldOutError
    rolled_back = stall.names, stall.sent_names
    with stall.transaction():
        group(stall.adds(2)).apply_async(via_outbox=True)
    assert rolled_back == ([], ["echo", "echo"])
    assert (sorted(stall.names), stall.sent_names) == (
        ["add", "add", "charge", "charge"],
        ["echo", "echo"],
    )


def test_a_handlers_canvas_inside_a_direct_canvas_is_stored(
    open_stall: OpenStall, connect: Connect
) -> None:
    stall = open_stall(config=memory_config())

    def audit(sender: str, **_: Any) -> None:
        if sender == "stall.echo":
            group(stall.adds(2)).apply_async(via_outbox=True)

    connect(after_task_publish, audit)
    with stall.transaction():
        group(stall.echo.s(1), stall.total.s([1])).apply_async()
    assert (stall.names, stall.sent_names) == (["add", "add"], ["echo", "total"])


def test_the_event_of_a_stored_task_is_stored_and_rolled_back_with_it(open_stall: OpenStall) -> None:
    stall = open_stall(config={"task_send_sent_event": True})
    with pytest.raises(SoldOutError), stall.transaction():
        stall.add.apply_async((1, 2), via_outbox=True)
        raise SoldOutError
    rolled_back = stall.names
    with stall.transaction():
        result = stall.add.apply_async((1, 2), via_outbox=True)
        group(stall.adds(2)).apply_async(via_outbox=True)
    assert rolled_back == []
    assert stall.names == ["add", "task-sent"] * 3
    task, event = stall.stored()[:2]
    assert (event.body["type"], event.body["uuid"], event.body["name"]) == (
        "task-sent",
        result.id,
        "stall.add",
    )
    assert (task.id, event.id) == (result.id, result.id)


def test_the_event_of_a_direct_task_is_sent(open_stall: OpenStall) -> None:
    stall = open_stall(config=memory_config() | {"task_send_sent_event": True})
    with stall.transaction():
        stall.add.apply_async((1, 2))
    assert (stall.names, stall.sent_names) == ([], ["add"])


def test_a_dispatch_that_fails_sends_no_after_signal(stall: Stall, heard: list[str]) -> None:
    with stall.transaction(), pytest.raises(EncodeError):
        stall.add.apply_async((object(), 1), via_outbox=True)
    assert heard == ["before stall.add"]
