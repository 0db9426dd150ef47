"""How a batch ends: its rows are written, counted, and told to whoever listens."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from sqlalchemy.engine import Connection

from ..message import ClaimedMessage
from ..publishing import Outcome
from ..signals import outbox_failed, outbox_published
from ..storage.store import Claim, Failure
from .limits import Budget
from .lines import Parted
from .observing import Observer, Settled
from .turns import Turn, Turns

__all__ = ["Result", "Settler"]

logger = logging.getLogger(__name__)

#: Messages that one line of the log names.
NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A batch that has been published, and what is to be written of it."""

    turn: Turn
    claim: Claim
    parted: Parted
    outcome: Outcome
    failures: dict[int, Failure]
    behind: dict[int, timedelta]
    published_at: float = field(default_factory=time.monotonic)

    @property
    def unsent(self) -> set[int]:
        """Those that are put back as they were."""
        return set(self.outcome.unsent) - self.behind.keys()


class Settler:
    """Writes what became of batches; safe for threads.

    Attributes:
        delivered: messages that a broker has taken.
        lease_lost: messages that another relay had taken over when they were to be settled.
    """

    def __init__(
        self, turns: Turns, budget: Budget, *, keep: bool, observer: Observer | None = None
    ) -> None:
        self.delivered = 0
        self.lease_lost = 0
        self._turns = turns
        self._budget = budget
        self._keep = keep
        self._observer = observer
        self._counting = threading.Lock()
        #: By their databases, those whose end could not be written.
        self._owed: defaultdict[str, list[Result]] = defaultdict(list)

    def settle(self, result: Result, *, again: bool = False) -> None:
        """Write what became of a batch, and tell it. Raises OutboxError when that is impossible.

        ``again``: it may have been written before, and only the answer was lost.
        """
        try:
            settled = self._write(result)
        except Exception:
            result.turn.lines.lapse(result.parted, result.outcome.accepted)
            self._owed[result.turn.database.name].append(result)
            raise
        if again and not settled:
            settled = len(result.claim.messages)
        self.note_settled(result, settled)

    def owe(self, turn: Turn, claim: Claim) -> None:
        """A batch is to be put back, if it was claimed at all."""
        rows = {message.id for message in claim.messages}
        parted = Parted(messages=claim.messages, free=claim.messages, names={})
        self._owed[turn.database.name].append(
            Result(
                turn=turn,
                claim=claim,
                parted=parted,
                outcome=Outcome(unsent=rows),
                failures={},
                behind={},
            )
        )

    def settle_owed(self, database: str) -> None:
        """Write what could not be written before, as long as its lease holds. Raises like ``settle``.

        What was published would be published again when its lease is over.
        """
        owed = self._owed[database]
        while owed:
            try:
                result = owed.pop()
            except IndexError:  # another thread was faster
                return
            if time.monotonic() < result.claim.expires:
                self.settle(result, again=True)

    def _write(self, result: Result) -> int:
        with self._turns.asking(result.turn):
            return result.turn.database.run(self.writing(result))

    def writing(self, result: Result) -> Callable[[Connection], int]:
        """What writes the end of a batch; it returns how many messages were still ours."""
        outcome, token, store = result.outcome, result.claim.token, result.turn.database.store

        def write(connection: Connection) -> int:
            count = 0
            if outcome.accepted:
                ids = sorted(outcome.accepted)
                count += store.accept(connection, token, ids, keep=self._keep)
            if outcome.deferred:
                count += store.defer(connection, token, sorted(outcome.deferred))
            if result.unsent:
                count += store.release(connection, token, sorted(result.unsent))
            if result.failures:
                count += store.fail(connection, token, result.failures)
            if result.behind:
                # After the failed ones, so that their times are later.
                count += store.postpone(connection, token, result.behind)
            return count

        return write

    def note_settled(self, result: Result, settled: int) -> None:
        """Count and tell a batch of which ``settled`` messages were still ours."""
        turn, outcome = result.turn, result.outcome
        if result.unsent:
            turn.horizon.forget()  # they lie behind it, and come first
        self._budget.give_back(len(result.unsent) + len(result.behind))
        lost = len(result.claim.messages) - settled
        with self._counting:
            self.delivered += len(outcome.accepted)
            self.lease_lost += lost
        if lost:
            logger.warning(
                "The lease of a batch ended before it was settled: %d of %d messages belong to another "
                "relay now",
                lost,
                len(result.claim.messages),
                extra={"database": turn.database.name, "broker": turn.broker},
            )
        if self._observer is not None:
            self._observer.settled(_observed(result, lost))
        self._tell(result)

    def _tell(self, result: Result) -> None:
        turn, outcome = result.turn, result.outcome
        messages = {message.id: message for message in result.claim.messages}
        if outcome.errors:
            failed = [messages[row] for row in sorted(outcome.errors)]
            logger.error(
                "Delivery of %d message(s) failed: %s (database %r, broker %r: %s)",
                len(failed),
                next(iter(outcome.errors.values())),
                turn.database.name,
                turn.broker,
                _named(failed),
                extra={
                    "database": turn.database.name,
                    "broker": turn.broker,
                    "queues": sorted({each.queue for each in failed}),
                    "row_ids": [each.id for each in failed],
                    "task_ids": [each.task_id for each in failed],
                    "task_names": sorted({each.task_name for each in failed}),
                },
            )
            outbox_failed.send(
                sender=turn.broker, database=turn.database.name, errors=dict(outcome.errors)
            )
        if outcome.accepted:
            outbox_published.send(
                sender=turn.broker,
                database=turn.database.name,
                messages=[messages[row] for row in outcome.accepted],
            )


def _observed(result: Result, lost: int) -> Settled:
    claim, outcome = result.claim, result.outcome
    took = result.published_at - claim.read_at
    return Settled(
        database=result.turn.database.name,
        broker=result.turn.broker,
        published=len(outcome.accepted),
        failed=len(outcome.errors),
        deferred=len(outcome.deferred),
        lease_lost=lost,
        seconds=time.monotonic() - claim.read_at,
        waits=[each.waited + took for each in claim.messages if each.id in outcome.accepted],
    )


def _named(messages: Sequence[ClaimedMessage]) -> str:
    """The first of some messages as people know them, and how many more there are."""
    some = [
        f"row {each.id}, {each.task_name}[{each.task_id}] for {each.queue}" for each in messages[:NAMED]
    ]
    more = len(messages) - len(some)
    return "; ".join([*some, f"and {more} more"] if more else some)
