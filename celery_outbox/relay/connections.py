"""The connections to the brokers: for each as many publishers as batches may be published at once.

A publisher belongs to one thread at a time, from ``acquire`` to ``release``.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping

from ..publishing import Publisher

__all__ = ["Connections"]


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
        self._changed = threading.Condition()

    def acquire(self, broker: str) -> Publisher:
        """A publisher for this thread alone, one that is connected if there is one; waits for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._idle[broker] or self._missing[broker])
            idle = self._idle[broker]
            connected = next((each for each in idle if each.is_connected), None)
            if connected is None and self._missing[broker]:
                publisher = self._makers[broker]()
                self._missing[broker] -= 1
                return publisher
            publisher = connected or idle[0]
            idle.remove(publisher)
            return publisher

    def release(self, broker: str, publisher: Publisher) -> None:
        """Let another thread have it."""
        with self._changed:
            if publisher.is_connected:
                self._is_up.add(broker)
            else:
                self._is_up.discard(broker)
            self._idle[broker].append(publisher)
            self._changed.notify_all()

    def is_up(self, broker: str) -> bool:
        """Whether the broker could be used when it was used last."""
        return broker in self._is_up

    def keep_alive(self) -> None:
        """Look after the connections that nobody uses."""
        self._each_idle(Publisher.keep_alive)

    def close(self) -> None:
        """Let go of the connections that nobody uses."""
        self._each_idle(Publisher.close)

    def _each_idle(self, do: Callable[[Publisher], None]) -> None:
        for broker in self._makers:
            with self._changed:
                taken, self._idle[broker] = self._idle[broker], []
            for publisher in taken:
                if publisher.is_connected:
                    getattr(publisher, do.__name__)()
                self.release(broker, publisher)
