"""What publishing a stored message costs, against Kombu sending the same bytes one by one.

Both have a connection of the same kind and options. Kombu gets what it needs ready made: nothing is
decoded for it. What is sent lies in the broker's queue afterwards, and is cleared away untimed.
"""

import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import boto3
import sqlalchemy as sa
from celery import Celery
from kombu import Connection, Producer

from celery_outbox import ClaimedMessage, Envelope, Outbox, Publisher
from celery_outbox.capture.place import Place
from celery_outbox.message import OutboxMessage
from celery_outbox.relay.publishers import publisher_for
from tests.benchmarks.measuring import Ratio, Report, Scale, Stopwatch, rounds
from tests.benchmarks.stage import QUEUE, TASK, Stage
from tests.benchmarks.storing import ARGUMENTS, USUAL
from tests.processes import HOST

#: A relay takes up to 1000 at once (``--batch``).
BATCH = 500
#: What the stub takes to answer.
STUB_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """One broker of the comparison.

    Attributes:
        name: as it is printed.
        url: of Kombu.
        target: how many times faster; zero without one.
        empty: clears its queue.
        share: of all messages, where more would take too long.
        options: transport options of both sides.
        theirs: transport options of Kombu's side alone.
        batch: messages that the publisher gets at once.
    """

    name: str
    url: str
    target: float
    empty: Callable[[Connection], None]
    share: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    theirs: Mapping[str, Any] = field(default_factory=dict)
    batch: int = BATCH


def publish_redis(stage: Stage, scale: Scale) -> Report:
    """Publish to Redis."""
    url = stage.redis.empty_database()
    return _report([Broker(name="Redis", url=url, target=12, empty=_purge)], scale)


def publish_rabbitmq(stage: Stage, scale: Scale) -> Report:
    """Publish to RabbitMQ; Kombu with confirms, too."""
    assert stage.rabbitmq is not None
    url, confirmed = stage.rabbitmq.empty_vhost(), {"confirm_publish": True}
    brokers = [
        Broker(name="RabbitMQ", url=url, target=4.5, empty=_purge, theirs=confirmed),
        Broker(
            name="RabbitMQ, in batches of 100",
            url=url,
            target=0,
            empty=_purge,
            theirs=confirmed,
            batch=100,
        ),
    ]
    return _report(brokers, scale)


def publish_sqs(stage: Stage, scale: Scale) -> Report:
    """Publish to SQS, on moto and on a stub."""
    assert stage.sqs is not None
    assert stage.sqs_stub is not None
    # moto takes longer for each message the more of them wait, whoever sends it: few do.
    moto = Broker(
        name="SQS, on moto",
        url=stage.sqs.without_queues(),
        target=4,
        empty=_purge_sqs,
        share=0.1,
        batch=20,
    )
    stub = Broker(
        name=f"SQS, on a stub that answers after {STUB_SECONDS * 1000:.0f} ms",
        url=stage.sqs_stub,
        target=20,
        empty=_leave,
    )
    return _report([moto, stub], scale)


def publish_database(stage: Stage, scale: Scale) -> Report:
    """Publish to Kombu's database transport; no commit to PostgreSQL or MariaDB waits for the disk."""
    relaxed = {"connect_args": {"options": "-c synchronous_commit=off"}}
    brokers = [
        Broker(
            name="PostgreSQL",
            url=f"sqla+{stage.database_url('postgresql')}",
            target=10,
            empty=_delete,
            options=relaxed,
        ),
        Broker(
            name="SQLite",
            url=f"sqla+{stage.database_url('sqlite')}",
            target=10,
            empty=_delete,
            share=0.5,
        ),
        Broker(name="MariaDB", url=f"sqla+{stage.database_url('mariadb')}", target=6, empty=_delete),
    ]
    return _report(brokers, scale)


def _report(brokers: Sequence[Broker], scale: Scale) -> Report:
    brokers = [replace(each, batch=min(each.batch, scale.publishing)) for each in brokers]
    ratios = [_ratio(broker, scale) for broker in brokers]
    counts = ", ".join(f"{_count(each, scale):,} to {each.name}" for each in brokers)
    return Report(
        title="Publishing stored messages of about 1 kB, against Producer.publish one by one",
        ratios=ratios,
        notes=[f"messages of each side: {counts}"],
    )


