"""A broker's database that is cut off: before, within and after the transaction of a batch."""

import threading
from typing import Any

import pytest
import sqlalchemy as sa

from celery_outbox.publishing import Publisher
from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.publishers.batches import message, publish
from tests.publishers.conftest import OpenPublisher
from tests.publishers.test_database import MakeProxy, before_statement, ids, listening
from tests.waiting import wait_until

# Kombu's tables use what SQLAlchemy 2.1 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")


@pytest.fixture(params=["postgresql", "mariadb"])
def wire(request: pytest.FixtureRequest, tcp_proxy: MakeProxy) -> tuple[TcpProxy, str, str]:
    """A proxy before a database; the broker's URL through it, and past it."""
    direct: str = request.getfixturevalue(f"{request.param}_url")
    port = sa.make_url(direct).port
    assert port is not None
    proxy = tcp_proxy(HOST, port)
    return proxy, f"sqla+{proxy.through(direct)}", f"sqla+{direct}"


def test_connecting_to_a_dead_database_fails(
    wire: tuple[TcpProxy, str, str], open_publisher: OpenPublisher
) -> None:
    proxy, url, direct = wire
    publisher = open_publisher(url)
    publisher.close()
    proxy.refuse()
    proxy.cut()
    with pytest.raises(sa.exc.OperationalError):
        publisher.connect()
    assert not publisher.is_connected
    proxy.listen()
    publisher.connect()
    sent = message()
    assert publish(publisher, [sent]).accepted == {sent.id}
    assert ids(direct) == [sent.task_id]


def assert_nothing_was_sent_and_all_is_when_back(
    publisher: Publisher, direct: str, cutting: Any
) -> None:
    messages = [message(), message()]
    with cutting:
        outcome = publish(publisher, messages)
    assert outcome.unsent == {each.id for each in messages}
    assert outcome.is_connection_lost
    assert ids(direct) == []
    publisher.connect()
    assert publish(publisher, messages).accepted == {each.id for each in messages}
    assert ids(direct) == [each.task_id for each in messages]


@pytest.mark.parametrize("where", ["SELECT kombu_queue", "INSERT INTO kombu_message"])
def test_what_was_cut_off_before_the_commit_was_not_sent(
    where: str, wire: tuple[TcpProxy, str, str], open_publisher: OpenPublisher
) -> None:
    proxy, url, direct = wire
    publisher = open_publisher(url)
    publish(publisher, [message("other")])
    cutting = before_statement(where, proxy.cut)
    assert_nothing_was_sent_and_all_is_when_back(publisher, direct, cutting)


def test_nothing_is_accepted_when_the_commit_was_not_answered(
    wire: tuple[TcpProxy, str, str], open_publisher: OpenPublisher
) -> None:
    proxy, url, direct = wire
    publisher = open_publisher(url)
    messages = [message(), message()]
    first = message()
    publish(publisher, [first])

    def cut_once_it_has_arrived() -> None:
        wait_until(lambda: len(ids(direct)) == 3, message="the commit")
        proxy.cut()

    cutting = threading.Thread(target=cut_once_it_has_arrived)

    def hold(connection: Any) -> None:
        if not cutting.ident and connection.engine.url.port == proxy.port:
            proxy.hold_replies()
            cutting.start()

    with listening("commit", hold):
        outcome = publish(publisher, messages)
    cutting.join()
    assert set(outcome.errors) == {each.id for each in messages}
    assert all("is not known" in text for text in outcome.errors.values())
    assert outcome.is_connection_lost
    proxy.resume()
    publisher.connect()
    assert publish(publisher, messages).accepted == {each.id for each in messages}
    assert ids(direct) == [first.task_id, *[each.task_id for each in messages] * 2]
