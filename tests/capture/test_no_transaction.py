"""Without any transaction a dispatch is durable when the call returns."""

import time
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from celery_outbox.errors import DatabaseError, SchemaError, TransactionError
from tests.capture.shop import OpenShop, Shop, insert_order, tasks


@pytest.fixture
def lenient_shop(shop_engine: sa.Engine, open_shop: OpenShop) -> Shop:
    return open_shop({"default": shop_engine}, require_transaction=False)


@pytest.fixture
def lenient_pair(two_engines: dict[str, sa.Engine], open_shop: OpenShop) -> Shop:
    return open_shop(two_engines, require_transaction=False)


def test_it_is_stored_when_the_call_returns(lenient_shop: Shop) -> None:
    result = lenient_shop.send("a")
    assert (lenient_shop.tasks, result.id) == (["a"], "a")


def test_it_goes_to_the_first_database(lenient_pair: Shop) -> None:
    lenient_pair.send("a")
    main, billing = lenient_pair.engines.values()
    assert (tasks(main), tasks(billing)) == (["a"], [])


def test_it_goes_to_the_database_that_is_named(lenient_pair: Shop) -> None:
    lenient_pair.send("a", outbox_database="billing")
    main, billing = lenient_pair.engines.values()
    assert (tasks(main), tasks(billing)) == ([], ["a"])


def test_a_later_rollback_of_another_session_does_not_touch_it(lenient_shop: Shop) -> None:
    lenient_shop.send("a")
    with Session(lenient_shop.engine) as session:
        insert_order(session, 1)
        session.rollback()
    assert (lenient_shop.orders, lenient_shop.tasks) == ([], ["a"])


@pytest.mark.parametrize("end", ["commit", "rollback", "close"])
def test_a_session_that_has_ended_is_no_transaction(lenient_shop: Shop, end: str) -> None:
    with Session(lenient_shop.engine) as session:
        insert_order(session, 1)
        getattr(session, end)()
        lenient_shop.send("a")
        assert lenient_shop.tasks == ["a"]


@pytest.mark.parametrize("end", ["commit", "rollback", "close"])
def test_a_connection_that_has_ended_is_no_transaction(lenient_shop: Shop, end: str) -> None:
    with lenient_shop.engine.connect() as connection:
        insert_order(connection, 1)
        getattr(connection, end)()
        lenient_shop.send("a")
        assert lenient_shop.tasks == ["a"]


def test_a_missing_table_is_an_error_at_the_call(engine: sa.Engine, open_shop: OpenShop) -> None:
    shop = open_shop({"default": engine}, require_transaction=False)
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE celery_outbox"))
    with pytest.raises(SchemaError, match="schema install"):
        shop.send("a")


def test_a_database_that_is_down_is_an_error_at_the_call(lenient_pair: Shop, tmp_path: Path) -> None:
    lenient_pair.engines["billing"].dispose()
    tmp_path.joinpath("other.db").unlink()
    tmp_path.joinpath("other.db").mkdir()
    with pytest.raises(DatabaseError, match="'billing'"):
        lenient_pair.send("a", outbox_database="billing")
    assert lenient_pair.tasks == []


def test_the_call_takes_no_longer_because_the_broker_is_down(lenient_shop: Shop) -> None:
    began = time.monotonic()
    lenient_shop.send("a")
    assert time.monotonic() - began < 1


def test_the_caller_stays_without_a_transaction(lenient_shop: Shop) -> None:
    for task_id in ("a", "b"):
        lenient_shop.send(task_id)
    with Session(lenient_shop.engine) as session:
        assert not session.in_transaction()
    assert lenient_shop.tasks == ["a", "b"]


def test_where_one_is_required_using_can_give_it(sqlite_shop: Shop) -> None:
    with pytest.raises(TransactionError, match=r"outbox\.using"):
        sqlite_shop.send("a")
    with Session(sqlite_shop.engine) as session:
        with sqlite_shop.outbox.using(session):
            sqlite_shop.send("b")
        session.commit()
    assert sqlite_shop.tasks == ["b"]