def _count(broker: Broker, scale: Scale) -> int:
    """Messages of each side: the turns of all rounds."""
    turns = max(1, int(scale.publishing * broker.share) // (broker.batch * scale.rounds))
    return turns * scale.rounds * broker.batch


def _ratio(broker: Broker, scale: Scale) -> Ratio:
    messages = claimed_messages(broker.url, broker.batch)
    sent = [_arguments(message) for message in messages]
    with _publisher(broker) as ours, _producer(broker) as (connection, theirs):
        _publish(ours, messages[:1])
        turns = _count(broker, scale) // (broker.batch * scale.rounds)

        def turn(watch: Stopwatch) -> None:
            for name in random.sample(["ours", "theirs"], 2):
                with watch.time(name):
                    if name == "ours":
                        _publish(ours, messages)
                    else:
                        for each in sent:
                            theirs.publish(**each)
                broker.empty(connection)

        measured = rounds(turn, Scale(rounds=scale.rounds, turns=turns), warming=1)
    return Ratio(
        name=broker.name,
        ours=[each["ours"] / broker.batch for each in measured],
        theirs=[each["theirs"] / broker.batch for each in measured],
        times_faster=broker.target,
    )


def claimed_messages(url: str, count: int) -> list[ClaimedMessage]:
    """What a relay would claim of tasks that an app with this broker has stored."""
    app = Celery("shop", broker=url, set_as_current=False)
    outbox = Outbox(app, databases={"default": sa.create_engine("sqlite://")})
    stored: list[OutboxMessage] = []

    def keep(place: Place, messages: Sequence[OutboxMessage]) -> None:
        stored.extend(messages)

    outbox.sink = keep
    args, kwargs = ARGUMENTS[USUAL]
    for _ in range(count):
        app.send_task(TASK, args, kwargs, via_outbox=True)
    app.close()
    same = ("broker", "task_id", "task_name", "queue", "envelope", "body")
    return [
        ClaimedMessage(
            id=number,
            identity=uuid.uuid4().hex,
            attempts=1,
            **{name: getattr(message, name) for name in same},
        )
        for number, message in enumerate(stored)
    ]


def _arguments(message: ClaimedMessage) -> dict[str, Any]:
    envelope = Envelope.from_text(message.envelope)
    return {
        "body": message.body,
        "exchange": envelope.exchange,
        "routing_key": envelope.routing_key,
        "content_type": envelope.content_type,
        "content_encoding": envelope.content_encoding,
        "headers": dict(envelope.headers),
        "declare": list(envelope.declare),
        "retry": False,
        **envelope.properties,
    }


def _publish(publisher: Publisher, messages: Sequence[ClaimedMessage]) -> None:
    now = time.monotonic()
    outcome = publisher.publish(messages, deadline=now + 600, read_at=now)
    if len(outcome.accepted) != len(messages):
        raise RuntimeError(f"expected all to be accepted, found {outcome.errors}")


@contextmanager
def _publisher(broker: Broker) -> Iterator[Publisher]:
    publisher = publisher_for(Connection(broker.url, transport_options=dict(broker.options)))
    publisher.connect()
    yield publisher
    publisher.close()


@contextmanager
def _producer(broker: Broker) -> Iterator[tuple[Connection, Producer]]:
    options = {**broker.options, **broker.theirs}
    with Connection(broker.url, transport_options=options) as connection:
        yield connection, Producer(connection.channel(), auto_declare=False)


def _purge(connection: Connection) -> None:
    connection.default_channel.queue_purge(QUEUE)


def _purge_sqs(connection: Connection) -> None:
    client: Any = boto3.client(
        "sqs",
        region_name="us-east-1",
        endpoint_url=f"http://{HOST}:{connection.port}",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
    )
    # It may be purged once a minute only; a new one has the same URL.
    client.delete_queue(QueueUrl=client.get_queue_url(QueueName=QUEUE)["QueueUrl"])
    client.create_queue(QueueName=QUEUE)


def _leave(connection: Connection) -> None:
    """The stub does not mind."""


def _delete(connection: Connection) -> None:
    engine, _ = connection.default_channel._open()
    with engine.begin() as database:
        database.execute(sa.text("DELETE FROM kombu_message"))
