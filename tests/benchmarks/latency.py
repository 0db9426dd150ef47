"""How long a task takes from its commit to the broker: a relay that is notified, and one that asks.

The relay is idle each time. What is timed begins just before COMMIT and ends when the message has been
popped from Redis.
"""

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta

import redis
import sqlalchemy as sa

from celery_outbox import Outbox
from tests.benchmarks.measuring import Ratio, Report, Scale
from tests.benchmarks.stage import QUEUE, Stage
from tests.relay.apps import make_outbox, relaying, send

#: Median from commit to broker, seconds.
TARGET = 0.02
PATIENCE_SECONDS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a relay learns of a message.

    Attributes:
        sleep: seconds between two questions.
        share: of the turns, where each takes long.
    """

    name: str
    notify: bool
    sleep: float
    share: int = 1

    @property
    def longest_pause(self) -> float:
        """Seconds before a commit, which shall fall anywhere between two questions."""
        return 0.05 if self.notify else self.sleep


NOTIFIED = Way(name="notified", notify=True, sleep=1.0)
WAYS = [
    NOTIFIED,
    Way(name="asking every 0.1 s", notify=False, sleep=0.1, share=3),
    Way(name="asking every second", notify=False, sleep=1.0, share=10),
]


def measure_latency(stage: Stage, scale: Scale) -> Report:
    """Commit single tasks to PostgreSQL, for Redis."""
    measured: dict[str, list[list[float]]] = {way.name: [] for way in WAYS}
    for _ in range(scale.rounds):
        for way in WAYS:
            with _delivery(stage, way) as (outbox, client):
                _latency(outbox, client, way)  # connects
                turns = range(max(1, scale.turns // way.share))
                measured[way.name].append([_latency(outbox, client, way) for _ in turns])
    ours = [statistics.median(seconds) for seconds in measured[NOTIFIED.name]]
    return Report(
        title="From COMMIT to Redis: a relay that PostgreSQL notifies, against one that asks",
        ratios=[
            Ratio(
                name=f"against {way.name}",
                ours=ours,
                theirs=[statistics.median(seconds) for seconds in measured[way.name]],
            )
            for way in WAYS
            if way is not NOTIFIED
        ],
        notes=[_note(way, [each for one in measured[way.name] for each in one]) for way in WAYS],
    )


@contextmanager
def _delivery(stage: Stage, way: Way) -> Iterator[tuple[Outbox, redis.Redis]]:
    """A running relay, and a client of its Redis."""
    url = stage.redis.empty_database()
    engine = sa.create_engine(stage.database_url("postgresql"))
    outbox = make_outbox(url, engine, notify=way.notify)
    with (
        closing(redis.Redis.from_url(url)) as client,
        relaying(outbox, sleep=timedelta(seconds=way.sleep)),
    ):
        yield outbox, client
    outbox.app.close()
    engine.dispose()


def _latency(outbox: Outbox, client: redis.Redis, way: Way) -> float:
    time.sleep(random.uniform(0, way.longest_pause))
    engine = outbox.settings.databases["default"]
    with engine.connect() as connection, connection.begin() as transaction:
        send(outbox)
        began = time.perf_counter()
        transaction.commit()
    assert client.blpop([QUEUE], timeout=PATIENCE_SECONDS) is not None
    return time.perf_counter() - began


def _note(way: Way, seconds: Sequence[float]) -> str:
    median = statistics.median(seconds)
    last = sorted(seconds)[int(len(seconds) * 0.99)]
    said = f"{way.name}: median {median * 1e3:.1f} ms, 99th percentile {last * 1e3:.1f} ms"
    if way is not NOTIFIED:
        return said
    return f"{said} (target {TARGET * 1e3:.0f} ms, {'met' if median <= TARGET else 'NOT met'})"
