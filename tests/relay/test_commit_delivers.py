"""The main promise on real servers: a commit delivers, a rollback never does."""

import base64
import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from celery_outbox import Outbox
from tests.processes import HOST, unused_port
from tests.proxy import TcpProxy
from tests.relay.apps import relay_once, rows
from tests.relay.conftest import OpenOutbox
from tests.relay.test_outages import DISPATCHES
from tests.relay.wire import task_ids
from tests.waiting import wait_until

MakeProxy = Callable[[str, int], TcpProxy]


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


def test_every_kind_of_dispatch_is_delivered_when_the_broker_is_back(
    open_outbox: OpenOutbox, sqlite_url: str, redis_url: str, tcp_proxy: MakeProxy
) -> None:
    proxy = tcp_proxy(HOST, int(redis_url.rpartition("/")[0].rpartition(":")[2]))
    proxy.refuse()
    outbox = open_outbox(proxy.through(redis_url), sqlite_url)
    ids = [result.id for dispatch in DISPATCHES for result in dispatch(outbox.app)]
    relay_once(outbox)
    assert [row.task_id for row in rows(outbox)] == ids
    proxy.listen()
    relay_once(outbox)
    assert sorted(task_ids(redis_url)) == sorted(ids)
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


def test_what_was_stored_while_sqs_was_down_is_delivered_when_it_is_back(
    open_outbox: OpenOutbox, sqlite_url: str, sqs_port: int, tcp_proxy: MakeProxy
) -> None:
    proxy = tcp_proxy(HOST, sqs_port)
    proxy.refuse()
    outbox: Outbox = open_outbox(
        f"sqs://key:secret@{HOST}:{proxy.port}//",
        sqlite_url,
        config={"broker_transport_options": {"client-config": {"retries": {"max_attempts": 0}}}},
    )
    ids = [result.id for dispatch in DISPATCHES for result in dispatch(outbox.app)]
    relay_once(outbox)
    assert {row.task_id for row in rows(outbox)} == set(ids)
    proxy.listen()
    with outbox.databases["default"].begin() as connection:
        connection.execute(sa.text("UPDATE celery_outbox SET scheduled_at = created_at"))
    relay_once(outbox)
    assert sorted(sqs_task_ids(sqs_port)) == sorted(ids)
    assert rows(outbox) == []
