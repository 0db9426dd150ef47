"""Relays that are killed at random moments, one after the other, while messages come all the time."""

import random
import threading
from contextlib import ExitStack
from subprocess import TimeoutExpired

from tests.crash.places import PATIENCE, STARTED, Arrivals, Count, Place
from tests.relay.commands import Running
from tests.waiting import wait_until

BATCH = 20
CONCURRENCY = 2
#: Threads of a relay: one more than publish.
THREADS = CONCURRENCY + 1
RELAYS = 2
#: Seconds that a relay has at most, once it works.
LONGEST = 0.5
#: Messages on their way at most; a transaction stores a few.
WAITING = 400
TOGETHER = 10


class Load:
    """Stores and consumes in threads, as web processes and workers do."""

    def __init__(self, place: Place) -> None:
        self.arrivals = Arrivals(place=place)
        self._place = place
        self._is_over = threading.Event()
        self._has_taken = threading.Condition()
        self._threads = [threading.Thread(target=each) for each in (self._store, self._consume)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _store(self) -> None:
        stored, arrived = self._place.stored, self.arrivals.times
        while not self._is_over.is_set():
            with self._has_taken:
                if len(stored) - len(arrived) > WAITING:
                    self._has_taken.wait(0.1)
                    continue
            self._place.store(TOGETHER)

    def _consume(self) -> None:
        while not self._is_over.is_set():
            if not self.arrivals.take():
                self._is_over.wait(0.02)
            with self._has_taken:
                self._has_taken.notify_all()


def kill_at_random(place: Place, kills: int, seed: int) -> Count:
    """Kill relays, let another one finish, and count."""
    chance = random.Random(seed)
    options = ("--batch", str(BATCH), "--concurrency", str(CONCURRENCY))
    with Load(place) as load, ExitStack() as stack:

        def start() -> Running:
            return stack.enter_context(place.relaying(*options))

        relays = [start() for _ in range(RELAYS)]
        for _ in range(kills):
            doomed = relays.pop(0)
            doomed.wait_for(STARTED, PATIENCE)
            if code := _ends_within(doomed, chance.uniform(0, LONGEST)):
                return Count(trouble=f"a relay ended by itself with {code}:\n{doomed.output}")
            doomed.popen.kill()
            relays.append(start())
        arrived = len(load.arrivals.times)
        wait_until(
            lambda: len(load.arrivals.times) > arrived, PATIENCE, "a delivery after the last kill"
        )
    with place.relaying() as relay:
        trouble = place.finish(relay)
    return load.arrivals.count(kills * BATCH * THREADS, trouble)


def _ends_within(relay: Running, seconds: float) -> str:
    try:
        return f"exit code {relay.wait(seconds)}"
    except TimeoutExpired:
        return ""
