"""What waits in the databases, read when somebody asks, and not again for some seconds.

However many ask, a database is asked at most every few seconds; one that hangs keeps nobody waiting
for longer than was said, and none of the others.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from ..monitoring import Backlog, Looking, look
from ..relay.heartbeat import without_signals
from ..storage.database import Database

__all__ = ["PATIENCE", "Backlogs", "Reading"]

#: How long a reading counts.
EVERY = timedelta(seconds=5)
#: How long a database may take before it counts as away.
PATIENCE = timedelta(seconds=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What was found in one database.

    Attributes:
        backlog: None: it could not be read.
        ready_for: by broker, how long the message that is due first has been ready.
    """

    database: str
    backlog: Backlog | None = None
    ready_for: Mapping[str, timedelta]


class Backlogs:
    """Reads the backlogs of some databases; safe for threads.

    Args:
        brokers: those that are relayed to.
    """

    def __init__(
        self, databases: Sequence[Database], brokers: Collection[str], *, every: timedelta = EVERY
    ) -> None:
        self._brokers = brokers
        self._every = every
        self._ready: dict[str, Mapping[str, timedelta]] = {}
        # One in memory belongs to the thread that has opened it.
        self._looks = [Looking(each, self._look) for each in databases if not each.is_for_one_thread]
        self._beginning = threading.Lock()

    def read(self, patience: timedelta = PATIENCE) -> Sequence[Reading]:
        """What waits in each database, waited for as long as ``patience``."""
        with self._beginning, without_signals():
            for each in self._looks:
                if each.lasts >= self._every:
                    each.begin()
        return [self._reading(each, patience) for each in self._looks]

    def _reading(self, looking: Looking, patience: timedelta) -> Reading:
        found, name = looking.result(patience), looking.database.name
        if looking.is_running and looking.lasts < PATIENCE:
            found = looking.found or found  # not known to be away: what was found last still counts
        if isinstance(found, Backlog):
            return Reading(database=name, backlog=found, ready_for=self._ready[name])
        return Reading(database=name, ready_for={})

    def _look(self, database: Database) -> Backlog:
        found, store = look(database, brokers=self._brokers), database.store
        ages = {
            broker: database.read(partial(store.ready_for, broker=broker)) for broker in self._brokers
        }
        self._ready[database.name] = {
            broker: timedelta(seconds=age) for broker, age in ages.items() if age is not None
        }
        return found
