"""The real command on a pseudo-terminal: its size, its keys, and what is to be seen on it."""

import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import ioctl
from typing import Any

from tests.relay.commands import ROOT, outbox_command
from tests.schema.test_check import PROJECT, environment
from tests.schema.test_commands import read_all
from tests.waiting import wait_until

#: What rich writes before it draws a page anew.
HOME = "\x1b[H"
OTHER_SCREEN, FIRST_SCREEN = "\x1b[?1049h", "\x1b[?1049l"
SHOWN_CURSOR = "\x1b[?25h"


class Terminal:
    """A pseudo-terminal with a process on it."""

    def __init__(self, columns: int, *arguments: str, lines: int = 50, **databases: str) -> None:
        self._ours, self._theirs = pty.openpty()
        self.resize(columns, lines)
        self.settings_before = self.settings
        env = {**environment(**databases), "TERM": "xterm"}
        self.process = subprocess.Popen(
            outbox_command(*arguments, app=PROJECT),
            cwd=ROOT,
            env={name: value for name, value in env.items() if name not in {"COLUMNS", "LINES"}},
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            start_new_session=True,
            preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._written = bytearray()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    @property
    def settings(self) -> list[Any]:
        """Echo, line mode and the like."""
        return termios.tcgetattr(self._theirs)

    @property
    def written(self) -> str:
        """Everything that the process has written."""
        return self._written.decode(errors="replace")

    @property
    def page(self) -> str:
        """The page that was drawn last, without colours."""
        last = bytes(self._written[-100_000:]).rpartition(HOME.encode())[2]
        return plain(last.decode(errors="replace"))

    def resize(self, columns: int, lines: int) -> None:
        """Give it another size; the process gets a SIGWINCH."""
        ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: str) -> None:
        """Type on its keyboard."""
        os.write(self._ours, keys.encode())

    def wait_for(self, *texts: str) -> str:
        """Wait until the page shows all of these; return it."""

        def shows_them() -> str:
            page = self.page
            assert self.process.poll() is None, f"ended early:\n{self.written}"
            return page if all(text in page for text in texts) else ""

        return wait_until(shows_them, 20, f"{texts} on the page")

    def wait(self) -> int:
        """Wait for the end of the process; return its exit code."""
        return self.process.wait(timeout=15)

    def close(self) -> None:
        """End the process, whatever it does."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._theirs)
        self._reading.join(timeout=10)
        os.close(self._ours)

    def _read(self) -> None:
        with suppress(OSError):  # Linux says so at the end
            while chunk := os.read(self._ours, 65536):
                self._written += chunk


@contextmanager
def terminal(columns: int, *arguments: str, **databases: str) -> Iterator[Terminal]:
    """Run a command of the project on a pseudo-terminal of so many columns."""
    opened = Terminal(columns, *arguments, **databases)
    try:
        yield opened
    finally:
        opened.close()


def on_a_terminal(columns: int, *arguments: str, **databases: str) -> str:
    """Run a command to its end, with exit code 0, and return what is to be seen."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = {**environment(**databases), "TERM": "xterm"}
    process = subprocess.Popen(
        outbox_command(*arguments, app=PROJECT),
        cwd=ROOT,
        env={name: value for name, value in env.items() if name not in {"COLUMNS", "LINES"}},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = read_all(ours)
    assert process.wait(timeout=30) == 0, shown
    return plain(shown)


def plain(text: str) -> str:
    """``text`` without what a terminal obeys."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "")
