"""A relay process whose wall clock is set while it works: its limits and waits stay what they are."""

import os
import time
from pathlib import Path

import pytest

from tests.pages import ROOT
from tests.relay.apps import rows, send
from tests.relay.commands import environment, outbox_command, running
from tests.relay.conftest import OpenOutbox
from tests.waiting import wait_until

#: Read by Python itself before anything else: each second, the wall clock of the process is set anew.
WRONG = """
import time
_began, _time = time.time(), time.time
time.time = lambda: _began + (_time() - _began) * {hours} * 3600
"""
SECONDS = 2


@pytest.mark.parametrize("hours", [2, -2], ids=["forward", "back"])
def test_a_clock_that_is_set_by_hours_neither_shortens_nor_prolongs_the_time_of_a_relay(
    hours: int, open_outbox: OpenOutbox, sqlite_url: str, redis_url: str, tmp_path: Path
) -> None:
    outbox = open_outbox(redis_url, sqlite_url)
    env = environment(broker=redis_url, database=sqlite_url)
    (tmp_path / "sitecustomize.py").write_text(WRONG.format(hours=hours))
    env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    command = outbox_command("relay", "--max-time", f"{SECONDS}s", "--sleep", "0.05")
    with running(command, tmp_path, env) as relay:
        relay.wait_for("Relaying from")
        began = time.monotonic()
        send(outbox)
        wait_until(lambda: not rows(outbox), SECONDS, "the delivery")
        assert relay.wait() == 0, relay.output
        assert SECONDS - 0.5 < time.monotonic() - began < SECONDS + 2
        assert "The relay has worked for as long as it was told to" in relay.output
