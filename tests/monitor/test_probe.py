"""``monitor --age`` as a probe of relays: quiet while tasks leave, and again once they do."""

import signal
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.relay.apps import rows, send
from tests.relay.commands import environment, outbox_command, run, running
from tests.relay.conftest import OpenOutbox, open_outbox
from tests.relay.wire import task_ids
from tests.waiting import wait_until

__all__ = ["open_outbox"]


def test_a_probe_tells_of_a_relay_and_of_a_broker_that_hang_until_they_go_on(
    open_outbox: OpenOutbox,
    tcp_proxy: Callable[[str, int], TcpProxy],
    redis_url: str,
    sqlite_url: str,
    tmp_path: Path,
) -> None:
    wire = tcp_proxy(HOST, urlsplit(redis_url).port or 0)
    outbox = open_outbox(redis_url, sqlite_url)
    hasty = {"broker_transport_options": {"socket_timeout": 1, "socket_connect_timeout": 1}}
    env = environment(broker=wire.through(redis_url), database=sqlite_url, config=hasty)
    probe = outbox_command("monitor", "--age", "1s")

    def is_quiet() -> bool:
        done = run(probe, env)
        assert done.stderr == ""
        assert done.returncode == ("BUSY" in done.stdout)
        return done.returncode == 0

    stored = [send(outbox)]
    with running(outbox_command("relay", "--sleep", "0.2"), tmp_path, env) as relay:
        wait_until(lambda: not rows(outbox), 30, "the first delivery")
        assert is_quiet()
        relay.send(signal.SIGSTOP)
        stored.append(send(outbox))
        wait_until(lambda: not is_quiet(), 15, "the alarm about the relay")
        relay.send(signal.SIGCONT)
        wait_until(lambda: not rows(outbox), 15, "the delivery by the relay that goes on")
        assert is_quiet()
        wire.stall()
        stored.append(send(outbox))
        wait_until(lambda: not is_quiet(), 15, "the alarm about the broker")
        wire.resume()
        wait_until(is_quiet, 15, "the end of the alarm")
        assert relay.popen.poll() is None, relay.output
    assert set(task_ids(redis_url)) == set(stored)
