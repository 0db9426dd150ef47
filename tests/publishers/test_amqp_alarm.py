"""RabbitMQ that cannot take messages now, or has nobody to talk to: alarms and heartbeats."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.publishers.batches import connected, message, publish
from tests.relay.apps import make_outbox, relaying, rows, send
from tests.relay.commands import environment, outbox_command, run, running
from tests.relay.conftest import OpenOutbox, open_outbox
from tests.relay.wire import task_ids
from tests.servers import RabbitServer
from tests.waiting import wait_until

__all__ = ["open_outbox"]

MakeProxy = Callable[[str, int], TcpProxy]


@contextmanager
def memory_alarm(rabbitmq: RabbitServer) -> Iterator[Callable[[], None]]:
    """Have RabbitMQ take nothing more until it is told to, or the test ends."""
    watermark = "vm_memory_monitor:set_vm_memory_high_watermark({})."
    rabbitmq.control(watermark.format("0.0001"))
    try:
        yield lambda: rabbitmq.control(watermark.format("0.4"))
    finally:
        rabbitmq.control(watermark.format("0.4"))


def test_a_connection_that_is_blocked_is_left_alone_until_it_is_unblocked(
    rabbitmq: RabbitServer, rabbitmq_url: str, tcp_proxy: MakeProxy
) -> None:
    proxy = tcp_proxy(HOST, rabbitmq.port)
    publisher = connected(proxy.through(rabbitmq_url))
    assert publish(publisher, [message()]).accepted
    messages = [message() for _ in range(50)]
    with memory_alarm(rabbitmq) as end_alarm:
        began = time.monotonic()
        first = publish(publisher, messages)
        assert time.monotonic() - began < 5
        assert first.accepted == set()
        assert first.is_connection_lost
        assert all("alarm" in text and "not known" in text for text in first.errors.values())
        again = publish(publisher, messages)
        assert again.unsent == {each.id for each in messages}
        assert again.is_connection_lost
        assert proxy.accepted == 1
        end_alarm()

    def all_accepted() -> bool:
        if not publisher.is_connected:
            publisher.connect()
        return publish(publisher, messages).accepted == {each.id for each in messages}

    wait_until(all_accepted, 15, "the end of the alarm")
    found = task_ids(rabbitmq_url)
    assert set(found) >= {each.task_id for each in messages}
    # What had been written when the broker said so arrives as well; nothing was written after it.
    assert len(found) == 1 + len(first.errors) + len(messages)
    publisher.close()


def test_an_alarm_costs_no_message_and_holds_up_no_end(
    rabbitmq: RabbitServer, rabbitmq_url: str, sqlite_url: str, tmp_path: Path
) -> None:
    env = environment(broker=rabbitmq_url, database=sqlite_url, settings={"retry": {"max_delay": 1}})
    outbox = make_outbox(rabbitmq_url, sqlite_url)
    relay = outbox_command("relay", "--sleep", "0.2")
    with memory_alarm(rabbitmq) as end_alarm:
        with running(relay, tmp_path, env) as process:
            process.wait_for("Relaying")
            stored = [send(outbox) for _ in range(5)]
            process.wait_for("alarm")
            began = time.monotonic()
            assert run(outbox_command("list"), env).returncode == 0
            assert time.monotonic() - began < 5
            began = time.monotonic()
            process.send(signal.SIGTERM)
            assert process.wait() == 0
            assert time.monotonic() - began < 5
        assert [row.task_id for row in rows(outbox)] == stored
        end_alarm()
    with running(relay, tmp_path, env):
        wait_until(lambda: not rows(outbox), 20, "the deliveries")
    assert set(task_ids(rabbitmq_url)) == set(stored)
    outbox.app.close()


def test_an_idle_connection_is_kept_by_its_heartbeats(
    rabbitmq: RabbitServer, rabbitmq_url: str, tcp_proxy: MakeProxy
) -> None:
    of_kept, of_neglected = (tcp_proxy(HOST, rabbitmq.port) for _ in range(2))
    kept = connected(of_kept.through(rabbitmq_url), heartbeat=1)
    neglected = connected(of_neglected.through(rabbitmq_url), heartbeat=1)

    def is_neglected_one_closed() -> bool:
        kept.keep_alive()
        return of_neglected.live == 0

    wait_until(is_neglected_one_closed, 15, "the end of the neglected connection", 0.1)
    assert publish(kept, [one := message()]).accepted == {one.id}
    assert (of_kept.accepted, of_kept.live) == (1, 1)
    # It is found out before anything is sent: no message is in doubt.
    assert publish(neglected, [two := message()]).unsent == {two.id}
    assert not neglected.is_connected
    assert task_ids(rabbitmq_url) == [one.task_id]
    kept.close()


def test_an_idle_relay_keeps_its_connection(
    rabbitmq: RabbitServer,
    rabbitmq_url: str,
    tcp_proxy: MakeProxy,
    open_outbox: OpenOutbox,
    sqlite_url: str,
) -> None:
    proxy, of_neglected = (tcp_proxy(HOST, rabbitmq.port) for _ in range(2))
    outbox = open_outbox(f"{proxy.through(rabbitmq_url)}?heartbeat=2", sqlite_url)
    with relaying(outbox):
        stored = [send(outbox)]
        wait_until(lambda: not rows(outbox), message="the first delivery")
        neglected = connected(of_neglected.through(rabbitmq_url), heartbeat=2)
        wait_until(lambda: of_neglected.live == 0, 15, "the end of a neglected connection")
        stored.append(send(outbox))
        wait_until(lambda: not rows(outbox), message="the second delivery")
        assert (proxy.accepted, proxy.live) == (1, 1)
    neglected.close()
    assert task_ids(rabbitmq_url) == stored


def test_a_connection_that_ended_meanwhile_is_closed_before_anything_is_sent(
    rabbitmq: RabbitServer, rabbitmq_url: str, tcp_proxy: MakeProxy
) -> None:
    proxy = tcp_proxy(HOST, rabbitmq.port)
    publisher = connected(proxy.through(rabbitmq_url))
    publish(publisher, [message()])
    proxy.cut()
    wait_until(lambda: proxy.live == 0, message="the end of the connection")
    publisher.keep_alive()
    assert not publisher.is_connected
    publisher.keep_alive()
    publisher.connect()
    assert publish(publisher, [one := message()]).accepted == {one.id}
    publisher.close()


@pytest.mark.parametrize("phase", ["declaring", "confirming", "saying goodbye"])
def test_a_broker_that_hangs_is_not_waited_for_without_end(
    phase: str,
    rabbitmq: RabbitServer,
    rabbitmq_url: str,
    tcp_proxy: MakeProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if phase != "saying goodbye":
        monkeypatch.setattr("celery_outbox.relay.publishers.amqp.ANSWER_SECONDS", 0.5)
    proxy = tcp_proxy(HOST, rabbitmq.port)
    publisher = connected(proxy.through(rabbitmq_url))
    publish(publisher, [message("first")])
    proxy.stall()
    began = time.monotonic()
    if phase == "saying goodbye":
        publisher.close()
    else:
        one = message("second" if phase == "declaring" else "first")
        outcome = publish(publisher, [one])
        assert outcome.is_connection_lost
        assert outcome.accepted == set()
        assert outcome.unsent == ({one.id} if phase == "declaring" else set())
    assert time.monotonic() - began < 5
    assert not publisher.is_connected
    proxy.cut()
