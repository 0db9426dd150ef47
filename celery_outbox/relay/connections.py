"""The connections to the brokers: for each as many publishers as batches may be published at once.

A publisher belongs to one thread at a time, from ``acquire`` to ``release``.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping

from ..publishing import Publisher
from .publishers.kombu import text_of

__all__ = ["Connections"]

logger = logging.getLogger(__name__)


class Connections:
    """The publishers of all brokers.

    Args:
        makers: of a publisher, by the broker's name.
        count: how many there may be for each broker.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Publisher]], count: int) -> None:
        self._makers = makers
        self._missing = dict.fromkeys(makers, count)
        self._idle: defaultdict[str, list[Publisher]] = defaultdict(list)
        self._is_up: set[str] = set()
        self._is_closed = False
        self._changed = threading.Condition()

    def acquire(self, broker: str) -> Publisher:
        """A publisher for this thread alone, one that is connected if there is one; waits for it.

        Raises what its maker raises.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._idle[broker] or self._missing[broker])
            idle = self._idle[broker]
            connected = next((each for each in idle if each.is_connected), None)
            if connected is not None or not self._missing[broker]:
                publisher = connected or idle[0]
                idle.remove(publisher)
                return publisher
            self._missing[broker] -= 1
        try:
            return self._makers[broker]()
        except BaseException:
            with self._changed:
                self._missing[broker] += 1
                self._changed.notify_all()
            raise

    def release(self, broker: str, publisher: Publisher) -> None:
        """Let another thread have it; after the end, let go of it."""
        with self._changed:
            if publisher.is_connected:
                self._is_up.add(broker)
            else:
                self._is_up.discard(broker)
            self._idle[broker].append(publisher)
            self._changed.notify_all()
            is_closed = self._is_closed
        if is_closed:
            _look_after(publisher, publisher.close)

    def is_up(self, broker: str) -> bool:
        """Whether the broker could be used when it was used last."""
        return broker in self._is_up

    def keep_alive(self) -> None:
        """Look after the connections that nobody uses."""
        for broker in self._makers:
            with self._changed:
                idle = self._idle[broker]
                taken = [each for each in idle if each.is_connected]
                self._idle[broker] = [each for each in idle if not each.is_connected]
            for publisher in taken:
                _look_after(publisher, publisher.keep_alive)
                self.release(broker, publisher)

    def close(self) -> None:
        """Let go of the connections that nobody uses, and of the others when they are released."""
        with self._changed:
            self._is_closed = True
            idle = [each for every in self._idle.values() for each in every]
        for publisher in idle:
            _look_after(publisher, publisher.close)


def _look_after(publisher: Publisher, work: Callable[[], None]) -> None:
    """Do what must never raise, with publishers of others' too."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the relay, and the other connections, must go on
        logger.warning("A connection to a broker could not be looked after: %s", text_of(error))
        if publisher.is_connected and work != publisher.close:
            _look_after(publisher, publisher.close)
