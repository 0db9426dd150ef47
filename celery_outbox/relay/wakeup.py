"""Waiting that any thread, and any signal handler, can end."""

from __future__ import annotations

import select
import signal
import socket
import threading
from contextlib import suppress
from datetime import timedelta

__all__ = ["Wakeup"]

#: poll() counts milliseconds in 32 bits.
_LONGEST = timedelta(days=7)


class Wakeup:
    """A bell: ``wait`` ends when it has rung, also if that was before.

    Made of sockets, not of a lock: of CPython's waits with a timeout, those on locks may last for ever
    when a signal interrupts them (3.11, ``SimpleQueue.get``), or deadlock when its handler wants the
    same lock (``Event``).
    """

    def __init__(self) -> None:
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._before: int | None = None

    def __enter__(self) -> Wakeup:
        if threading.current_thread() is threading.main_thread():
            # A signal may come just before the wait begins, or to another thread: it rings by itself.
            self._before = signal.set_wakeup_fd(self._rope.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.set_wakeup_fd(self._before)
        self._bell.close()
        self._rope.close()

    def ring(self) -> None:
        """End the wait, or the next one; without effect when the bell is gone."""
        with suppress(OSError):
            self._rope.send(b"\0")

    def wait(self, duration: timedelta) -> bool:
        """Wait until it has rung, at most ``duration``; whether it has."""
        rung = bool(self._poll.poll(min(duration, _LONGEST) / timedelta(milliseconds=1)))
        if rung:
            self._bell.recv(65536)
        return rung
