"""A plain app beside one with an outbox, on a real broker, while the clock stands still."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import kombu.pools
import pytest
import sqlalchemy as sa
from celery import Celery
from freezegun import freeze_time

from tests.equivalence.frozen import frozen_engine
from tests.equivalence.pairs import TASK, Pair
from tests.relay.apps import add, make_outbox
from tests.relay.wire import amqp_connection
from tests.servers import RabbitServer

MakePair = Callable[..., Pair]
Engines = Callable[[str], sa.Engine]
NewBroker = Callable[[str], str]

BROKERS = ("redis", "rabbitmq", "database")
DATABASES = ("sqlite", "postgresql", "mariadb")

#: What the tests declare on RabbitMQ.
QUEUES = ("celery", "events", "main", "reports", "vip")
EXCHANGES = ("celery", "celeryev", "d", "mainx", "vipx", "main", "reports", "vip")


@pytest.fixture(scope="module", autouse=True)
def frozen_clock() -> Iterator[datetime]:
    """Stop the clock of this process at the present time, of which SQLite keeps milliseconds."""
    now = datetime.now(UTC).replace(microsecond=123000)
    with freeze_time(now):
        yield now


@pytest.fixture(scope="module")
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, frozen_clock: datetime
) -> Iterator[Engines]:
    """Engines of the databases of a module's outboxes; each test leaves them empty.

    Their clocks stand still, too: what is left of a delay or deadline is what there was.
    """
    made: dict[str, sa.Engine] = {}

    def engine_of(kind: str) -> sa.Engine:
        if kind not in made:
            if kind == "sqlite":
                url = f"sqlite:///{tmp_path_factory.mktemp('pairs') / 'outbox.db'}"
            else:
                url = request.getfixturevalue(kind).create_database()
            made[kind] = frozen_engine(url, frozen_clock)
        return made[kind]

    yield engine_of
    for engine in made.values():
        engine.dispose()


@pytest.fixture(scope="module")
def engine(engines: Engines) -> sa.Engine:
    """An engine for a module's tests that do not depend on the database."""
    return engines("sqlite")


@contextmanager
def making_pairs(engine: sa.Engine) -> Iterator[MakePair]:
    """Make pairs of apps on a broker; all are closed at the end."""
    pairs: list[Pair] = []

    def make(url: str, *, keeps_declared: bool = False, **config: Any) -> Pair:
        plain = Celery("shop", broker=url, set_as_current=False)
        plain.task(add, name=TASK, shared=False)
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


@pytest.fixture(scope="module")
def new_broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NewBroker:
    """Give the URL of an empty broker of a kind."""

    def url_of(kind: str) -> str:
        if kind == "database":
            return f"sqla+sqlite:///{tmp_path_factory.mktemp('broker') / 'queue.db'}"
        if kind == "redis":
            return str(request.getfixturevalue("redis_server").empty_database())
        return str(request.getfixturevalue("rabbitmq").empty_vhost())

    return url_of


@pytest.fixture(
    scope="module",
    params=zip(BROKERS, DATABASES, strict=True),
    ids="-".join,
)
def shared_pair(
    request: pytest.FixtureRequest, engines: Engines, new_broker: NewBroker
) -> Iterator[Pair]:
    """A pair of apps on each broker and database, which no test sets up in a way of its own."""
    broker, database = request.param
    with making_pairs(engines(database)) as make:
        pair = make(new_broker(broker), keeps_declared=True)
        pair.plain.tasks[TASK].typing = pair.outbox.app.tasks[TASK].typing = False
        yield pair


@pytest.fixture(
    scope="module",
    params=product(BROKERS, DATABASES),
    ids="-".join,
)
def every_pair(
    request: pytest.FixtureRequest, engines: Engines, new_broker: NewBroker
) -> Iterator[Pair]:
    """A pair of apps on each broker, with the outbox on each database."""
    broker, database = request.param
    with making_pairs(engines(database)) as make:
        yield make(new_broker(broker), keeps_declared=True, result_backend="cache+memory://")


@pytest.fixture
def broker_file(tmp_path: Path) -> str:
    """The URL of a broker in a database file of its own."""
    return f"sqla+sqlite:///{tmp_path / 'queue.db'}"


@pytest.fixture(
    params=["redis_url", "emptied_vhost", "broker_file"], ids=["redis", "rabbitmq", "database"]
)
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
