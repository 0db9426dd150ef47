"""Whether a relay is alive and moves, and whether it delivers: for probes.

Red is what a restart may help against, and green by itself when it is over. That a database is away is
not: another process would meet it, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from ..relay.observing import Pulse
from .backlogs import Backlogs

__all__ = ["Health", "Verdict"]

#: How long the main loop may stand still: longer than any answer of a broker is waited for there.
WATCH_SECONDS = 60.0
#: Kubernetes' probes wait for one second.
PATIENCE = timedelta(seconds=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether it is well, and why not; the notes tell what is not known."""

    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.reasons


class Health:
    """Asks a relay's pulse, and the backlogs.

    Args:
        unhealthy_after: for how long messages may be ready; None: that is not looked at.
    """

    def __init__(
        self, pulse: Pulse, backlogs: Backlogs, *, unhealthy_after: timedelta | None = None
    ) -> None:
        self._pulse = pulse
        self._backlogs = backlogs
        self._unhealthy_after = unhealthy_after

    def live(self) -> Verdict:
        """Whether it moves."""
        reasons, notes = list(self._hanging()), list[str]()
        if self._unhealthy_after is not None and not self._pulse.is_paused:
            self._look_at_ages(self._unhealthy_after, reasons, notes)
        if self._pulse.is_paused:
            notes.append("the relay is paused")
        return Verdict(reasons=tuple(reasons), notes=tuple(notes))

    def ready(self) -> Verdict:
        """Whether it delivers."""
        return Verdict(reasons=tuple(self._idle()))

    def _hanging(self) -> Iterator[str]:
        pulse, now = self._pulse, time.monotonic()
        late = max((now - limit for limit in list(pulse.limits.values())), default=0.0)
        if late > 0:
            yield f"a batch should have been settled {late:.0f} s ago"
        if pulse.is_stopping:
            return  # it waits for its threads, but not for ever
        if pulse.watched_at is not None and now - pulse.watched_at > WATCH_SECONDS:
            yield f"the main loop has not moved for {now - pulse.watched_at:.0f} s"
        dead = [each.name for each in pulse.threads if not each.is_alive()]
        if dead and not pulse.is_finite:
            yield f"threads have ended: {', '.join(dead)}"

    def _look_at_ages(self, limit: timedelta, reasons: list[str], notes: list[str]) -> None:
        for reading in self._backlogs.read(PATIENCE):
            if reading.backlog is None:
                notes.append(
                    f"database {reading.database} could not be read: how long its messages have been "
                    "ready is not known"
                )
            for broker, age in reading.ready_for.items():
                if age > limit:
                    reasons.append(
                        f"a message for broker {broker} in database {reading.database} has been ready "
                        f"for {age.total_seconds():.0f} s, longer than {limit.total_seconds():g} s"
                    )

    def _idle(self) -> Iterator[str]:
        pulse = self._pulse
        if pulse.is_stopping:
            yield "the relay is stopping"
        elif pulse.watched_at is None:
            yield "the relay has not begun"
        elif pulse.is_paused:
            yield "the relay is paused"
        elif not pulse.used - self._away():
            yield "no database can be used"

    def _away(self) -> set[str]:
        return {each.database for each in self._backlogs.read(PATIENCE) if each.backlog is None}
