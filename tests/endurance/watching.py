"""A relay process seen from outside: what it has delivered, and what it holds meanwhile."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
import redis

from tests.waiting import wait_until

QUEUE = "celery"
MB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """What a process holds at one moment, and how many messages had arrived by then.

    ``rss`` is bytes of its resident set.
    """

    delivered: int
    rss: int
    descriptors: int
    threads: int


@dataclass(slots=True, kw_only=True)
class Watch:
    """Takes what arrives off Redis, which would swell otherwise, and looks at the relay meanwhile.

    Attributes:
        warm_up: messages after which the relay holds what it needs.
        on_arrival: called with the count whenever something has arrived.
        arrived: how often the message of each task id has.
        vitals: what was seen, a look for each thousand messages.
    """

    pid: int
    client: redis.Redis
    warm_up: int
    on_arrival: Callable[[int], None] = lambda count: None
    arrived: Counter[str] = field(default_factory=Counter)
    delivered: int = 0
    vitals: list[Vitals] = field(default_factory=list)

    def until(self, is_over: Callable[[], bool], timeout: float) -> None:
        """Watch until the course is over and its last message was taken off."""

        def step() -> bool:
            was_over = is_over()
            return not self._drain() and was_over

        wait_until(step, timeout, "the end of the course", interval=0.01)
        self._look()

    def _drain(self) -> bool:
        """Take off what is there; whether that was anything."""
        before = self.delivered
        for text in self.client.rpop(QUEUE, 2000) or ():
            self.arrived[json.loads(text)["headers"]["id"]] += 1
            self.delivered += 1
        if self.delivered == before:
            return False
        self.on_arrival(self.delivered)
        if self.delivered // 1000 != before // 1000:
            self._look()
        return True

    def _look(self) -> None:
        process = psutil.Process(self.pid)
        with process.oneshot():
            self.vitals.append(
                Vitals(
                    delivered=self.delivered,
                    rss=process.memory_info().rss,
                    descriptors=process.num_fds(),
                    threads=process.num_threads(),
                )
            )

    @property
    def warm(self) -> list[Vitals]:
        """What was seen after the warm-up."""
        return [each for each in self.vitals if each.delivered >= self.warm_up]

    @property
    def growth(self) -> float:
        """By how many MB the resident set has grown at most since the warm-up."""
        first, *_ = self.warm
        return (max(each.rss for each in self.warm) - first.rss) / MB

    def range_of(self, name: str) -> tuple[int, int]:
        """The least and the most that was seen since the warm-up."""
        seen = [getattr(each, name) for each in self.warm]
        return min(seen), max(seen)
