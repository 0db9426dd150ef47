"""Stopping a relay: at any instant, from a signal handler."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.relay.apps import rows, send
from tests.relay.commands import ROOT, environment, outbox_command, running
from tests.relay.conftest import OpenOutbox
from tests.waiting import wait_until

#: Ends an idle relay by a signal again and again, each time at another place: also while its
#: heartbeat begins, and just before it waits for an hour.
SIGNALS = """
import random
import signal
from datetime import timedelta

from celery_outbox.policy import RetryPolicy
from celery_outbox.relay.loop import Relay, RelayOptions

sleep = timedelta(hours=1)
for _ in range(2000):
    relay = Relay(
        [], {}, RelayOptions(sleep=sleep, lease=timedelta(minutes=5), retry=RetryPolicy())
    )
    signal.signal(signal.SIGALRM, lambda *_: relay.stop())
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00005, 0.0015))
    relay.run()
"""


def test_a_signal_stops_a_relay_wherever_it_is() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNALS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("works_at_first", [False, True], ids=["from the start", "in a batch"])
def test_a_relay_before_a_redis_that_never_answers_ends_within_its_socket_timeout(
    *,
    works_at_first: bool,
    sqlite_url: str,
    redis_url: str,
    open_outbox: OpenOutbox,
    tcp_proxy: Callable[[str, int], TcpProxy],
    tmp_path: Path,
) -> None:
    proxy = tcp_proxy(HOST, urlsplit(redis_url).port or 0)
    outbox = open_outbox(redis_url, sqlite_url)
    options = {"socket_timeout": 1, "socket_connect_timeout": 1}
    env = environment(
        broker=proxy.through(redis_url),
        database=sqlite_url,
        config={"broker_transport_options": options},
    )
    if not works_at_first:
        proxy.stall()
    stored = send(outbox)
    with running(outbox_command("relay", "--sleep", "0.05s"), tmp_path, env) as relay:
        if works_at_first:
            wait_until(lambda: not rows(outbox), 30, "the first delivery")
            proxy.stall()
            stored = send(outbox)
            wait_until(lambda: rows(outbox)[0].claim_token, 15, "the claim")
        connections = wait_until(lambda: proxy.accepted, 15, "a connection")
        relay.send(signal.SIGTERM)
        assert relay.wait(timeout=5) == 0, relay.output
    # It has waited out the one that it was in, and made no other.
    assert proxy.accepted == connections
    assert [(row.task_id, row.claim_token) for row in rows(outbox)] == [(stored, None)]
