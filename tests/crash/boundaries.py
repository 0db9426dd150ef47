"""A relay that dies at a boundary of a delivery, and the next one that finishes."""

import signal
from dataclasses import dataclass
from subprocess import TimeoutExpired

from tests.crash.places import PATIENCE, Arrivals, Count, Place

#: Messages of a cell.
STORED = 50
#: A batch of a backlog: settled in the transaction that claims the next one.
SMALL = 10
#: Threads of a relay with ``--concurrency 1``: one publishes, one writes.
THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Where a relay dies.

    Attributes:
        batch: of how many messages; with fewer than are stored, the relay works with two batches.
        allowed: how many messages may arrive twice: what the broker may have taken, and no committed
            settlement has deleted.
    """

    phase: str
    moment: str
    batch: int
    allowed: int

    @property
    def name(self) -> str:
        """As the relay that shall die is told."""
        return f"{self.phase} {self.moment}"


def _whole(phase: str, moment: str, allowed: int) -> Boundary:
    return Boundary(phase=phase, moment=moment, batch=STORED, allowed=allowed)


def _small(phase: str, moment: str, allowed: int) -> Boundary:
    return Boundary(phase=phase, moment=moment, batch=SMALL, allowed=allowed)


BOUNDARIES = (
    _whole("claim", "before", 0),
    _whole("claim", "during", 0),
    _whole("claim", "after", 0),
    _whole("publish", "before", 0),
    _whole("publish", "during", STORED),
    _whole("publish", "after", STORED),
    _whole("settle", "before", STORED),
    _whole("settle", "during", STORED),
    _whole("settle", "after", 0),
    # The one that is settled, and the one that is being published meanwhile.
    _small("next", "before", SMALL * THREADS),
    _small("next", "during", SMALL * THREADS),
    _small("next", "after", SMALL),
)


def crash(place: Place, boundary: Boundary) -> Count:
    """Store, let one relay die and another one finish, and count."""
    place.store(STORED)
    with place.relaying("--batch", str(boundary.batch), crash=boundary.name) as doomed:
        try:
            code = doomed.wait(PATIENCE)
        except TimeoutExpired:
            return Count(trouble=f"not killed:\n{doomed.output}")
        if code != -signal.SIGKILL:
            return Count(trouble=f"not killed, but ended with {code}:\n{doomed.output}")
    with place.relaying() as relay:
        trouble = place.finish(relay)
    return Arrivals(place=place).count(boundary.allowed, trouble)
