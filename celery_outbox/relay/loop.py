"""The relay: threads that deliver, and one that watches over them, its limits and its signals."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from ..errors import ConfigurationError
from ..publishing import Publisher
from ..storage.database import Database
from .connections import Connections
from .deliverer import Deliverer
from .heartbeat import Heartbeat, without_signals
from .limits import Budget, memory_used
from .listener import Listener
from .observing import Observer, Pulse
from .options import RelayOptions
from .turns import Turn, Turns
from .wakeup import Wakeup

__all__ = ["STOP_SECONDS", "Relay", "RelayOptions"]

logger = logging.getLogger(__name__)

#: How often connections are looked after that may be idle, and limits are looked at.
KEEP_ALIVE = timedelta(seconds=1)
#: How long the end waits for batches that are under way; longer than a publisher waits for an answer.
STOP_SECONDS = 45.0
#: The same, when all that is waited for is an answer that nothing depends on.
ANSWER_SECONDS = 1.6


class Relay:
    """Publishes the committed messages of some databases to some brokers.

    Args:
        databases: those to read, in turn.
        brokers: a maker of publishers for each broker's name; messages for others are left alone.
        name: the app's outbox_name; its ``celery-outbox restart`` ends the relay.
        observer: told of each batch.

    Raises ConfigurationError when a database's pool has fewer connections than are needed.
    """

    def __init__(
        self,
        databases: Sequence[Database],
        brokers: Mapping[str, Callable[[], Publisher]],
        options: RelayOptions,
        *,
        name: str | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._databases = databases
        self._options = options
        self._threads = _threads(databases, len(brokers), options)
        self._is_stopped = self._is_paused = self._is_abandoned = self._is_told = False
        #: Whether it has ended because of its memory, or because of a restart that was asked for.
        self.is_out_of_memory = self.is_restarted = False
        #: How it moves.
        self.pulse = Pulse(is_finite=options.is_finite)
        self._failure: BaseException | None = None
        self._wakeup: Wakeup | None = None
        self._listener = Listener(databases, self.wake)
        self._heartbeat = Heartbeat(databases, app=name, on_restart=self._restart)
        self._connections = Connections(brokers, options.concurrency)
        self._budget = Budget(options.max_jobs)
        self._brokers = list(brokers)
        self._turns = Turns(
            databases,
            brokers,
            sleep=options.sleep,
            is_finite=options.stop_when_empty,
            done=self._ring,
            threads=self._threads,
        )
        self._deliverer = Deliverer(
            self._turns,
            self._connections,
            self._heartbeat,
            self._budget,
            options,
            pulse=self.pulse,
            observer=observer,
        )

    def stop(self) -> None:
        """Ask the relay to finish what is under way and end; safe in a signal handler.

        Asked again, it leaves without waiting.
        """
        self._is_abandoned = self._is_told
        self._is_told = self._is_stopped = True
        self._ring()

    def pause(self) -> None:
        """Take no more messages until ``resume``; safe in a signal handler."""
        self._is_paused = True
        self._ring()

    def resume(self) -> None:
        """Go on; safe in a signal handler."""
        self._is_paused = False
        self._ring()

    def wake(self, database: Database) -> None:
        """Look at a database now, for there is something new; safe for threads."""
        self._turns.wake(database)

    @property
    def is_abandoned(self) -> bool:
        """Whether it has ended without waiting for what was under way."""
        return self._is_abandoned

    def run(self) -> bool:
        """Work until stopped, or as the options say.

        Returns whether it could work: False when not one of the databases could ever be used.
        """
        logger.info(
            "Relaying from %s to %s",
            ", ".join(database.name for database in self._databases),
            ", ".join(self._brokers),
        )
        try:
            with self._heartbeat, Wakeup() as self._wakeup:
                self._deliverer.warn_of_leases(self._brokers)
                if not self._options.once:
                    with self._listener:
                        self._run_threads(self._work)
                elif any(database.is_for_one_thread for database in self._databases):
                    self._turns.open()
                    self._pass()
                else:
                    self._run_threads(self._work_once)
        finally:
            self._connections.close()
            settler = self._deliverer.settler
            logger.info(
                "The relay ends; it has delivered %d message(s)",
                settler.delivered,
                extra={"delivered": settler.delivered, "lease_lost": settler.lease_lost},
            )
        if self._failure is not None:
            raise self._failure
        return self._deliverer.has_worked or not self._options.is_finite

    def _restart(self) -> None:
        # No stop(): together with a signal it would not wait for what is under way.
        if not self._is_stopped:
            logger.info("The relay ends, for somebody has asked for a restart")
            self.is_restarted = True
        self._is_stopped = True
        self._ring()

    def _ring(self) -> None:
        if self._wakeup is not None:
            self._wakeup.ring()

    def _pass(self) -> None:
        """One batch of each database, shared by its brokers in turn."""
        for database in self._databases:
            left = self._options.batch
            for turn in self._turns.all:
                if turn.database is database and left > 0 and not self._is_stopped:
                    left -= self._deliverer.serve(turn, left).claimed

    def _run_threads(self, work: Callable[[], None]) -> None:
        threads = [
            threading.Thread(target=work, name=f"celery_outbox relay {number}", daemon=True)
            for number in range(1, self._threads + 1)
        ]
        if not self._is_stopped:
            self._turns.open()
        with without_signals():
            for thread in threads:
                thread.start()
        self.pulse.threads = threads
        try:
            self._watch()
        finally:
            self.pulse.is_stopping = self._is_stopped = True
            self._turns.close()
            left = self._join(threads)
            # At the same time, and what has not answered the threads keeps nobody waiting again.
            self._listener.end(left)
            self._heartbeat.end(left)

    def _watch(self) -> None:
        """Wait for the end, and look after what nobody uses meanwhile."""
        assert self._wakeup is not None  # noqa: S101 - run() has made it
        ends = None
        if self._options.max_time is not None:
            ends = time.monotonic() + self._options.max_time.total_seconds()
        while not (self._is_stopped or self._turns.is_done or self._has_done_its_work):
            self.pulse.watch(is_paused=self._is_paused)
            left = KEEP_ALIVE
            if ends is not None:
                left = min(left, timedelta(seconds=ends - time.monotonic()))
                if left <= timedelta(0):
                    logger.info("The relay has worked for as long as it was told to")
                    return
            self._wakeup.wait(left)
            self._turns.pause(is_paused=self._is_paused)
            self._connections.keep_alive()
            if self._has_too_much_memory():
                return

    @property
    def _has_done_its_work(self) -> bool:
        # Asked again in the end: what was claimed may have come back, and is then to be taken again.
        budget = self._budget
        return budget.is_spent and not self._deliverer.has_batches and budget.is_spent

    def _has_too_much_memory(self) -> bool:
        limit = self._options.max_memory
        if limit is None or (used := memory_used()) < limit:
            return False
        self.is_out_of_memory = True
        logger.warning(
            "The relay uses %.0f MB of memory, its limit is %.0f MB: it ends",
            used / 2**20,
            limit / 2**20,
        )
        return True

    def _work_once(self) -> None:
        """What the only thread does of a relay that makes one pass."""
        try:
            self._pass()
        except BaseException as error:  # noqa: BLE001 - raised by run(), in the thread that called it
            self._failure = error
        finally:
            self._is_stopped = True
            self._ring()

    def _work(self) -> None:
        """What a thread does."""
        try:
            while (turn := self._turns.take()) is not None:
                self._serve(turn)
        except BaseException as error:  # noqa: BLE001 - raised by run(), in the thread that called it
            self._failure = error
            self._is_stopped = True
        finally:
            self._ring()

    def _serve(self, turn: Turn) -> None:
        has_progressed = False
        try:
            served = self._deliverer.serve(turn)
            is_finite = self._options.stop_when_empty
            has_progressed = bool(served.settled if is_finite else served.accepted)
            if self._budget.is_spent:
                self._ring()
        finally:
            self._turns.give_back(turn, has_progressed=has_progressed)

    def _join(self, threads: Sequence[threading.Thread]) -> timedelta:
        """Wait for what is under way, but not for ever, and not when told so again.

        Returns how long other answers may be waited for.
        """
        assert self._wakeup is not None  # noqa: S101 - run() has made it
        began = time.monotonic()
        while any(thread.is_alive() for thread in threads):
            has_batches = self._deliverer.has_batches
            patience = STOP_SECONDS if has_batches else ANSWER_SECONDS
            if self._is_abandoned or time.monotonic() >= began + patience:
                self._is_abandoned = True
                if has_batches:
                    logger.warning(
                        "The relay leaves a batch behind that is under way; it is delivered again when "
                        "its lease is over"
                    )
                return timedelta(0)
            self._wakeup.wait(timedelta(seconds=0.01))
        return timedelta(seconds=ANSWER_SECONDS - min(time.monotonic() - began, ANSWER_SECONDS / 2))


def _threads(databases: Sequence[Database], brokers: int, options: RelayOptions) -> int:
    """One more than publish at once: it claims the next batch meanwhile.

    And one more that is left for the others when a broker hangs, and when a database does.
    """
    if options.once:
        return 1
    wanted = options.concurrency + 1 + (brokers > 1) + (len(databases) > 1)
    for database in databases:
        if database.is_for_one_thread:
            if options.concurrency > 1:
                raise ConfigurationError(
                    f"database {database.name!r}: expected one that several threads can use, found one "
                    "in memory. Use concurrency 1."
                )
            return 1
        limit = database.pool_limit
        if limit is not None and limit < options.concurrency:
            raise ConfigurationError(
                f"database {database.name!r}: expected a connection for each of {options.concurrency} "
                f"threads, found a pool of {limit}. Make pool_size or max_overflow of its engine "
                "larger, or --concurrency smaller."
            )
        if limit is not None:
            wanted = min(wanted, limit)
    return wanted
