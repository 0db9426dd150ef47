"""One batch from its claim to its settlement: what each thread of a relay does again and again.

No database connection is held while a broker is contacted. A claim is made only when its broker is
connected; while one batch is being published, the next may be claimed. A batch is published when those
claimed before it are under way, so that one thread at a time keeps their order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import TypeVar

from sqlalchemy.engine import Connection

from ..errors import OutboxError, PublisherContractError
from ..message import ClaimedMessage
from ..publishing import Outcome, Publisher
from ..signals import outbox_failed, outbox_published
from ..storage.store import Claim, Failure
from .backoff import next_delay
from .connections import Connections
from .heartbeat import Heartbeat
from .limits import Budget
from .lines import Parted
from .options import RelayOptions
from .outages import Outages
from .publishers.kombu import text_of
from .turns import PROBE, Turn, Turns

__all__ = ["Deliverer", "Served"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What came of one turn.

    Attributes:
        claimed: messages that were taken.
        settled: of those, how many came to an end of any kind; what a lost connection left behind is
            ready again and does not count.
        accepted: messages that the broker has taken.
    """

    claimed: int = 0
    settled: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """A batch that has been published, and what is to be written of it."""

    turn: Turn
    claim: Claim
    parted: Parted
    outcome: Outcome
    failures: dict[int, Failure]
    behind: dict[int, timedelta]


