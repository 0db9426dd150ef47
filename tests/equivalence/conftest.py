"""A plain app beside one with an outbox, on a real broker, while the clock stands still."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import kombu.pools
import pytest
import sqlalchemy as sa
from celery import Celery
from freezegun import freeze_time

from tests.equivalence.pairs import TASK, Pair
from tests.relay.apps import add, make_outbox
from tests.relay.wire import amqp_connection
from tests.servers import RabbitServer

MakePair = Callable[..., Pair]

#: What the tests declare on RabbitMQ.
QUEUES = ("celery", "events", "main", "reports", "vip")
EXCHANGES = ("celery", "celeryev", "d", "mainx", "vipx", "main", "reports", "vip")


@pytest.fixture(scope="module", autouse=True)
def frozen_clock() -> Iterator[datetime]:
    """Stop the clock of this process at the present time; the servers' own clocks go on."""
    now = datetime.now(UTC).replace(microsecond=123456)
    with freeze_time(now):
        yield now


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sa.Engine]:
    """An engine of the database of a module's outboxes; each test leaves it empty."""
    engine = sa.create_engine(f"sqlite:///{tmp_path_factory.mktemp('pairs') / 'outbox.db'}")
    sa.event.listen(
        engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF")
    )
    yield engine
    engine.dispose()


@contextmanager
def making_pairs(engine: sa.Engine) -> Iterator[MakePair]:
    """Make pairs of apps on a broker; all are closed at the end."""
    pairs: list[Pair] = []

    def make(url: str, *, keeps_declared: bool = False, **config: Any) -> Pair:
        plain = Celery("shop", broker=url, set_as_current=False)
        plain.task(add, name=TASK)
        outbox = make_outbox(url, engine)
        pair = Pair(url=url, plain=plain, outbox=outbox, keeps_declared=keeps_declared)
        pair.configure(**config)
        pairs.append(pair)
        return pair

    yield make
    for pair in pairs:
        pair.plain.close()
        pair.outbox.app.close()
    # Kombu keeps pools by URL, and in them what it declared: Redis databases come round again.
    kombu.pools.reset()


@pytest.fixture
def make_pair(engine: sa.Engine) -> Iterator[MakePair]:
    """Make pairs of apps on a broker; all are closed when the test ends."""
    with making_pairs(engine) as make:
        yield make


@pytest.fixture(scope="module")
def shared_vhost(rabbitmq: RabbitServer) -> str:
    """A virtual host for a whole module: making one takes longer than emptying it."""
    return rabbitmq.empty_vhost()


@pytest.fixture
def emptied_vhost(shared_vhost: str) -> Iterator[str]:
    """The URL of the module's virtual host, with nothing declared in it."""
    yield shared_vhost
    with amqp_connection(shared_vhost) as connection:
        channel = connection.channel()
        for queue in QUEUES:
            channel.queue_delete(queue)
        for exchange in EXCHANGES:
            channel.exchange_delete(exchange)


@pytest.fixture(scope="module", params=["redis", "rabbitmq"])
def shared_pair(request: pytest.FixtureRequest, engine: sa.Engine) -> Iterator[Pair]:
    """A pair of apps on each broker in turn, which no test of the module sets up in its own way."""
    server = request.getfixturevalue("redis_server" if request.param == "redis" else "rabbitmq")
    url = server.empty_database() if request.param == "redis" else server.empty_vhost()
    with making_pairs(engine) as make:
        pair = make(url, keeps_declared=True)
        pair.plain.tasks[TASK].typing = pair.outbox.app.tasks[TASK].typing = False
        yield pair


@pytest.fixture(params=["redis_url", "emptied_vhost"], ids=["redis", "rabbitmq"])
def pair(request: pytest.FixtureRequest, make_pair: MakePair) -> Pair:
    """A pair of apps on each broker in turn."""
    return make_pair(request.getfixturevalue(request.param))


@pytest.fixture
def redis_pair(redis_url: str, make_pair: MakePair) -> Pair:
    """A pair of apps on Redis."""
    return make_pair(redis_url)


@pytest.fixture
def rabbitmq_pair(emptied_vhost: str, make_pair: MakePair) -> Pair:
    """A pair of apps on RabbitMQ."""
    return make_pair(emptied_vhost)
