"""``monitor --watch``: looks again and again; a live page on a terminal, a block of lines elsewhere.

The main thread draws, and sleeps until there is something to draw: a look that has ended, a key, a
signal, another size of the terminal. It never waits for a database.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from types import FrameType
from typing import ClassVar

import click
from rich.console import Console
from rich.live import Live

from ..monitoring import Backlog, Looking, announce
from ..storage.database import Database
from .backlogs import write_lines
from .page import History, page

__all__ = ["watch"]

_ENDING = frozenset({signal.SIGINT, signal.SIGTERM})
#: Another size, or back from a stop: what is on the terminal is not what was drawn.
_REDRAWING = frozenset({signal.SIGWINCH, signal.SIGCONT})


def watch(
    databases: Sequence[Database], look: Callable[[Database], Backlog], interval: timedelta
) -> None:
    """Look at the databases every ``interval`` until somebody quits."""
    console = Console(highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        surface: _Surface = _Page(console, interval)
    else:
        surface = _Lines()
    waking = Waking()
    histories = [History(Looking(each, look, on_end=waking.wake)) for each in databases]
    with waking.woken_by(_ENDING | _REDRAWING | surface.signals), surface.open():
        _run(histories, surface, waking, interval.total_seconds())


def _run(histories: Sequence[History], surface: _Surface, waking: Waking, interval: float) -> None:
    keys = surface.keys
    next_look = time.monotonic()
    while True:
        if time.monotonic() >= next_look:
            surface.end_round(histories)
            for history in histories:
                history.looking.begin()
            next_look = max(next_look + interval, time.monotonic())
        came, has_key = waking.wait(next_look - time.monotonic(), *keys)
        if came & _ENDING or (has_key and _quits(os.read(keys[0], 64))):
            return
        surface.obey(came)
        for history in histories:
            backlog = history.update()
            if backlog is not None and history.has_become_busy:
                announce(backlog)
        surface.show(histories)


class Waking:
    """A pipe that ends every wait: a signal writes its number into it, a look that has ended a zero."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def wake(self) -> None:
        """End the wait; from any thread."""
        # A pipe that is full ends it anyway.
        with suppress(BlockingIOError):
            os.write(self._writer, b"\0")

    def wait(self, seconds: float, *others: int) -> tuple[set[int], bool]:
        """Wait; return the signals that came, and whether another file descriptor can be read."""
        # No longer than an hour at once: what looks again too early looks in vain.
        timeout = min(max(0.0, seconds), 3600.0)
        ready, _, _ = select.select([self._reader, *others], [], [], timeout)
        came = set(os.read(self._reader, 4096)) if self._reader in ready else set()
        return came - {0}, any(other in ready for other in others)

    @contextmanager
    def woken_by(self, numbers: Collection[signal.Signals]) -> Iterator[None]:
        """In the block these signals do nothing but end the wait."""
        before = {number: signal.signal(number, _nothing) for number in numbers}
        writer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(writer)
            for number, handler in before.items():
                signal.signal(number, handler)


def _quits(typed: bytes) -> bool:
    """Whether it was q, Ctrl-C, Ctrl-D or Esc alone; or nothing: the terminal is gone."""
    return typed in {b"", b"\x1b"} or bool(set(typed) & set(b"qQ\x03\x04"))


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler, so that Python tells of the signal."""


class _Surface(ABC):
    """Where the backlogs are shown."""

    #: Signals beside those that end and redraw.
    signals: ClassVar[frozenset[signal.Signals]] = frozenset()
    #: File descriptors of the keyboard.
    keys: Sequence[int] = ()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Take the terminal, and leave it as it was."""
        yield

    def obey(self, signals: set[int]) -> None:
        """Do what signals of its own ask for."""

    @abstractmethod
    def show(self, histories: Sequence[History]) -> None:
        """Show what is known now."""

    def end_round(self, histories: Sequence[History]) -> None:
        """Show what has not been shown, before the next looks begin."""


class _Lines(_Surface):
    """A block of lines for each round of looks, for a file or a pipe."""

    def __init__(self) -> None:
        self._is_shown = True

    def show(self, histories: Sequence[History]) -> None:
        """Write the block when every database has answered."""
        if not self._is_shown and not any(history.looking.is_running for history in histories):
            self._write(histories)

    def end_round(self, histories: Sequence[History]) -> None:
        """Write the block without those that have not answered."""
        if not self._is_shown:
            self._write(histories)
        self._is_shown = False

    def _write(self, histories: Sequence[History]) -> None:
        self._is_shown = True
        click.echo(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC")
        for history in histories:
            found = history.current
            if isinstance(found, Backlog):
                write_lines(found)
            else:
                click.echo(f"Error: {found}")
        click.echo()


class _Page(_Surface):
    """A page that fills the terminal, and is drawn anew whenever there is anything new."""

    signals: ClassVar[frozenset[signal.Signals]] = frozenset({signal.SIGTSTP})

    def __init__(self, console: Console, interval: timedelta) -> None:
        self._console = console
        self._interval = interval
        self._live = Live(console=console, screen=True, auto_refresh=False)
        if sys.stdin.isatty():
            self.keys = (sys.stdin.fileno(),)
            self._before = termios.tcgetattr(sys.stdin)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Take the other screen, hide the cursor, read keys without their echo; then undo it."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def obey(self, signals: set[int]) -> None:
        """Stop, as Ctrl-Z asks for, with the terminal as it was before."""
        if signal.SIGTSTP in signals:
            self._leave()
            os.kill(os.getpid(), signal.SIGSTOP)
            self._enter()

    def show(self, histories: Sequence[History]) -> None:
        """Draw it."""
        drawn = page(histories, self._interval, self._console.width)
        self._live.update(drawn, refresh=True)

    def _enter(self) -> None:
        if self.keys:
            tty.setcbreak(sys.stdin)
        self._live.start()

    def _leave(self) -> None:
        self._live.stop()
        if self.keys:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)
