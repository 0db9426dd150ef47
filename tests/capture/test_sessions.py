"""Every way to work with a Session: what it commits is stored, what it rolls back never was."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from tests.capture.shop import (
    FurnishedEngine,
    MakeEngine,
    OpenShop,
    Order,
    OutOfStockError,
    Shop,
    insert_order,
)


@contextmanager
def plain_session(engine: sa.Engine):
    with Session(engine) as session:
        yield session
        session.commit()


@contextmanager
def session_and_begin(engine: sa.Engine):
    with Session(engine) as session, session.begin():
        yield session


def sessionmaker_begin(engine: sa.Engine):
    return sessionmaker(engine).begin()


@contextmanager
def scoped(engine: sa.Engine):
    registry = scoped_session(sessionmaker(engine))
    try:
        yield registry
        registry.commit()
    finally:
        registry.remove()


@contextmanager
def without_autobegin(engine: sa.Engine):
    with Session(engine, autobegin=False) as session:
        session.begin()
        yield session
        session.commit()


@contextmanager
def begun_by_hand(engine: sa.Engine):
    session = Session(engine)
    transaction = session.begin()
    try:
        yield session
        transaction.commit()
    finally:
        transaction.close()
        session.close()


@contextmanager
def bound_by_class(engine: sa.Engine):
    # No default bind: the outbox table is nowhere in it.
    with Session(binds={Order: engine}) as session, session.begin():
        yield session


@contextmanager
def bound_by_table(engine: sa.Engine):
    with Session(binds={Order.__table__: engine}) as session:
        yield session
        session.commit()


WAYS = [
    plain_session,
    session_and_begin,
    sessionmaker_begin,
    scoped,
    without_autobegin,
    begun_by_hand,
    bound_by_class,
    bound_by_table,
]
Way = Callable[[sa.Engine], AbstractContextManager[Any]]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


@every_way
def test_commit_stores_the_task_with_the_order(shop: Shop, way: Way) -> None:
    with way(shop.engine) as session:
        session.add(Order(id=1))
        result = shop.send("a")
    assert (shop.orders, shop.tasks, result.id) == ([1], ["a"], "a")


@every_way
def test_an_exception_leaves_neither_task_nor_order(shop: Shop, way: Way) -> None:
    with pytest.raises(OutOfStockError), way(shop.engine) as session:
        session.add(Order(id=1))
        session.flush()
        shop.send("a")
        raise OutOfStockError
    assert (shop.orders, shop.tasks) == ([], [])


@every_way
def test_rollback_by_the_caller_leaves_nothing(sqlite_shop: Shop, way: Way) -> None:
    with pytest.raises(OutOfStockError), way(sqlite_shop.engine) as session:
        insert_order(session, 1)
        sqlite_shop.send("a")
        session.rollback()
        raise OutOfStockError
    assert (sqlite_shop.orders, sqlite_shop.tasks) == ([], [])


def test_a_session_that_only_reads_is_found(shop: Shop) -> None:
    with Session(shop.engine) as session:
        session.scalars(sa.select(Order)).all()
        shop.send("a")
        assert shop.tasks == []
        session.commit()
    assert shop.tasks == ["a"]


def test_nothing_is_visible_to_others_before_commit(shop: Shop) -> None:
    with Session(shop.engine) as session:
        insert_order(session, 1)
        shop.send("a")
        session.flush()
        before = shop.tasks
        session.commit()
    assert (before, shop.tasks) == ([], ["a"])


def test_tasks_are_stored_in_the_order_of_their_dispatch(shop: Shop) -> None:
    with Session(shop.engine) as session, session.begin():
        sent = [shop.send(f"task-{number}").id for number in range(20)]
    assert shop.tasks == sent


def test_a_session_with_nothing_but_the_dispatch_stores_it(shop: Shop) -> None:
    with Session(shop.engine) as session, session.begin():
        shop.send("a")
    assert shop.tasks == ["a"]


def test_a_thousand_tasks_fit_into_one_transaction(shop: Shop) -> None:
    with Session(shop.engine) as session, session.begin():
        sent = [shop.send(f"task-{number}").id for number in range(1000)]
    assert shop.tasks == sent


def test_a_session_reused_after_rollback_stores_only_what_came_after(shop: Shop) -> None:
    with Session(shop.engine) as session:
        shop.order_and_send(session, 1)
        session.rollback()
        shop.order_and_send(session, 2)
        with pytest.raises(OutOfStockError), session.begin_nested():
            raise OutOfStockError
        session.commit()
        after_work = shop.tasks
        session.connection()
        session.commit()
    assert (shop.orders, after_work, shop.tasks) == ([2], ["2"], ["2"])


def test_the_same_task_id_may_come_again_after_a_rollback(shop: Shop) -> None:
    with Session(shop.engine) as session:
        for end in (session.rollback, session.commit, session.commit):
            session.begin()
            shop.send("fixed")
            end()
    assert shop.tasks == ["fixed", "fixed"]


def test_a_scoped_session_serves_two_threads_in_turn(shop: Shop) -> None:
    registry = scoped_session(sessionmaker(shop.engine))

    def work(number: int, end: Callable[[], None]) -> None:
        shop.order_and_send(registry(), number)
        end()
        registry.remove()

    for number, end in enumerate([registry.rollback, registry.commit, registry.commit]):
        thread = threading.Thread(target=work, args=(number, end))
        thread.start()
        thread.join()
        work(number + 10, end)
    assert (shop.orders, shop.tasks) == ([1, 2, 11, 12], ["1", "11", "2", "12"])


def test_two_threads_at_once_store_each_in_its_own_transaction(shop: Shop) -> None:
    both_sent = threading.Barrier(2, timeout=10)

    def work(number: int, *, commits: bool) -> None:
        with Session(shop.engine) as session:
            session.begin()
            shop.send(str(number))
            both_sent.wait()
            (session.commit if commits else session.rollback)()

    threads = [
        threading.Thread(target=work, args=(number,), kwargs={"commits": number == 1})
        for number in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shop.tasks == ["1"]


@contextmanager
def connection_of(engine: sa.Engine):
    with engine.connect() as connection:
        connection.begin()
        yield connection


@pytest.mark.parametrize("kind", [Session, connection_of], ids=["session", "connection"])
@pytest.mark.parametrize("server", ["sqlite", "postgresql"])
def test_a_commit_refused_by_a_deferred_constraint_stores_nothing(
    server: str,
    kind: Callable[[sa.Engine], AbstractContextManager[Session | sa.Connection]],
    request: pytest.FixtureRequest,
    make_engine: MakeEngine,
    open_shop: OpenShop,
) -> None:
    engine = make_engine(request.getfixturevalue(f"{server}_url"))
    if server == "sqlite":
        event.listen(engine, "connect", lambda driver, _: driver.execute("PRAGMA foreign_keys=ON"))
    shop = open_shop({"default": engine})
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TABLE invoices (order_id int REFERENCES orders DEFERRABLE INITIALLY DEFERRED)"
        )
    with kind(engine) as transaction:
        transaction.execute(sa.text("INSERT INTO invoices VALUES (7)"))
        shop.send("refused")
        with pytest.raises(IntegrityError):
            transaction.commit()
        transaction.rollback()
    assert shop.tasks == []
    with kind(engine) as transaction:
        transaction.execute(sa.select(1))
        shop.order_and_send(transaction, 1)
        transaction.commit()
    assert (shop.orders, shop.tasks) == ([1], ["1"])


def test_the_callers_own_integrity_error_stays_the_callers(shop: Shop) -> None:
    with Session(shop.engine) as session:
        session.add_all([Order(id=1, note="one")])
        session.commit()
    with Session(shop.engine) as session:
        session.add(Order(id=1, note="another"))
        shop.send("a")
        with pytest.raises(IntegrityError) as caught:
            session.commit()
        session.rollback()
        shop.order_and_send(session, 2)
        session.commit()
    assert "orders" in str(caught.value.statement)
    assert (shop.orders, shop.tasks) == ([1, 2], ["2"])


def test_a_dispatch_neither_flushes_nor_expires_what_is_the_callers(shop: Shop) -> None:
    with Session(shop.engine) as session:
        loaded, pending = Order(id=1, note="one"), Order(id=2)
        session.add(loaded)
        session.commit()
        _ = loaded.note
        session.add(pending)
        shop.send("a")
        assert pending in session.new
        assert not sa.inspect(loaded).expired_attributes
        assert not shop.tasks


@pytest.mark.parametrize("server", ["postgresql", "mariadb"])
@pytest.mark.parametrize("commits", [True, False])
def test_a_two_phase_session_commits_or_rolls_back_task_and_order(
    furnished_engine: FurnishedEngine, open_shop: OpenShop, server: str, commits: bool
) -> None:
    shop = open_shop({"default": furnished_engine(server)})
    with Session(shop.engine, twophase=True) as session:
        session.add(Order(id=1))
        shop.send("a")
        session.prepare()
        (session.commit if commits else session.rollback)()
        session.begin()
        shop.send("b")
        session.commit()
    assert (shop.orders, shop.tasks) == (([1], ["a", "b"]) if commits else ([], ["b"]))


class RoutingSession(Session):
    """Reads here, writes there, as in SQLAlchemy's own example of a custom get_bind()."""

    replica: sa.Engine
    primary: sa.Engine

    def get_bind(self, mapper: Any = None, clause: Any = None, **kwargs: Any) -> sa.Engine:
        is_write = self._flushing or isinstance(clause, sa.Update | sa.Delete | sa.Insert)
        return self.primary if is_write else self.replica


def test_a_session_that_routes_writes_stores_where_it_writes(
    sqlite_shop: Shop, other_url: str, make_engine: MakeEngine
) -> None:
    RoutingSession.primary, RoutingSession.replica = sqlite_shop.engine, make_engine(other_url)
    for commits in (False, True):
        with RoutingSession() as session:
            session.add(Order(id=1))
            sqlite_shop.send("a")
            (session.commit if commits else session.rollback)()
    assert (sqlite_shop.orders, sqlite_shop.tasks) == ([1], ["a"])
