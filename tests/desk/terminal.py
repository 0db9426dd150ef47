"""Commands on a pseudo-terminal, where somebody may answer."""

import os
import pty
import re
import struct
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from fcntl import ioctl
from termios import TIOCSWINSZ

from tests.relay.commands import ROOT, outbox_command
from tests.schema.test_check import PROJECT, environment
from tests.schema.test_commands import read_all


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What is to be seen on the terminal, what was sent to it, and the exit code."""

    text: str
    sent: str
    exit_code: int


def call_on_terminal(
    *arguments: str,
    answer: str = "",
    columns: int = 80,
    told: Mapping[str, str] | None = None,
    **databases: str,
) -> Shown:
    """Call a command on a terminal of so many columns, at which ``answer`` has been typed."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    os.write(ours, answer.encode())
    env = {**environment(**databases), "TERM": "xterm", **(told or {})}
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
    exit_code = process.wait(timeout=30)
    assert "Traceback" not in shown
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown).replace("\r", "")
    return Shown(text=text, sent=shown, exit_code=exit_code)
