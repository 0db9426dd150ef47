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

    def and_(self, other: Served) -> Served:
        """Both together."""
        return Served(
            claimed=self.claimed + other.claimed,
            settled=self.settled + other.settled,
            accepted=self.accepted + other.accepted,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """A batch that has been published, and what is to be written of it."""

    turn: Turn
    claim: Claim
    parted: Parted
    outcome: Outcome
    failures: dict[int, Failure]
    behind: dict[int, timedelta]

    @property
    def unsent(self) -> set[int]:
        """Those that are put back as they were."""
        return set(self.outcome.unsent) - self.behind.keys()


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
        self._warned: set[str] = set()

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
        """Deliver a batch, and as long as nobody else waits for this thread, the next ones."""
        served, result = Served(), None
        while True:
            with turn.claiming:
                claim = self._claim(turn, limit) if result is None else self._claim_next(result, limit)
                self.has_worked = True
                self._outages.end("database", turn.database.name)
                if claim is None or not claim.messages:
                    return served
                # Held until it is its turn to be published.
                publisher = self._connections.acquire(turn.broker)
            try:
                result = self._deliver(turn, claim, publisher)
            finally:
                self._connections.release(turn.broker, publisher)
            served = served.and_(self._judge(result))
            if not self._may_go_on(result):
                self._settle(result)
                return served

    def _may_go_on(self, result: _Result) -> bool:
        is_well = bool(result.outcome.accepted) and not result.outcome.is_connection_lost
        return is_well and not self._options.once and self._turns.may_go_on(result.turn)

    def _claim(self, turn: Turn, limit: int) -> Claim | None:
        """Reserve a batch, where there is something and the broker can be used."""
        self._ask(turn, lambda: self._heartbeat.begin(turn.database))
        since = turn.horizon.since
        if not turn.is_deep and self._is_empty(turn, since):
            if since is None or not self._options.stop_when_empty:
                return None
            since = None  # what is overlooked now would stay
            if self._is_empty(turn, since):
                return None
        if not self._connections.is_up(turn.broker) and not self._connect(turn.broker):
            return None
        was_deep = turn.is_deep
        claim = self._reserve(turn, limit, since, turn.database.run)
        if was_deep and claim is not None and not claim.messages:
            return self._claim(turn, limit)  # this time with a look
        return claim

    def _claim_next(self, result: _Result, limit: int) -> Claim | None:
        """Settle a batch and reserve the next in one transaction: one wait for the disk, not two."""
        turn = result.turn
        write, settled = self._writing(result), list[int]()

        def run(claiming: Callable[[Connection], Claim]) -> Claim:
            def work(connection: Connection) -> Claim:
                settled[:] = [write(connection)]
                return claiming(connection)

            return turn.database.run(work)

        try:
            claim = self._reserve(turn, limit, turn.horizon.since, run)
        except OutboxError:
            turn.lines.lapse(result.parted, result.outcome.accepted)
            raise
        if settled:
            self._note_settled(result, settled[0])
        else:
            self._settle(result)  # nothing more may be taken
        return claim

    def _reserve(
        self,
        turn: Turn,
        limit: int,
        since: datetime | None,
        run: Callable[[Callable[[Connection], Claim]], Claim],
    ) -> Claim | None:
        """Claim as many messages as are allowed, in a transaction that ``run`` makes."""
        wanted = self._budget.take(min(limit, turn.limit or limit))
        if not wanted:
            return None
        claiming = partial(
            turn.database.store.claim,
            broker=turn.broker,
            limit=wanted,
            lease=self._options.lease,
            since=since,
        )
        claim: Claim | None = None
        try:
            claim = self._ask(turn, lambda: turn.horizon.take(since, lambda: run(claiming)))
        finally:
            self._budget.give_back(wanted - len(claim.messages if claim else ()))
        turn.horizon.claimed(claim.latest)
        self._turns.note_depth(turn, is_deep=len(claim.messages) == wanted)
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
        self._warn_of_lease(broker, publisher)
        return True

    def _warn_of_lease(self, broker: str, publisher: Publisher) -> None:
        """Say once that another relay might take over what this one is still publishing."""
        longest, lease = publisher.longest(self._options.batch), self._options.lease
        if longest is None or longest < lease.total_seconds() or broker in self._warned:
            return
        self._warned.add(broker)
        logger.warning(
            "Publishing a batch of %d to broker %r may take %.0f seconds, but the lease "
            "(outbox_retry_after) is %.0f: another relay may then send the same again. Make the lease "
            "longer, or the batch or the broker's time limits smaller",
            self._options.batch,
            broker,
            longest,
            lease.total_seconds(),
        )

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
        turn, write = result.turn, self._writing(result)
        try:
            settled = self._ask(turn, lambda: turn.database.run(write))
        except OutboxError:
            turn.lines.lapse(result.parted, result.outcome.accepted)
            raise
        self._note_settled(result, settled)

    def _writing(self, result: _Result) -> Callable[[Connection], int]:
        """What writes the end of a batch; it returns how many messages were still ours."""
        outcome, token, store = result.outcome, result.claim.token, result.turn.database.store

        def write(connection: Connection) -> int:
            count = 0
            if outcome.accepted:
                ids = sorted(outcome.accepted)
                count += store.accept(connection, token, ids, keep=self._options.keep)
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

    def _note_settled(self, result: _Result, settled: int) -> None:
        turn, outcome = result.turn, result.outcome
        self._budget.give_back(len(result.unsent) + len(result.behind))
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
