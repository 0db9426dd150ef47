"""The main promise on real servers: a commit delivers, a rollback never does."""

import base64
import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.processes import HOST, unused_port
from tests.proxy import TcpProxy
from tests.relay.apps import make_due, relay_once, rows
from tests.relay.conftest import OpenOutbox
from tests.relay.test_outages import DISPATCHES, session_of
from tests.relay.wire import task_ids
from tests.servers import DatabaseServer
from tests.waiting import wait_until

MakeProxy = Callable[[str, int], TcpProxy]

#: botocore would otherwise try again for many seconds.
NO_RETRIES = {"client-config": {"retries": {"max_attempts": 0}}}


def commit_around_savepoints(session: Session, send: Callable[[str], Any]) -> None:
    send("kept")
    with session.begin_nested():
        send("released")
    undone = session.begin_nested()
    send("undone")
    undone.rollback()
    outer = session.begin_nested()
    with session.begin_nested():
        send("released into what is undone")
    outer.rollback()
    session.commit()


def roll_back(session: Session, send: Callable[[str], Any]) -> None:
    send("undone")
    session.rollback()


def roll_back_a_first_savepoint(session: Session, send: Callable[[str], Any]) -> None:
    with session.begin_nested():
        session.execute(sa.text("SELECT 1"))
        send("released first")
    session.rollback()


@pytest.mark.parametrize(
    ("work", "delivered"),
    [
        (commit_around_savepoints, ["kept", "released"]),
        (roll_back, []),
        (roll_back_a_first_savepoint, []),
    ],
)
def test_what_committed_reaches_the_broker_and_nothing_else(
    work: Callable[[Session, Callable[[str], Any]], None],
    delivered: list[str],
    open_outbox: OpenOutbox,
    database_url: str,
    redis_url: str,
) -> None:
    engine = sa.create_engine(database_url)
    outbox = open_outbox(redis_url, database_url)

    def send(task_id: str) -> None:
        outbox.app.send_task("shop.add", (1, 2), task_id=task_id, via_outbox=True)

    with Session(engine) as session:
        session.begin()
        work(session, send)
    engine.dispose()
    relay_once(outbox)
    assert task_ids(redis_url) == delivered
    assert rows(outbox) == []


@pytest.fixture(scope="module")
def sqs_port() -> Iterator[int]:
    """The port of a private server that speaks SQS."""
    port = unused_port()
    command = [str(Path(sys.executable).with_name("moto_server")), "-H", HOST, "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: answers(port), timeout=30, message="moto_server does not answer")
            yield port
        finally:
            server.kill()


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/moto-api/", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def sqs_task_ids(port: int) -> list[str]:
    """Take every message from the queue that Celery sends to by default."""
    client = boto3.client(
        "sqs",
        endpoint_url=f"http://{HOST}:{port}",
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
    )
    url = client.get_queue_url(QueueName="celery")["QueueUrl"]
    found: list[str] = []
    while messages := client.receive_message(QueueUrl=url, MaxNumberOfMessages=10).get("Messages"):
        found += [json.loads(base64.b64decode(each["Body"]))["headers"]["id"] for each in messages]
        for each in messages:
            client.delete_message(QueueUrl=url, ReceiptHandle=each["ReceiptHandle"])
    client.close()
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """A broker behind a proxy; ``arrived`` takes or reads the ids of the tasks that lie on it."""

    url: str
    proxy: TcpProxy
    arrived: Callable[[], list[str]]


@pytest.fixture(params=["redis", "rabbitmq", "postgresql", "sqs"])
def broker(request: pytest.FixtureRequest, tcp_proxy: MakeProxy) -> Broker:
    """Each broker in turn; PostgreSQL by Kombu's database transport."""
    if request.param == "sqs":
        port = request.getfixturevalue("sqs_port")
        url, arrived = f"sqs://key:secret@{HOST}:{port}//", partial(sqs_task_ids, port)
    else:
        url = request.getfixturevalue(f"{request.param}_url")
        url = f"sqla+{url}" if request.param == "postgresql" else url
        arrived = partial(task_ids, url)
    proxy = tcp_proxy(HOST, urlsplit(url).port or 0)
    return Broker(url=proxy.through(url), proxy=proxy, arrived=arrived)


# Kombu's tables use what SQLAlchemy 2.1 calls deprecated.
@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
def test_what_was_committed_while_the_broker_was_down_is_delivered_when_it_is_back(
    broker: Broker, open_outbox: OpenOutbox, postgresql: DatabaseServer
) -> None:
    broker.proxy.refuse()
    outbox = open_outbox(
        broker.url,
        postgresql.create_database(),
        config={"broker_transport_options": NO_RETRIES} if broker.url.startswith("sqs") else None,
    )
    ids: list[str] = []
    for dispatch in DISPATCHES:
        with session_of(outbox) as session, session.begin():
            session.execute(sa.select(1))
            ids += [result.id for result in dispatch(outbox.app)]
    relay_once(outbox)
    assert [row.task_id for row in rows(outbox)] == ids
    broker.proxy.listen()
    make_due(outbox)
    relay_once(outbox)
    assert sorted(broker.arrived()) == sorted(ids)
    assert rows(outbox) == []
