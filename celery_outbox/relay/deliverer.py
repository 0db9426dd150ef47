"""One batch from its claim to its settlement: what each thread of a relay does again and again.

No database connection is held while a broker is contacted. A claim is made only when its broker is
connected; while one batch is being published, the next may be claimed. A batch is published when those
claimed before it are under way, so that one thread at a time keeps their order.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TypeVar

from sqlalchemy.engine import Connection

from ..errors import OutboxError, PublisherContractError
from ..message import ClaimedMessage
from ..publishing import Outcome, Publisher
from ..storage.store import Claim, Failure
from .backoff import next_delay
from .connections import Connections
from .heartbeat import Heartbeat
from .limits import Budget
from .lines import Parted
from .observing import Observer, Pulse
from .options import RelayOptions
from .outages import Outages
from .publishers.kombu import text_of
from .settler import Result, Settler
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


class Deliverer:
    """Delivers batches; its methods are called by all threads of a relay.

    Attributes:
        has_worked: whether a database could ever be used.
        settler: writes what became of batches, and counts it.
    """

    def __init__(
        self,
        turns: Turns,
        connections: Connections,
        heartbeat: Heartbeat,
        budget: Budget,
        options: RelayOptions,
        *,
        pulse: Pulse,
        observer: Observer | None = None,
    ) -> None:
        self.has_worked = False
        self._turns = turns
        self._connections = connections
        self._heartbeat = heartbeat
        self._budget = budget
        self._options = options
        self.settler = Settler(turns, budget, keep=options.keep, observer=observer)
        self._outages = Outages()
        self._warned: set[str] = set()
        self._pulse = pulse
        self._longest: dict[str, float] = {}

    def serve(self, turn: Turn, limit: int | None = None) -> Served:
        """Deliver one batch of at most ``limit`` messages; never raises what can go wrong here."""
        try:
            return self._serve(turn, limit or self._options.batch)
        except Exception as error:  # noqa: BLE001 - drivers raise what they like
            database = turn.database.name
            reason = str(error) if isinstance(error, OutboxError) else text_of(error)
            self._outages.begin("database", database, reason)
            self._pulse.used.discard(database)
            # However busy the others are: it is not asked all the time.
            self._turns.rest(database=database)
            for each in self._turns.all:
                if each.database is turn.database:
                    each.horizon.forget()
            return Served()
        finally:
            self._pulse.limits.pop(threading.get_ident(), None)

    @property
    def has_batches(self) -> bool:
        """Whether a batch is between its claim and its settlement."""
        return bool(self._pulse.limits)

    def _serve(self, turn: Turn, limit: int) -> Served:
        """Deliver a batch, and as long as nobody else waits for this thread, the next ones."""
        served, result = Served(), None
        self.settler.settle_owed(turn.database.name)
        while True:
            with turn.claiming:
                claim = self._claim(turn, limit) if result is None else self._claim_next(result, limit)
                self.has_worked = True
                self._pulse.used.add(turn.database.name)
                self._outages.end("database", turn.database.name)
                if claim is None or not claim.messages:
                    return served
                # Held until it is its turn to be published.
                publisher = self._acquire(turn.broker)
            try:
                result = self._deliver(turn, claim, publisher)
                # Before another thread gets the publisher: it must know when the broker has failed.
                served = served.and_(self._judge(result))
            finally:
                if publisher is not None:
                    self._connections.release(turn.broker, publisher)
            if not self._may_go_on(result):
                self.settler.settle(result)
                return served

    def _may_go_on(self, result: Result) -> bool:
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
        if claim is None or claim.messages:
            return claim
        if was_deep:
            return self._claim(turn, limit)  # this time with a look
        if since is not None and self._options.stop_when_empty:
            # Another relay was quicker; what is overlooked now would stay.
            return self._reserve(turn, limit, None, turn.database.run)
        return claim

    def _claim_next(self, result: Result, limit: int) -> Claim | None:
        """Settle a batch and reserve the next in one transaction: one wait for the disk, not two."""
        turn = result.turn
        write, settled = self.settler.writing(result), list[int]()

        def run(claiming: Callable[[Connection], Claim]) -> Claim:
            def work(connection: Connection) -> Claim:
                settled[:] = [write(connection)]
                return claiming(connection)

            return turn.database.run(work)

        try:
            claim = self._reserve(turn, limit, turn.horizon.since, run)
        except Exception:
            self.settler.settle(result, again=True)  # what was published is not published again
            raise
        if settled:
            self.settler.note_settled(result, settled[0])
        else:
            self.settler.settle(result)  # nothing more may be taken
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
        made: list[Claim] = []

        def work(connection: Connection) -> Claim:
            made[:] = [claiming(connection)]
            return made[0]

        try:
            claim = self._ask(turn, lambda: turn.horizon.take(since, lambda: run(work)))
            if claim.messages:
                # First: what is claimed is published, also when nothing more may be taken after it.
                ends = claim.expires + self._longest.get(turn.broker, 0.0)
                self._pulse.limits[threading.get_ident()] = ends
        except Exception:
            for each in made:
                self.settler.owe(turn, each)  # perhaps it was committed, and only the answer was lost
            raise
        finally:
            self._budget.claimed(wanted, sum(len(each.messages) for each in made))
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
        publisher = self._acquire(broker)
        if publisher is None:
            return False
        try:
            return publisher.is_connected or self._has_connected(broker, publisher)
        finally:
            self._connections.release(broker, publisher)

    def _acquire(self, broker: str) -> Publisher | None:
        """A publisher for this thread; None when none could be made."""
        try:
            return self._connections.acquire(broker)
        except Exception as error:  # noqa: BLE001 - makers of transports raise what they like
            self._fail_broker(broker, text_of(error))
            return None

    def _has_connected(self, broker: str, publisher: Publisher) -> bool:
        if self._turns.is_resting(broker):
            return False  # another thread has just tried
        began = time.monotonic()
        try:
            publisher.connect()
        except Exception as error:  # noqa: BLE001 - transports raise what they like
            publisher.close()
            self._fail_broker(broker, text_of(error), took=time.monotonic() - began)
            return False
        self._warn_of_lease(broker, publisher)
        return True

    def warn_of_leases(self, brokers: Iterable[str]) -> None:
        """Say of which brokers a batch may take longer than its lease; none is contacted."""
        for broker in brokers:
            publisher = self._acquire(broker)
            if publisher is not None:
                try:
                    self._warn_of_lease(broker, publisher)
                finally:
                    self._connections.release(broker, publisher)

    def _warn_of_lease(self, broker: str, publisher: Publisher) -> None:
        """Say once that another relay might take over what this one is still publishing."""
        try:
            longest = publisher.longest(self._options.batch)
        except Exception as error:  # noqa: BLE001 - one of the user's own, perhaps not connected yet
            logger.debug("How long a batch to %r may take is not known: %s", broker, text_of(error))
            return
        lease = self._options.lease
        self._longest[broker] = longest or 0.0
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

    def _deliver(self, turn: Turn, claim: Claim, publisher: Publisher | None) -> Result:
        """Publish what may go now; who of a line must wait is known before the next batch goes."""
        parted = Parted(messages=claim.messages, free=claim.messages, names={})
        outcome = Outcome(unsent={message.id for message in claim.messages})
        if publisher is not None:
            try:
                parted = self._part(turn, claim, publisher)
            except OutboxError:
                raise
            except Exception as error:  # noqa: BLE001 - line_of() of a publisher of the user's own
                logger.error("Publishing a batch failed: %s", text_of(error))  # noqa: TRY400
                outcome = Outcome(errors=dict.fromkeys(outcome.unsent, text_of(error)))
            else:
                outcome = self._send(turn, claim, publisher, parted)
        messages = {message.id: message for message in claim.messages}
        delays = {
            row: next_delay(message.retry or self._options.retry, message.attempts)
            for row, message in messages.items()
            if row in outcome.errors
        }
        behind = turn.lines.settle(parted, outcome.accepted, delays, outcome.deferred)
        failures = {
            row: Failure(error=outcome.errors[row], delay=behind.pop(row, delay))
            for row, delay in delays.items()
        }
        return Result(
            turn=turn, claim=claim, parted=parted, outcome=outcome, failures=failures, behind=behind
        )

    def _part(self, turn: Turn, claim: Claim, publisher: Publisher) -> Parted:
        store, database = turn.database.store, turn.database
        return turn.lines.part(
            publisher,
            claim.messages,
            lambda rows: database.read(partial(store.undelivered, ids=rows)),
        )

    def _send(self, turn: Turn, claim: Claim, publisher: Publisher, parted: Parted) -> Outcome:
        try:
            if self._turns.is_open and (
                publisher.is_connected or self._has_connected(turn.broker, publisher)
            ):
                return self._publish(publisher, claim, parted.free)
            return Outcome(unsent={message.id for message in parted.free})
        except BaseException:
            turn.lines.lapse(parted, ())  # or others of its lines would wait for ever
            raise

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

    def _judge(self, result: Result) -> Served:
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