class Deliverer:
    """Delivers batches; its methods are called by all threads of a relay.

    Attributes:
        has_worked: whether a database could ever be used.
        delivered: messages that a broker has taken.
        lease_lost: messages that another relay had taken over when they were to be settled.
    """

    def __init__(
        self,
        turns: Turns,
        connections: Connections,
        heartbeat: Heartbeat,
        budget: Budget,
        options: RelayOptions,
    ) -> None:
        self.has_worked = False
        self.delivered = 0
        self.lease_lost = 0
        self._turns = turns
        self._connections = connections
        self._heartbeat = heartbeat
        self._budget = budget
        self._options = options
        self._outages = Outages()

    def serve(self, turn: Turn, limit: int | None = None) -> Served:
        """Deliver one batch of at most ``limit`` messages; never raises what can go wrong here."""
        try:
            return self._serve(turn, limit or self._options.batch)
        except OutboxError as error:
            database = turn.database.name
            self._outages.begin("database", database, str(error))
            # However busy the others are: it is not asked all the time.
            self._turns.rest(database=database)
            for each in self._turns.all:
                if each.database is turn.database:
                    each.horizon.forget()
            return Served()

    def _serve(self, turn: Turn, limit: int) -> Served:
        with turn.claiming:
            claim = self._claim(turn, limit)
            self.has_worked = True
            self._outages.end("database", turn.database.name)
            if claim is None or not claim.messages:
                return Served()
            # Held until it is its turn to be published.
            publisher = self._connections.acquire(turn.broker)
        try:
            result = self._deliver(turn, claim, publisher)
        finally:
            self._connections.release(turn.broker, publisher)
        self._settle(result)
        return self._judge(result)

    def _claim(self, turn: Turn, limit: int) -> Claim | None:
        """Reserve a batch, where there is something and the broker can be used."""
        self._ask(turn, lambda: self._heartbeat.begin(turn.database))
        horizon = turn.horizon
        since = horizon.since
        if not turn.is_deep and self._is_empty(turn, since):
            if since is None or not self._options.stop_when_empty:
                return None
            since = None  # what is overlooked now would stay
            if self._is_empty(turn, since):
                return None
        if not self._connections.is_up(turn.broker) and not self._connect(turn.broker):
            return None
        wanted = self._budget.take(min(limit, turn.limit or limit))
        if not wanted:
            return None
        claim: Claim | None = None
        try:
            claiming = partial(
                turn.database.store.claim,
                broker=turn.broker,
                limit=wanted,
                lease=self._options.lease,
                since=since,
            )
            claim = self._ask(turn, lambda: horizon.take(since, partial(turn.database.run, claiming)))
        finally:
            self._budget.give_back(wanted - len(claim.messages if claim else ()))
        horizon.claimed(claim.latest)
        was_deep = turn.is_deep
        self._turns.note_depth(turn, is_deep=len(claim.messages) == wanted)
        if was_deep and not claim.messages:
            return self._claim(turn, limit)  # this time with a look
        return claim

    def _is_empty(self, turn: Turn, since: datetime | None) -> bool:
        """Look without writing, as an idle relay does."""
        database = turn.database
        looking = partial(database.store.is_empty, broker=turn.broker, since=since)
        return self._ask(turn, lambda: turn.horizon.is_empty(since, partial(database.read, looking)))

    def _ask(self, turn: Turn, question: Callable[[], T]) -> T:
        with self._turns.asking(turn):
            return question()

    def _connect(self, broker: str) -> bool:
        """Connect one publisher of a broker; whether that worked."""
        publisher = self._connections.acquire(broker)
        try:
            return publisher.is_connected or self._has_connected(broker, publisher)
        finally:
            self._connections.release(broker, publisher)

    def _has_connected(self, broker: str, publisher: Publisher) -> bool:
        began = time.monotonic()
        try:
            publisher.connect()
        except Exception as error:  # noqa: BLE001 - transports raise what they like
            publisher.close()
            self._fail_broker(broker, text_of(error), took=time.monotonic() - began)
            return False
        return True

    def _fail_broker(self, broker: str, reason: str, *, took: float = 0.0) -> None:
        self._outages.begin("broker", broker, reason)
        self._turns.rest(broker=broker, took=took)

    def _deliver(self, turn: Turn, claim: Claim, publisher: Publisher) -> _Result:
        """Publish what may go now; who of a line must wait is known before the next batch goes."""
        store, database = turn.database.store, turn.database
        parted = turn.lines.part(
            publisher,
            claim.messages,
            lambda rows: database.read(partial(store.undelivered, ids=rows)),
        )
        if self._turns.is_open and (
            publisher.is_connected or self._has_connected(turn.broker, publisher)
        ):
            outcome = self._publish(publisher, claim, parted.free)
        else:
            outcome = Outcome(unsent={message.id for message in parted.free})
        messages = {message.id: message for message in claim.messages}
        delays = {
            row: next_delay(message.retry or self._options.retry, message.attempts)
            for row, message in messages.items()
            if row in outcome.errors
        }
        behind = turn.lines.settle(parted, outcome.accepted, delays)
        failures = {
            row: Failure(error=outcome.errors[row], delay=behind.pop(row, delay))
            for row, delay in delays.items()
        }
        return _Result(
            turn=turn, claim=claim, parted=parted, outcome=outcome, failures=failures, behind=behind
        )

    def _publish(
        self, publisher: Publisher, claim: Claim, messages: Sequence[ClaimedMessage]
    ) -> Outcome:
        outcome = None
        try:
            outcome = publisher.publish(messages, deadline=claim.expires, read_at=claim.read_at)
            outcome.check(messages)
        except PublisherContractError as error:
            logger.error("A publisher broke its contract: %s", error)  # noqa: TRY400 - it tells all
            return (outcome or Outcome()).without_contradictions(messages, str(error))
        except Exception as error:  # noqa: BLE001
            # The batch's boundary: whatever a transport raises, the relay goes on. A traceback would
            # repeat the error's own text, and with it perhaps a password or a payload.
            text = text_of(error)
            logger.error("Publishing a batch failed: %s", text)  # noqa: TRY400
            publisher.close()
            return Outcome(errors=dict.fromkeys((each.id for each in messages), text))
        return outcome

    def _settle(self, result: _Result) -> None:
        """Write what became of a batch, and tell it."""
        turn, outcome, token = result.turn, result.outcome, result.claim.token
        store = turn.database.store
        unsent = set(outcome.unsent) - result.behind.keys()

        def write(connection: Connection) -> int:
            count = 0
            if outcome.accepted:
                ids = sorted(outcome.accepted)
                count += store.accept(connection, token, ids, keep=self._options.keep)
            if outcome.deferred:
                count += store.defer(connection, token, sorted(outcome.deferred))
            if unsent:
                count += store.release(connection, token, sorted(unsent))
            if result.failures:
                count += store.fail(connection, token, result.failures)
            if result.behind:
                # After the failed ones, so that their times are later.
                count += store.postpone(connection, token, result.behind)
            return count

        try:
            settled = self._ask(turn, lambda: turn.database.run(write))
        except OutboxError:
            turn.lines.lapse(result.parted, outcome.accepted)
            raise
        self._budget.give_back(len(unsent) + len(result.behind))
        self.delivered += len(outcome.accepted)
        if lost := len(result.claim.messages) - settled:
            self.lease_lost += lost
            logger.warning(
                "The lease of a batch ended before it was settled: %d of %d messages belong to another "
                "relay now",
                lost,
                len(result.claim.messages),
                extra={"database": turn.database.name, "broker": turn.broker},
            )
        self._tell(result)

    def _tell(self, result: _Result) -> None:
        turn, outcome = result.turn, result.outcome
        messages = {message.id: message for message in result.claim.messages}
        if outcome.errors:
            failed = [messages[row] for row in sorted(outcome.errors)]
            logger.error(
                "Delivery of %d message(s) failed: %s",
                len(failed),
                next(iter(outcome.errors.values())),
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

    def _judge(self, result: _Result) -> Served:
        """What a batch tells of its broker, and how much came of it."""
        turn, outcome, claimed = result.turn, result.outcome, len(result.claim.messages)
        if outcome.accepted:
            # Not on connecting: with some transports that proves nothing.
            self._outages.end("broker", turn.broker)
            turn.limit = None
        elif outcome.is_connection_lost:
            turn.limit = PROBE
        elif outcome.errors:
            # Perhaps it refuses everything; perhaps these were bad, and more of them stand in front.
            turn.limit = min(2 * turn.limit if turn.limit else PROBE, self._options.batch)
        if outcome.is_connection_lost:
            self._fail_broker(turn.broker, next(iter(outcome.errors.values()), "connection lost"))
        settled = claimed - len(outcome.unsent)
        return Served(
            claimed=claimed,
            settled=len(outcome.accepted) if outcome.is_connection_lost else settled,
            accepted=len(outcome.accepted),
        )
