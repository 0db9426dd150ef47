"""What lies below the doors is never diverted, even when every dispatch of the app is stored."""

from types import SimpleNamespace
from typing import Any

import pytest
from kombu import Exchange, Queue

from tests.canvas.stall import OpenStall, Stall, memory_config


@pytest.fixture
def default_stall(open_stall: OpenStall) -> Stall:
    """A stall of which every dispatch is stored, with a broker in memory."""
    return open_stall(default=True, config=memory_config())


def taken(stall: Stall, queue: Queue) -> list[Any]:
    """Take the messages off a queue that was declared before."""
    with stall.app.connection_for_read() as connection:
        bound = queue(connection.default_channel)
        return [message.payload for message in iter(lambda: bound.get(no_ack=True), None)]


def declared(stall: Stall, queue: Queue) -> Queue:
    with stall.app.connection_for_read() as connection:
        queue(connection.default_channel).declare()
    return queue


def test_remote_control_is_sent(default_stall: Stall) -> None:
    stall = default_stall
    mailbox = declared(
        stall, Queue(f"{stall.app.main}.pidbox", stall.app.control.mailbox.exchange, durable=False)
    )
    with stall.transaction():
        stall.app.control.revoke("some-id")
        stall.app.control.rate_limit("stall.add", "1/s")
        stall.app.control.broadcast("shutdown")
        stall.app.control.ping(timeout=0.01)
        stall.app.AsyncResult("another-id").revoke()
    methods = [each["method"] for each in taken(stall, mailbox)]
    assert methods == ["revoke", "rate_limit", "shutdown", "ping", "revoke"]
    assert stall.names == []


def test_events_are_sent(default_stall: Stall) -> None:
    stall = default_stall
    events = declared(
        stall, Queue(f"{stall.app.main}.events", Exchange("celeryev", "topic"), routing_key="#")
    )
    with stall.transaction(), stall.app.events.default_dispatcher() as dispatcher:
        dispatcher.send("task-custom", note="a")
    assert [each["type"] for each in taken(stall, events)] == ["task-custom"]
    assert stall.names == []


def test_a_bare_publish_of_kombu_is_sent(default_stall: Stall) -> None:
    stall = default_stall
    queue = declared(stall, Queue(f"{stall.app.main}.bare"))
    with stall.transaction(), stall.app.producer_or_acquire() as producer:
        producer.publish({"a": 1}, routing_key=queue.name)
    assert (taken(stall, queue), stall.names) == ([{"a": 1}], [])


def test_send_task_message_is_sent(default_stall: Stall) -> None:
    stall = default_stall
    with stall.transaction(), stall.app.producer_or_acquire() as producer:
        message = stall.app.amqp.as_task_v2("below", "stall.add", (1, 2))
        stall.app.amqp.send_task_message(producer, "stall.add", message)
    assert ([each.id for each in stall.sent], stall.names) == (["below"], [])


def test_a_result_is_written_by_its_backend(open_stall: OpenStall, tmp_path: Any) -> None:
    stall = open_stall(default=True, config=memory_config() | {"result_backend": f"file://{tmp_path}"})
    with stall.transaction():
        stall.app.backend.store_result("some-id", 3, "SUCCESS")
    assert (stall.app.AsyncResult("some-id").get(), stall.names) == (3, [])


def test_an_answer_of_the_rpc_backend_is_sent(open_stall: OpenStall) -> None:
    stall = open_stall(default=True, config=memory_config() | {"result_backend": "rpc://"})
    queue = declared(stall, Queue(f"{stall.app.main}.answers"))
    with stall.transaction():
        request = SimpleNamespace(reply_to=queue.name, correlation_id="c", id="c")
        stall.app.backend.store_result("c", 3, "SUCCESS", request=request)
    assert ([each["result"] for each in taken(stall, queue)], stall.names) == ([3], [])
