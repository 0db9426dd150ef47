"""``/healthz`` and ``/readyz`` of a real relay whose broker or database hangs, and which is paused."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import sqlalchemy as sa

from tests.metrics.scraping import showing
from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.relay.apps import rows, send
from tests.relay.commands import environment
from tests.relay.conftest import OpenOutbox
from tests.relay.wire import task_ids
from tests.servers import DatabaseServer
from tests.storage.rows import change
from tests.waiting import wait_until

MakeProxy = Callable[[str, int], TcpProxy]


def before(url: str, tcp_proxy: MakeProxy) -> tuple[TcpProxy, str]:
    """A proxy before a server, and the server's URL through it."""
    wire = tcp_proxy(HOST, urlsplit(url).port or 0)
    return wire, wire.through(url)


@contextmanager
def frozen(server: DatabaseServer) -> Iterator[None]:
    """Stop every process of a server, until the end of the block."""
    leader = psutil.Process(server.processes[0].popen.pid)
    stopped = [leader, *leader.children(recursive=True)]
    for each in stopped:
        os.kill(each.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for each in stopped:
            os.kill(each.pid, signal.SIGCONT)


@pytest.mark.parametrize("trouble", ["hangs", "is down"])
def test_a_broker_that_fails_turns_red_and_its_return_turns_green_again(
    trouble: str,
    open_outbox: OpenOutbox,
    tcp_proxy: MakeProxy,
    redis_url: str,
    sqlite_url: str,
    tmp_path: Path,
) -> None:
    wire, broker = before(redis_url, tcp_proxy)
    outbox = open_outbox(redis_url, sqlite_url)
    hasty = {"broker_transport_options": {"socket_timeout": 1, "socket_connect_timeout": 1}}
    env = environment(broker=broker, database=sqlite_url, config=hasty)
    with showing(tmp_path, env, "--unhealthy-after", "2s", "--sleep", "0.2") as relay:
        send(outbox)
        wait_until(lambda: not rows(outbox))
        relay.wait_for("/readyz", 200)
        assert relay.ask("/healthz") == (200, "ok\n")
        if trouble == "hangs":
            wire.stall()
        else:
            wire.refuse()
            wire.cut()
        stored = send(outbox)
        said = relay.wait_for("/healthz", 503, 30)
        assert "a message for broker shop in database default has been ready for" in said
        assert relay.status("/readyz") == 200
        wire.listen()
        wire.resume()
        assert relay.wait_for("/healthz", 200, 30) == "ok\n"
        wait_until(lambda: stored in task_ids(redis_url), 15)


def test_a_message_that_cannot_be_delivered_does_not_turn_red(
    open_outbox: OpenOutbox, redis_url: str, sqlite_url: str, tmp_path: Path
) -> None:
    outbox = open_outbox(redis_url, sqlite_url)
    change(outbox.databases["default"], send(outbox), message="no envelope")
    often = {"retry": {"base_delay": 1, "max_delay": 1}}
    env = environment(broker=redis_url, database=sqlite_url, settings=often)
    with showing(tmp_path, env, "--unhealthy-after", "3s", "--sleep", "0.1") as relay:

        def has_failed_often() -> bool:
            assert relay.ask("/healthz") == (200, "ok\n")
            return rows(outbox)[0].attempts >= 6

        wait_until(has_failed_often, 20)


def test_a_database_that_hangs_holds_no_answer_up_and_is_no_reason_to_restart(
    open_outbox: OpenOutbox,
    redis_url: str,
    postgresql_url: str,
    postgresql: DatabaseServer,
    tmp_path: Path,
) -> None:
    open_outbox(redis_url, postgresql_url)
    env = environment(broker=redis_url, database=postgresql_url)
    with showing(tmp_path, env, "--unhealthy-after", "1s") as relay:
        relay.wait_for("/readyz", 200)
        up = "celery_outbox_database_up{default}"
        assert relay.number(up) == 1
        with frozen(postgresql):
            wait_until(lambda: relay.number(up) == 0, 20)
            # Kubernetes waits for a second.
            status, said = relay.ask("/healthz", timeout=1)
            assert (status, said.partition(":")[0]) == (200, "database default could not be read")
            assert relay.ask("/readyz", timeout=1) == (503, "no database can be used\n")
            assert not [name for name in relay.numbers() if "backlog" in name]
        wait_until(lambda: relay.number(up) == 1, 20)
        relay.wait_for("/readyz", 200)
        assert relay.ask("/healthz") == (200, "ok\n")


def test_a_relay_is_ready_when_a_database_can_be_used_and_not_before(
    open_outbox: OpenOutbox,
    tcp_proxy: MakeProxy,
    redis_url: str,
    postgresql_url: str,
    tmp_path: Path,
) -> None:
    open_outbox(redis_url, postgresql_url)
    wire = tcp_proxy(HOST, sa.make_url(postgresql_url).port or 0)
    wire.refuse()
    through = sa.make_url(postgresql_url).set(port=wire.port).render_as_string(hide_password=False)
    with showing(tmp_path, environment(broker=redis_url, database=through)) as relay:
        assert relay.ask("/readyz") == (503, "no database can be used\n")
        assert relay.ask("/healthz") == (200, "ok\n")
        wire.listen()
        relay.wait_for("/readyz", 200, 20)


def test_a_paused_relay_is_healthy_and_not_ready(
    open_outbox: OpenOutbox, redis_url: str, sqlite_url: str, tmp_path: Path
) -> None:
    outbox = open_outbox(redis_url, sqlite_url)
    env = environment(broker=redis_url, database=sqlite_url)
    with showing(tmp_path, env, "--unhealthy-after", "1s") as relay:
        relay.wait_for("/readyz", 200)
        relay.process.send(signal.SIGUSR2)
        assert relay.wait_for("/readyz", 503) == "the relay is paused\n"
        send(outbox)
        age = "celery_outbox_oldest_age_seconds{default,shop}"
        wait_until(lambda: (relay.number(age) or 0) > 1, 20)
        assert relay.ask("/healthz") == (200, "the relay is paused\n")
        relay.process.send(signal.SIGCONT)
        relay.wait_for("/readyz", 200)
        wait_until(lambda: not rows(outbox))


def test_a_stopping_relay_is_healthy_and_not_ready(
    open_outbox: OpenOutbox,
    tcp_proxy: MakeProxy,
    redis_url: str,
    sqlite_url: str,
    tmp_path: Path,
) -> None:
    wire, broker = before(redis_url, tcp_proxy)
    outbox = open_outbox(redis_url, sqlite_url)
    with showing(tmp_path, environment(broker=broker, database=sqlite_url)) as relay:
        send(outbox)
        wait_until(lambda: not rows(outbox))
        wire.hold_replies()
        send(outbox)
        wait_until(lambda: [row.attempts for row in rows(outbox)] == [1])
        relay.process.send(signal.SIGTERM)
        assert relay.wait_for("/readyz", 503) == "the relay is stopping\n"
        assert relay.status("/healthz") == 200
        wire.resume()
        assert relay.process.wait() == 0
    assert rows(outbox) == []


def test_no_probe_answers_while_a_relay_is_stopped(
    open_outbox: OpenOutbox, redis_url: str, sqlite_url: str, tmp_path: Path
) -> None:
    open_outbox(redis_url, sqlite_url)
    with showing(tmp_path, environment(broker=redis_url, database=sqlite_url)) as relay:
        relay.process.send(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            relay.ask("/healthz", timeout=0.5)
        relay.process.send(signal.SIGCONT)
        assert relay.status("/healthz") == 200
