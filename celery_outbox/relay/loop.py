"""The relay: claim, publish, settle, for each broker of each database in turn.

No database connection is held while a broker is contacted. A claim is made only when its broker is
connected. What a pass could not do is left in the table, and said once in the log.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy.engine import Connection

from ..errors import OutboxError, PublisherContractError
from ..message import ClaimedMessage
from ..policy import RetryPolicy
from ..publishing import Outcome, Publisher
from ..signals import outbox_failed, outbox_published
from ..storage.database import Database
from ..storage.store import Claim, Failure
from .backoff import next_delay
from .heartbeat import Heartbeat
from .horizon import Horizon
from .lines import Lines, Parted
from .publishers.kombu import text_of
from .wakeup import Wakeup

__all__ = ["Relay", "RelayOptions"]

logger = logging.getLogger(__name__)

#: How often connections are looked after that may be idle.
KEEP_ALIVE = timedelta(seconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOptions:
    """How a relay works.

    Attributes:
        batch: messages of one claim at most.
        sleep: the wait after a pass that found nothing, or after a failure.
        lease: how long a claim holds.
        retry: the policy for messages that have none of their own.
        keep: keep delivered rows instead of deleting them.
        once: one pass of at most ``batch`` messages for each database, without waiting.
        stop_when_empty: end when no database has a ready message.
    """

    batch: int = 100
    sleep: timedelta = timedelta(seconds=1)
    lease: timedelta
    retry: RetryPolicy
    keep: bool = False
    once: bool = False
    stop_when_empty: bool = False


class Relay:
    """Publishes the committed messages of some databases to some brokers.

    Args:
        databases: those to read, in turn.
        brokers: a maker of publishers for each broker's name; messages for others are left alone.
    """

    def __init__(
        self,
        databases: Sequence[Database],
        brokers: Mapping[str, Callable[[], Publisher]],
        options: RelayOptions,
    ) -> None:
        self._databases = databases
        self._brokers = brokers
        self._options = options
        self._is_stopped = False
        self._has_worked = False
        self._delivered = 0
        self._wakeup: Wakeup | None = None
        self._heartbeat = Heartbeat(databases)
        self._publishers: dict[str, Publisher] = {}
        self._troubles: dict[str, str] = {}
        self._rests: dict[str, float] = {}
        self._lines: defaultdict[tuple[str, str], Lines] = defaultdict(Lines)
        self._kept_alive_at = time.monotonic()
        self._horizons: defaultdict[tuple[str, str], Horizon] = defaultdict(Horizon)

    def stop(self) -> None:
        """Ask the relay to finish the batch that it is in and end; safe in a signal handler."""
        self._is_stopped = True
        if self._wakeup is not None:
            self._wakeup.ring()

    def run(self) -> bool:
        """Work until stopped, or as ``once`` and ``stop_when_empty`` say.

        Returns whether it could work: False when not one of the databases could ever be used.
        """
        logger.info(
            "Relaying from %s to %s",
            ", ".join(database.name for database in self._databases),
            ", ".join(self._brokers),
        )
        try:
            with self._heartbeat, Wakeup() as self._wakeup:
                while not self._is_stopped:
                    self._keep_alive()
                    settled, accepted = self._pass()
                    if self._options.once or (self._options.stop_when_empty and not settled):
                        return self._has_worked
                    if not accepted and not self._options.stop_when_empty:
                        self._wait(self._rest())
            return True
        finally:
            for publisher in self._publishers.values():
                publisher.close()
            logger.info("The relay ends; it has delivered %d message(s)", self._delivered)

    def _wait(self, rest: timedelta) -> None:
        """Wait for a signal or until ``rest`` is over, with the connections kept alive."""
        assert self._wakeup is not None  # noqa: S101 - run() has made it
        while rest > timedelta(0) and not self._wakeup.wait(min(rest, KEEP_ALIVE)):
            rest -= KEEP_ALIVE
            self._keep_alive()

    def _keep_alive(self) -> None:
        """Look after connections that may be idle, however busy the others are."""
        if time.monotonic() < self._kept_alive_at + KEEP_ALIVE.total_seconds() / 2:
            return
        self._kept_alive_at = time.monotonic()
        for publisher in self._publishers.values():
            if publisher.is_connected:
                publisher.keep_alive()

    def _rest(self) -> timedelta:
        """How long to wait: less than ``sleep`` where not everything has been looked at."""
        owed = [each.owed for each in self._horizons.values()]
        return min([self._options.sleep, *(each for each in owed if each is not None)])

    def _pass(self) -> tuple[int, int]:
        """Give each broker of each database one turn; how many were settled, and how many accepted.

        What a lost connection left behind is ready again and counts as neither.
        """
        settled = accepted = 0
        for database in self._databases:
            if time.monotonic() < self._rests.get(database.name, 0):
                continue
            left = self._options.batch
            for broker in self._brokers:
                if self._is_stopped or left <= 0:
                    break
                try:
                    claimed, outcome = self._turn(database, broker, left)
                except OutboxError as error:
                    self._trouble(f"database {database.name!r}", str(error))
                    # However busy the others are: it is not asked all the time.
                    self._rests[database.name] = time.monotonic() + self._options.sleep.total_seconds()
                    self._forget_horizons(database)
                    break
                self._has_worked = True
                self._well(f"database {database.name!r}")
                accepted += len(outcome.accepted)
                settled += len(outcome.accepted if outcome.is_connection_lost else claimed)
                left -= len(claimed) if self._options.once else 0
        return settled, accepted

    def _forget_horizons(self, database: Database) -> None:
        for broker in self._brokers:
            self._horizons.pop((database.name, broker), None)

    def _turn(
        self, database: Database, broker: str, limit: int
    ) -> tuple[Sequence[ClaimedMessage], Outcome]:
        """Deliver one batch; what was claimed, and what became of it."""
        self._heartbeat.begin(database)
        horizon = self._horizons[database.name, broker]
        since = horizon.since
        is_empty = self._is_empty(database, broker, since)
        if is_empty and since is not None and self._options.stop_when_empty:
            since = None  # what is overlooked now would stay
            is_empty = self._is_empty(database, broker, since)
        publisher = None if is_empty else self._connected(broker)
        if publisher is None:
            return (), Outcome()
        claiming = partial(
            database.store.claim, broker=broker, limit=limit, lease=self._options.lease, since=since
        )
        claim = horizon.take(since, partial(database.run, claiming))
        horizon.claimed(claim.latest)
        if not claim.messages:
            return (), Outcome()
        lines = self._lines[database.name, broker]
        parted = lines.part(
            publisher,
            claim.messages,
            lambda rows: database.read(partial(database.store.undelivered, ids=rows)),
        )
        outcome = self._publish(publisher, claim, parted.free)
        if outcome.is_connection_lost:
            self._trouble(f"broker {broker!r}", next(iter(outcome.errors.values()), "connection lost"))
        elif outcome.accepted:
            # Not on connecting: with some transports that proves nothing.
            self._well(f"broker {broker!r}")
        try:
            self._settle(database, broker, claim, parted, outcome)
        except OutboxError:
            lines.lapse(parted, outcome.accepted)
            raise
        self._delivered += len(outcome.accepted)
        return claim.messages, outcome

    def _is_empty(self, database: Database, broker: str, since: datetime | None) -> bool:
        """Look without writing, as an idle relay does."""
        looking = partial(database.store.is_empty, broker=broker, since=since)
        horizon = self._horizons[database.name, broker]
        return horizon.is_empty(since, partial(database.read, looking))

    def _connected(self, broker: str) -> Publisher | None:
        """The connected publisher of ``broker``; None when it cannot be reached."""
        publisher = self._publishers.get(broker)
        if publisher is None:
            publisher = self._publishers[broker] = self._brokers[broker]()
        if publisher.is_connected:
            return publisher
        try:
            publisher.connect()
        except Exception as error:  # noqa: BLE001 - transports raise what they like
            publisher.close()
            self._trouble(f"broker {broker!r}", text_of(error))
            return None
        return publisher

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

    def _settle(
        self, database: Database, broker: str, claim: Claim, parted: Parted, outcome: Outcome
    ) -> None:
        messages = {message.id: message for message in claim.messages}
        delays = {id_: self._delay(messages[id_]) for id_ in messages if id_ in outcome.errors}
        behind = self._lines[database.name, broker].settle(parted, outcome.accepted, delays)
        failures = {
            id_: Failure(error=outcome.errors[id_], delay=behind.pop(id_, delay))
            for id_, delay in delays.items()
        }
        unsent = set(outcome.unsent) - behind.keys()
        store, token = database.store, claim.token

        def write(connection: Connection) -> int:
            count = 0
            if outcome.accepted:
                ids = sorted(outcome.accepted)
                count += store.accept(connection, token, ids, keep=self._options.keep)
            if outcome.deferred:
                count += store.defer(connection, token, sorted(outcome.deferred))
            if unsent:
                count += store.release(connection, token, sorted(unsent))
            if failures:
                count += store.fail(connection, token, failures)
            if behind:
                # After the failed ones, so that their times are later.
                count += store.postpone(connection, token, behind)
            return count

        settled = database.run(write)
        if settled < len(messages):
            logger.warning(
                "The lease of a batch ended before it was settled: %d of %d messages belong to another "
                "relay now",
                len(messages) - settled,
                len(messages),
                extra={"database": database.name, "broker": broker},
            )
        self._tell(database, broker, [messages[each] for each in outcome.accepted], outcome)

    def _delay(self, message: ClaimedMessage) -> timedelta | None:
        return next_delay(message.retry or self._options.retry, message.attempts)

    def _tell(
        self,
        database: Database,
        broker: str,
        accepted: Sequence[ClaimedMessage],
        outcome: Outcome,
    ) -> None:
        if outcome.errors:
            logger.error(
                "Delivery of %d message(s) failed: %s",
                len(outcome.errors),
                next(iter(outcome.errors.values())),
                extra={
                    "database": database.name,
                    "broker": broker,
                    "row_ids": sorted(outcome.errors),
                },
            )
            outbox_failed.send(sender=broker, database=database.name, errors=dict(outcome.errors))
        if accepted:
            outbox_published.send(sender=broker, database=database.name, messages=accepted)

    def _trouble(self, where: str, what: str) -> None:
        """Log the beginning of an outage, once."""
        if where not in self._troubles:
            logger.error("The %s cannot be used, trying again: %s", where, what)
        self._troubles[where] = what

    def _well(self, where: str) -> None:
        if self._troubles.pop(where, None) is not None:
            logger.info("The %s can be used again", where)
