"""Stopping a relay: at any instant, from a signal handler."""

import subprocess
import sys

from tests.relay.commands import ROOT

#: Ends an idle relay by a signal again and again, each time a little later in its loop.
SIGNALS = """
import random
import signal
import sys
from datetime import timedelta

from celery_outbox.policy import RetryPolicy
from celery_outbox.relay.loop import Relay, RelayOptions

for _ in range(4000):
    relay = Relay(
        [],
        {},
        RelayOptions(
            sleep=timedelta(microseconds=20), lease=timedelta(minutes=5), retry=RetryPolicy()
        ),
    )
    signal.signal(signal.SIGALRM, lambda *_: relay.stop())
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00005, 0.0005))
    relay.run()
"""


def test_a_signal_stops_a_relay_wherever_it_is() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNALS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
