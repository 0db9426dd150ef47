"""A Session on two databases, which commits one after the other."""

from collections.abc import Callable
from functools import partial

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from celery_outbox.errors import TransactionError
from tests.capture.shop import Invoice, Listen, Order, Shop, invoices, orders, tasks

BeforeSecondCommit = Callable[[sa.Connection, str], object]


@pytest.mark.parametrize("commits", [True, False])
def test_a_session_on_two_databases_stores_in_the_one_named(two_shop: Shop, commits: bool) -> None:
    main, billing = two_shop.engines.values()
    with Session(binds={Order: main, Invoice: billing}) as session:
        session.add_all([Order(id=1), Invoice(id=1)])
        two_shop.send("a", outbox_database="billing")
        two_shop.send("b", outbox_database="main")
        (session.commit if commits else session.rollback)()
    assert (tasks(main), tasks(billing)) == ((["b"], ["a"]) if commits else ([], []))


def test_a_task_shares_the_fate_of_its_own_database_when_the_second_commit_is_refused(
    two_shop: Shop, listen: Listen
) -> None:
    for engine in two_shop.engines.values():
        engine.dispose()  # what is pooled was connected without the setting
        listen(engine, "connect", lambda driver, _: driver.execute("PRAGMA foreign_keys=ON"))
        with engine.begin() as connection:
            connection.exec_driver_sql(
                "CREATE TABLE notes (bill_id int REFERENCES bills DEFERRABLE INITIALLY DEFERRED)"
            )

    def refuse(connection: sa.Connection, first: str) -> None:
        connection.exec_driver_sql("INSERT INTO notes VALUES (7)")

    with pytest.raises(IntegrityError):
        commit_both(two_shop, listen, refuse)
    assert sorted(stored(two_shop)) == [([], []), ([1], ["1"])]


def test_a_task_for_a_database_that_has_committed_already_is_refused(
    two_shop: Shop, listen: Listen
) -> None:
    def send_to_the_first(connection: sa.Connection, first: str) -> None:
        two_shop.send("2", outbox_database=first)

    with pytest.raises(TransactionError, match="committed, already"):
        commit_both(two_shop, listen, send_to_the_first)
    assert sorted(stored(two_shop)) == [([], []), ([1], ["1"])]


def commit_both(shop: Shop, listen: Listen, before_second: BeforeSecondCommit) -> None:
    """Commit an order in main and a bill in billing, with a task each, all of them number 1.

    ``before_second`` is called in the second commit, with the name of the database that came first:
    SQLAlchemy promises no order.
    """
    came: list[str] = []

    def note(connection: sa.Connection, name: str) -> None:
        came.append(name)
        if len(came) == 2:
            before_second(connection, came[0])

    with Session(binds={Order: shop.engines["main"], Invoice: shop.engines["billing"]}) as session:
        session.add_all([Order(id=1), Invoice(id=1)])
        for name, engine in shop.engines.items():
            shop.send("1", outbox_database=name)
            listen(engine, "commit", partial(note, name=name))
        session.commit()


def stored(shop: Shop) -> list[tuple[list[int], list[str]]]:
    """The rows and the tasks that main and billing hold."""
    main, billing = shop.engines.values()
    return [(orders(main), tasks(main)), (invoices(billing), tasks(billing))]
