"""What the operator sees of a paused relay."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.relay.apps import rows, send
from tests.relay.commands import environment, outbox_command, run, running
from tests.relay.conftest import OpenOutbox
from tests.relay.test_signals import pause
from tests.relay.wire import task_ids
from tests.waiting import wait_until


def monitored(env: dict[str, str]) -> tuple[dict[str, int], list[int]]:
    """The states that hold messages, and the processes of the relays, as ``monitor`` shows them."""
    done = run(outbox_command("monitor", "--json"), env)
    assert done.returncode == 0, done.stderr
    shown: dict[str, Any]
    (shown,) = json.loads(done.stdout)
    states = {state: each["count"] for state, each in shown["states"].items() if each["count"]}
    return states, [each["pid"] for each in shown["relays"] if each["is_running"]]


def test_what_is_committed_in_a_pause_is_shown_as_ready_until_the_relay_goes_on(
    open_outbox: OpenOutbox,
    tcp_proxy: Callable[[str, int], TcpProxy],
    redis_url: str,
    postgresql_url: str,
    tmp_path: Path,
) -> None:
    outbox = open_outbox(redis_url, postgresql_url)
    wire = tcp_proxy(HOST, urlsplit(postgresql_url).port or 0)
    env = environment(broker=redis_url, database=postgresql_url)
    behind = environment(broker=redis_url, database=wire.through(postgresql_url))
    stored = [send(outbox)]
    with running(outbox_command("relay", "--sleep", "0.02"), tmp_path, behind) as relay:
        wait_until(lambda: not rows(outbox), 30, "the first delivery")
        pause(relay, wire)
        stored += [send(outbox) for _ in range(3)]
        assert monitored(env) == ({"ready": 3}, [relay.popen.pid])
        relay.send(signal.SIGCONT)
        wait_until(lambda: not rows(outbox), 10, "the deliveries after the pause")
        assert monitored(env) == ({}, [relay.popen.pid])
    assert task_ids(redis_url) == stored
