"""The real commands, as processes: run to their end, or started and stopped by a test."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
PROJECT = "tests.relay.shop"


def environment(
    *, broker: str, database: str, settings: Any = None, config: Any = None
) -> dict[str, str]:
    """Say to a process of the project which servers are its own, and its settings."""
    return {
        **os.environ,
        "SHOP_BROKER": broker,
        "SHOP_DATABASE": database,
        "SHOP_SETTINGS": json.dumps(settings or {}),
        "SHOP_CONFIG": json.dumps(config or {}),
    }


def program(name: str) -> str:
    """Return the path of a console script of the environment that runs the tests."""
    return str(Path(sys.executable).parent / name)


def outbox_command(*arguments: str, app: str = PROJECT) -> list[str]:
    """The ``celery-outbox`` command for the project."""
    return [program("celery-outbox"), "-A", app, *arguments]


def run(
    command: list[str], env: dict[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return its exit code and what it printed."""
    return subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A started process and the file that holds what it prints."""

    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        """What the process has printed so far."""
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, timeout: float = 30) -> None:
        """Wait until the process has printed ``text``."""

        def has_it() -> bool:
            if text in self.output:
                return True
            assert self.popen.poll() is None, f"ended early:\n{self.output}"
            return False

        wait_until(has_it, timeout, f"{text!r} in the output")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        self.popen.send_signal(number)

    def wait(self, timeout: float = 15) -> int:
        """Wait for the end of the process and return its exit code."""
        return self.popen.wait(timeout)


@contextmanager
def running(
    command: list[str], directory: Path, env: dict[str, str] | None = None
) -> Iterator[Running]:
    """Run a command beside the test; whatever is left of its group is killed at the end."""
    log = directory / f"{Path(command[0]).name}-{len(list(directory.iterdir()))}.log"
    with log.open("wb") as output:
        popen = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Running(popen=popen, log=log)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()
