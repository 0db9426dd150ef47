"""drain("broker") where the broker is in the outbox's own database: what is there is not sent again."""

from typing import Any

import kombu.pools
import pytest
from kombu import Connection
from sqlalchemy.orm import Session

from celery_outbox.testing import OutboxRecorder
from tests.relay.wire import task_ids
from tests.testing.conftest import OpenShop, Shop

# Kombu's tables use what SQLAlchemy 2.1 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")


def open_beside(open_shop: OpenShop, database: str, **options: Any) -> Shop:
    """A shop whose broker is in its own database, with the tables and the queue of a worker."""
    url = f"sqla+{database}"
    with Connection(url) as broker:
        broker.default_channel.queue_declare("celery")
        broker.default_channel.session.close()
    return open_shop(database, broker=url, **options)


def test_what_the_commit_delivered_is_not_published_again(
    database_url: str, open_shop: OpenShop
) -> None:
    shop = open_beside(open_shop, database_url)
    with OutboxRecorder(shop.app) as outbox:
        with Session(shop.engine) as session, session.begin():
            sent = [shop.send(1, expires=600), shop.send("%_\"'", priority=3)]
        assert task_ids(f"sqla+{database_url}") == sent
        assert [result.id for result in outbox.drain("broker")] == sent
        assert outbox.drain("broker") == []
    assert task_ids(f"sqla+{database_url}") == sent
    shop.app.close()
    kombu.pools.reset()


def test_what_needs_a_relay_is_published(database_url: str, open_shop: OpenShop) -> None:
    shop = open_beside(open_shop, database_url)
    with OutboxRecorder(shop.app) as outbox:
        there = shop.send(1)
        # One is delayed, and another's queue is not there yet.
        others = [shop.send(1, countdown=0.01), shop.send(1, queue="other")]
        assert {result.id for result in outbox.drain("broker")} == {there, *others}
        assert outbox.drain("broker") == []
    assert sorted(task_ids(f"sqla+{database_url}")) == sorted([there, others[0]])
    assert task_ids(f"sqla+{database_url}", "other") == [others[1]]
    shop.app.close()
    kombu.pools.reset()


@pytest.mark.parametrize("is_fake", [False, True])
def test_what_no_worker_sees_is_published(
    postgresql_url: str, open_shop: OpenShop, *, is_fake: bool
) -> None:
    shop = open_beside(open_shop, postgresql_url)
    with OutboxRecorder(shop.app, is_fake=is_fake) as outbox, shop.engine.connect() as connection:
        transaction = connection.begin()  # of the test: rolled back at its end
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            session.begin()
            sent = shop.send(1)
            session.commit()
        assert task_ids(f"sqla+{postgresql_url}") == []
        assert [result.id for result in outbox.drain("broker")] == [sent]
        assert task_ids(f"sqla+{postgresql_url}") == [sent]
        transaction.rollback()
    shop.app.close()
    kombu.pools.reset()
