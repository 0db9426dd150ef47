"""Relays that are killed at random moments, one after the other, while messages come all the time."""

import random
import threading
from contextlib import ExitStack
from subprocess import TimeoutExpired

from tests.crash.places import PATIENCE, STARTED, Arrivals, Count, Place
from tests.relay.commands import Running

BATCH = 20
CONCURRENCY = 2
#: Threads of a relay: one more than publish.
THREADS = CONCURRENCY + 1
RELAYS = 2
#: Seconds that a relay has at most, once it works.
LONGEST = 0.5
#: Rows at most; a transaction stores a few.
WAITING = 400
TOGETHER = 20


class Load:
    """Stores and consumes in threads, as web processes and workers do.

    Nobody consumes from a FIFO queue: moto, unlike SQS, forgets with a message that it had it.
    """

    def __init__(self, place: Place) -> None:
        self.arrivals = Arrivals(place=place)
        self._place = place
        self._is_over = threading.Event()
        work = [self._store] if place.queue.endswith(".fifo") else [self._store, self._consume]
        self._threads = [threading.Thread(target=each) for each in work]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _store(self) -> None:
        while not self._is_over.is_set():
            if len(self._place.rows()) < WAITING:
                self._place.store(TOGETHER)
            else:
                self._is_over.wait(0.02)

    def _consume(self) -> None:
        with self.arrivals.reading() as take:
            while not self._is_over.is_set():
                if not take():
                    self._is_over.wait(0.02)


def kill_at_random(place: Place, kills: int, seed: int) -> Count:
    """Kill relays, let the last ones finish, and count."""
    chance = random.Random(seed)
    options = ("--batch", str(BATCH), "--concurrency", str(CONCURRENCY))
    with ExitStack() as stack:

        def start() -> Running:
            return stack.enter_context(place.relaying(*options))

        relays = [start() for _ in range(RELAYS)]
        with Load(place) as load:
            for _ in range(kills):
                doomed = relays.pop(0)
                doomed.wait_for(STARTED, PATIENCE)
                if code := _ends_within(doomed, chance.uniform(0, LONGEST)):
                    return Count(trouble=f"a relay ended by itself with {code}:\n{doomed.output}")
                doomed.popen.kill()
                relays.append(start())
        troubles = [place.finish(relay) for relay in relays]
    return load.arrivals.count(kills * BATCH * THREADS, "".join(troubles))


def _ends_within(relay: Running, seconds: float) -> str:
    try:
        return f"exit code {relay.wait(seconds)}"
    except TimeoutExpired:
        return ""
