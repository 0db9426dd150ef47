"""When Python's sqlite3 begins: by itself, by an event, or as its own ``autocommit`` says."""

import sys
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from celery_outbox.errors import TransactionError
from tests.capture.shop import MakeEngine, OpenShop, Shop

since_python_3_12 = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="sqlite3 has an autocommit of its own since Python 3.12"
)


def begun_by_an_event(url: str) -> sa.Engine:
    engine = sa.create_engine(url, connect_args={"isolation_level": None})
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return engine


def always_in_a_transaction(url: str) -> sa.Engine:
    return sa.create_engine(url, connect_args={"autocommit": False})


@pytest.mark.parametrize("kind", [sa.Engine.connect, Session], ids=["connection", "session"])
@pytest.mark.parametrize(
    "engine_of", [begun_by_an_event, pytest.param(always_in_a_transaction, marks=since_python_3_12)]
)
def test_every_way_to_have_transactions_begun_is_a_transaction(
    engine_of: Any, kind: Any, sqlite_url: str, request: pytest.FixtureRequest, open_shop: OpenShop
) -> None:
    engine = engine_of(sqlite_url)
    request.addfinalizer(engine.dispose)
    shop = open_shop({"default": engine})
    with kind(engine) as transaction:
        for number, end in enumerate([transaction.rollback, transaction.commit]):
            with transaction.begin_nested():
                shop.order_and_send(transaction, number)
            end()
    assert (shop.orders, shop.tasks) == ([1], ["1"])


@since_python_3_12
@pytest.mark.parametrize("kind", [sa.Engine.connect, Session], ids=["connection", "session"])
def test_the_autocommit_of_the_driver_is_refused(
    kind: Any, sqlite_shop: Shop, make_engine: MakeEngine
) -> None:
    engine = make_engine(sqlite_shop.engine.url, connect_args={"autocommit": True})
    with kind(engine) as transaction:
        transaction.execute(sa.select(1))
        with pytest.raises(TransactionError, match="AUTOCOMMIT"):
            sqlite_shop.send("a")
    assert sqlite_shop.tasks == []
