"""The stub of SQS in a process of its own, so that it takes no time from who asks it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stub_in_a_process(seconds: float) -> Iterator[str]:
    """Run a stub that answers after ``seconds``; its URL for Kombu."""
    command = [sys.executable, "-m", "tests.publishers.sqs_stub", str(seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate()
