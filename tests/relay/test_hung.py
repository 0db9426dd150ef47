"""A relay process told to stop before services that hang: it leaves them after documented limits."""

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from celery_outbox.relay.loop import STOP_SECONDS
from tests.pages import ROOT
from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.relay.apps import make_due, relay_once, rows, send
from tests.relay.commands import environment, outbox_command, running
from tests.relay.conftest import OpenOutbox
from tests.relay.wire import task_ids
from tests.waiting import wait_until

#: How much faster the clock of the hasty process goes.
HASTE = 30
#: Read by Python itself before anything else: time.monotonic() goes faster from then on.
HASTY = f"""
import time
_began, _monotonic = time.monotonic(), time.monotonic
time.monotonic = lambda: _began + (_monotonic() - _began) * {HASTE}
"""


def test_the_limit_is_the_one_that_the_page_says() -> None:
    page = (ROOT / "docs" / "relay.md").read_text()
    (seconds,) = re.findall(r"A batch under way is waited for at most (\d+) seconds", page)
    assert float(seconds) == STOP_SECONDS


def test_a_relay_whose_broker_hangs_leaves_it_after_the_limit_with_exit_code_0(
    open_outbox: OpenOutbox,
    tcp_proxy: Callable[[str, int], TcpProxy],
    redis_url: str,
    postgresql_url: str,
    tmp_path: Path,
) -> None:
    wire = tcp_proxy(HOST, urlsplit(redis_url).port or 0)
    outbox = open_outbox(redis_url, postgresql_url)
    env = environment(
        broker=wire.through(redis_url),
        database=postgresql_url,
        settings={"retry_after": 3600},
        config={"broker_transport_options": {"socket_timeout": 600}},
    )
    # Forty-five seconds by the clock that the process goes by; a test shall not take as long.
    (tmp_path / "sitecustomize.py").write_text(HASTY)
    env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    stored = [send(outbox)]
    with running(outbox_command("relay"), tmp_path, env) as relay:
        wait_until(lambda: not rows(outbox), 30, "the first delivery")
        wire.hold_replies()
        stored.append(send(outbox))
        wait_until(lambda: task_ids(redis_url) == stored, 10, "the batch at the broker")
        began = time.monotonic()
        relay.send(signal.SIGTERM)
        assert relay.wait() == 0, relay.output
        took = (time.monotonic() - began) * HASTE
        assert STOP_SECONDS - 1 < took < STOP_SECONDS + 2 * HASTE
        assert "The relay leaves a batch behind that is under way" in relay.output
        assert "Traceback" not in relay.output
    (kept,) = rows(outbox)
    assert (kept.task_id, kept.attempts) == (stored[1], 1)
    assert kept.claim_token
    wire.resume()
    make_due(outbox)
    relay_once(outbox)
    assert (task_ids(redis_url), rows(outbox)) == ([*stored, stored[1]], [])


@pytest.mark.parametrize(("hangs", "mode"), [("broker", ()), ("broker", ("--once",)), ("database", ())])
def test_a_relay_that_waits_for_a_service_that_hangs_is_out_within_two_seconds(
    hangs: str,
    mode: Sequence[str],
    open_outbox: OpenOutbox,
    tcp_proxy: Callable[[str, int], TcpProxy],
    redis_url: str,
    postgresql_url: str,
    tmp_path: Path,
) -> None:
    urls = {"broker": redis_url, "database": postgresql_url}
    wire = tcp_proxy(HOST, urlsplit(urls[hangs]).port or 0)
    outbox = open_outbox(redis_url, postgresql_url)
    env = environment(**urls | {hangs: wire.through(urls[hangs])})
    if hangs == "broker":
        wire.stall()  # from the start: a batch that is in hand would be waited for
    stored = send(outbox)
    with running(outbox_command("relay", "--sleep", "0.1", *mode), tmp_path, env) as relay:
        if hangs == "database":
            wait_until(lambda: not rows(outbox), 30, "the first delivery")
            wire.stall()
            wire.cut()
            stored = send(outbox)
        before = wire.accepted
        wait_until(lambda: wire.accepted > before or wire.live, 10, "a connection, which hangs")
        began = time.monotonic()
        relay.send(signal.SIGTERM)
        assert relay.wait() == 0, relay.output
        took = time.monotonic() - began
    assert [(row.task_id, row.attempts, row.claim_token) for row in rows(outbox)] == [(stored, 0, None)]
    assert took < 2
