"""The pictures of docs/operations.md: the real commands on a terminal, which tmux emulates.

The times are moved, so that the pictures stay the same from one day to the next.
"""

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from rich.text import Text

from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
from celery_outbox.storage.schema import FAR_FUTURE
from tests.pages import ROOT
from tests.pictures.drawing import draw
from tests.relay.commands import program
from tests.storage.rows import add, change, claim, make_message
from tests.waiting import wait_until

WIDEST, WIDE, NARROW = 180, 100, 45
SUFFIXES = {WIDEST: "-wide", WIDE: "", NARROW: "-narrow"}
NOW = datetime.now(UTC).replace(microsecond=0)
SHOWN_NOW = datetime(2030, 1, 31, 12, 0, tzinfo=UTC)
TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")

CLOCK = re.compile(r"0\.\d\d s (ahead of|behind)\s+this\s+machine's")

PROJECT = """
from celery import Celery
from celery_outbox import Outbox

app = Celery("shop", broker="redis://localhost:1/0")
outbox = Outbox(app, databases={"shop": "sqlite:///shop.db", "billing": "sqlite:///billing.db"})
"""
REFUSED = "OperationalError: Error 111 connecting to reports.example.org:6379. Connection refused."
MANY = 1204


def minutes(number: float) -> datetime:
    return NOW + timedelta(minutes=number)


#: Messages of "shop": their columns, but for the defaults.
MESSAGES: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
    (
        "3e1d9c52-6a0f-4b7e-8d55-1f0a9c3b7e21",
        {"task_name": "shop.send_receipt"},
        {"scheduled_at": minutes(-2.5)},
    ),
    (
        "8f14e45f-ceea-467f-9a0b-1c2d3e4f5a6b",
        {"task_name": "shop.monthly_report", "broker": "reports", "queue": "slow"},
        {"scheduled_at": minutes(3.5), "attempts": 5, "error": REFUSED},
    ),
    (
        "c9f0f895-fb98-4b91-8f4a-7d6e5c4b3a29",
        {"task_name": "shop.remind"},
        {"scheduled_at": minutes(150.5), "deliver_at": minutes(150.5)},
    ),
    (
        "45c48cce-2e2d-4fbd-9a3e-0c1b2a3d4e5f",
        {"task_name": "shop.monthly_report", "broker": "reports", "queue": "slow"},
        {
            "scheduled_at": FAR_FUTURE,
            "attempts": 20,
            "max_attempts": 20,
            "finished_at": minutes(-125),
            "error": REFUSED,
        },
    ),
]
RESERVED = "d3d94468-02a4-4259-b55d-38e6d163e820"
RECEIPT, REPORT, REMINDER, FAILED = (task_id for task_id, _, _ in MESSAGES)
GONE = "6512bd43-d9ca-46e0-9c99-0b0a82652dca"

#: Names of pictures, and the arguments; those that ask are shown asking.
SCREENS = {
    "list": ["list"],
    "find": ["find", REPORT, GONE],
    "forget": ["forget", REMINDER],
    "retry": ["retry", REPORT, RECEIPT],
    "reschedule": ["reschedule", REMINDER, "--eta", f"{minutes(30):%Y-%m-%dT%H:%M:%SZ}"],
    "prune": ["prune", "--older-than", "7d", "--database", "shop"],
    "check": ["schema", "check"],
}
#: Those that look otherwise where there is little room, or much.
COLUMNS = {
    "list": [WIDEST, WIDE, NARROW],
    "find": [WIDE, NARROW],
    "forget": [WIDE, NARROW],
    "check": [WIDE, NARROW],
}


def draw_desk() -> None:
    """Draw what each command shows."""
    for name, arguments in SCREENS.items():
        for columns in COLUMNS.get(name, [WIDE]):
            with tempfile.TemporaryDirectory() as directory:
                fill(Path(directory), name)
                screen = shown(Path(directory), columns, arguments)
            line = f"$ celery-outbox -A shop {shlex.join(arguments)}"
            picture = Text.from_ansi(moved(f"{line}\n{screen}"))
            draw(f"{name}{SUFFIXES[columns]}", name, picture, columns)


def fill(directory: Path, picture: str) -> None:
    """Make a project with two databases, and what the picture is about."""
    (directory / "shop.py").write_text(PROJECT)
    for name in ("shop",) if picture == "check" else ("shop", "billing"):
        engine = sa.create_engine(f"sqlite:///{directory / name}.db")
        database = Database(name, engine, "celery_outbox")
        install(database)
        if name == "shop":
            store(database, kept=MANY if picture == "prune" else 0)
        engine.dispose()


def store(database: Database, kept: int) -> None:
    add(database, make_message(RESERVED, task_name="shop.charge", queue="billing"))
    claim(database, lease=timedelta(minutes=4.5))
    change(database, RESERVED, lease_until=minutes(4.5))
    for task_id, message, columns in MESSAGES:
        add(database, make_message(task_id, **message))
        change(database, task_id, **columns)
    add(database, *(make_message(f"kept {number}") for number in range(kept)))
    table = database.tables.messages
    ended = {"scheduled_at": FAR_FUTURE, "finished_at": minutes(-60 * 24 * 9)}
    with database.begin() as connection:
        connection.execute(sa.update(table).where(table.c.task_id.startswith("kept")).values(ended))


def shown(directory: Path, columns: int, arguments: list[str]) -> str:
    """The screen of a terminal when the command has ended, or waits for an answer."""
    server = ["tmux", "-L", f"pictures-{os.getpid()}", "-f", os.devnull]
    command = [program("celery-outbox"), "-A", "shop", *arguments]
    told = {**os.environ, "PYTHONPATH": str(ROOT)}
    size = ["-x", str(columns), "-y", "60"]

    def tmux(*words: str) -> str:
        done = subprocess.run(
            [*server, *words], cwd=directory, env=told, capture_output=True, text=True, check=True
        )
        return done.stdout

    def is_at_its_end() -> bool:
        is_dead = tmux("display-message", "-p", "#{pane_dead}").strip() == "1"
        return is_dead or "[y/N]" in tmux("capture-pane", "-p")

    # A pane whose command has ended is to stay; its own line about that is to be none.
    tmux(
        "new-session", "-d", *size, "cat", ";",
        "set-option", "-g", "remain-on-exit", "on", ";",
        "set-option", "-g", "remain-on-exit-format", "", ";",
        "set-option", "-g", "status", "off", ";",
        "respawn-pane", "-k", shlex.join(command),
    )  # fmt: skip
    try:
        wait_until(is_at_its_end, 30, f"the end of {shlex.join(arguments)}")
        return tmux("capture-pane", "-p", "-e").rstrip()
    finally:
        tmux("kill-server")


def moved(text: str) -> str:
    """The text with its times counted from another now, and clocks that agree."""

    def move(found: re.Match[str]) -> str:
        time = datetime.fromisoformat(f"{found[0]}+00:00")
        return f"{time - NOW + SHOWN_NOW:%Y-%m-%d %H:%M:%S}"

    eta = re.compile(r"(?<=--eta )\S+")
    text = eta.sub(lambda found: f"{SHOWN_NOW + timedelta(minutes=30):%Y-%m-%dT%H:%MZ}", text)
    text = CLOCK.sub("0.00 s behind this machine's", text)
    return TIME.sub(move, text)
