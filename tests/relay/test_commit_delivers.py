"""The main promise on real servers: a commit delivers, a rollback never does."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.publishers.sqs_wire import task_ids as sqs_task_ids
from tests.relay.apps import make_due, relay_once, rows
from tests.relay.conftest import OpenOutbox
from tests.relay.test_outages import DISPATCHES, send_delayed, session_of
from tests.relay.wire import task_ids
from tests.servers import DatabaseServer

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """A broker behind a proxy; ``arrived`` takes or reads the ids of the tasks that lie on it.

    ``hides_delayed``: what lies there before its time cannot be read.
    """

    url: str
    proxy: TcpProxy
    arrived: Callable[[], list[str]]
    hides_delayed: bool


@pytest.fixture(params=["redis", "rabbitmq", "postgresql", "sqs"])
def broker(request: pytest.FixtureRequest, tcp_proxy: MakeProxy) -> Broker:
    """Each broker in turn; PostgreSQL by Kombu's database transport."""
    url = request.getfixturevalue(f"{request.param}_url")
    url = f"sqla+{url}" if request.param == "postgresql" else url
    is_sqs = request.param == "sqs"
    arrived = partial(sqs_task_ids if is_sqs else task_ids, url)
    proxy = tcp_proxy(HOST, urlsplit(url).port or 0)
    return Broker(url=proxy.through(url), proxy=proxy, arrived=arrived, hides_delayed=is_sqs)


# Kombu's tables use what SQLAlchemy 2.1 calls deprecated.
@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
def test_what_was_committed_while_the_broker_was_down_is_delivered_when_it_is_back(
    broker: Broker, open_outbox: OpenOutbox, postgresql: DatabaseServer
) -> None:
    broker.proxy.refuse()
    outbox = open_outbox(broker.url, postgresql.create_database())
    ids: list[str] = []
    hidden: set[str] = set()
    for dispatch in DISPATCHES:
        with session_of(outbox) as session, session.begin():
            session.execute(sa.select(1))
            sent = [result.id for result in dispatch(outbox.app)]
        ids += sent
        if broker.hides_delayed and dispatch is send_delayed:
            hidden.update(sent)
    relay_once(outbox)
    assert [row.task_id for row in rows(outbox)] == ids
    broker.proxy.listen()
    make_due(outbox)
    relay_once(outbox)
    assert sorted(broker.arrived()) == sorted(set(ids) - hidden)
    assert rows(outbox) == []
