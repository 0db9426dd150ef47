"""Ends without a commit: the tasks are dropped, nothing is left, and the log says what was lost."""

import gc
import logging
import threading
import weakref
from collections.abc import Callable

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, close_all_sessions, scoped_session, sessionmaker

from tests.capture.shop import (
    TASK_NAME,
    TRACKING_LOGGER,
    FurnishedEngine,
    MakeEngine,
    OpenShop,
    OutOfStockError,
    Shop,
    insert_order,
)


@pytest.fixture
def warnings_logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What the outbox has warned of."""
    caplog.set_level(logging.INFO, TRACKING_LOGGER)

    def logged() -> list[str]:
        assert {each.levelname for each in caplog.records if each.name == TRACKING_LOGGER} <= {
            "WARNING"
        }
        return [each.getMessage() for each in caplog.records if each.name == TRACKING_LOGGER]

    return logged


Logged = Callable[[], list[str]]


def close(session: Session) -> None:
    session.close()


def reset(session: Session) -> None:
    session.reset()


def invalidate(session: Session) -> None:
    session.invalidate()


def close_all(session: Session) -> None:
    close_all_sessions()


def close_transaction(session: Session) -> None:
    session.get_transaction().close()


def leave_with_block(session: Session) -> None:
    with session:
        pass


def leave_with_block_by_an_error(session: Session) -> None:
    with pytest.raises(OutOfStockError), session:
        raise OutOfStockError


def roll_back_its_connection(session: Session) -> None:
    session.connection().rollback()
    session.close()


def roll_back_its_connections_transaction(session: Session) -> None:
    session.connection().get_transaction().rollback()
    session.close()


def invalidate_its_connection(session: Session) -> None:
    session.connection().invalidate()
    session.close()


def close_its_connection(session: Session) -> None:
    session.connection().close()
    session.close()


def close_in_a_savepoint(session: Session) -> None:
    session.begin_nested()
    session.close()


WITHOUT_COMMIT = [
    close,
    reset,
    invalidate,
    close_all,
    close_transaction,
    leave_with_block,
    leave_with_block_by_an_error,
    roll_back_its_connection,
    roll_back_its_connections_transaction,
    invalidate_its_connection,
    close_its_connection,
    close_in_a_savepoint,
]


@pytest.mark.parametrize("end", WITHOUT_COMMIT, ids=lambda end: end.__name__)
def test_an_end_without_commit_drops_the_tasks_and_says_so(
    shop: Shop, warnings_logged: Logged, end: Callable[[Session], None]
) -> None:
    session = Session(shop.engine)
    shop.order_and_send(session, 1)
    shop.send("2")
    end(session)
    session.begin()
    shop.order_and_send(session, 3)
    session.commit()
    session.close()
    del session
    (warning,) = warnings_logged()
    assert TASK_NAME in warning
    assert "2 outbox message" in warning
    assert (shop.orders, shop.tasks) == ([3], ["3"])


@pytest.mark.parametrize("end", [close, reset, leave_with_block], ids=lambda end: end.__name__)
def test_tasks_of_a_session_without_any_sql_are_dropped_alike(
    sqlite_shop: Shop, warnings_logged: Logged, end: Callable[[Session], None]
) -> None:
    session = Session(sqlite_shop.engine)
    session.begin()
    sqlite_shop.send("1")
    end(session)
    assert (len(warnings_logged()), sqlite_shop.tasks) == (1, [])


def test_a_removed_scoped_session_drops_its_tasks(sqlite_shop: Shop, warnings_logged: Logged) -> None:
    registry = scoped_session(sessionmaker(sqlite_shop.engine))
    sqlite_shop.order_and_send(registry(), 1)
    registry.remove()
    assert (len(warnings_logged()), sqlite_shop.tasks) == (1, [])


def test_a_garbage_collected_session_drops_its_tasks(shop: Shop, warnings_logged: Logged) -> None:
    session = Session(shop.engine)
    shop.order_and_send(session, 1)
    is_alive = weakref.ref(session)
    del session
    gc.collect()
    with Session(shop.engine) as later, later.begin():
        insert_order(later, 2)
    (warning,) = warnings_logged()
    assert is_alive() is None
    assert TASK_NAME in warning
    assert (shop.orders, shop.tasks) == ([2], [])


def test_a_garbage_collected_session_leaves_the_way_free_for_the_next(
    sqlite_shop: Shop, warnings_logged: Logged
) -> None:
    session = Session(sqlite_shop.engine)
    sqlite_shop.order_and_send(session, 1)
    del session
    gc.collect()
    with Session(sqlite_shop.engine) as later, later.begin():
        sqlite_shop.order_and_send(later, 2)
    assert (len(warnings_logged()), sqlite_shop.tasks) == (1, ["2"])


def test_a_session_left_by_a_thread_that_ended_is_dropped(
    sqlite_shop: Shop, warnings_logged: Logged
) -> None:
    def work() -> None:
        session = Session(sqlite_shop.engine)
        session.begin()
        sqlite_shop.send("1")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    gc.collect()
    assert (len(warnings_logged()), sqlite_shop.tasks) == (1, [])


def rollback(session: Session) -> None:
    session.rollback()


def leave_begin_by_an_error(session: Session) -> None:
    session.rollback()
    with pytest.raises(OutOfStockError), session.begin():
        insert_order(session, 1)
        raise OutOfStockError


def roll_back_the_transaction(session: Session) -> None:
    session.get_transaction().rollback()


def roll_back_in_a_savepoint(session: Session) -> None:
    session.begin_nested()
    session.rollback()


@pytest.mark.parametrize(
    "end",
    [rollback, leave_begin_by_an_error, roll_back_the_transaction, roll_back_in_a_savepoint],
    ids=lambda end: end.__name__,
)
def test_an_explicit_rollback_drops_them_silently(
    shop: Shop, warnings_logged: Logged, end: Callable[[Session], None]
) -> None:
    with Session(shop.engine) as session:
        shop.order_and_send(session, 1)
        end(session)
        session.begin()
        insert_order(session, 2)
        session.commit()
    assert (warnings_logged(), shop.orders, shop.tasks) == ([], [2], [])


def test_a_rolled_back_savepoint_drops_its_tasks_silently(shop: Shop, warnings_logged: Logged) -> None:
    with Session(shop.engine) as session:
        with pytest.raises(OutOfStockError), session.begin_nested():
            shop.order_and_send(session, 1)
            raise OutOfStockError
        session.commit()
    assert (warnings_logged(), shop.tasks) == ([], [])


def test_a_commit_warns_of_nothing(shop: Shop, warnings_logged: Logged) -> None:
    with Session(shop.engine) as session:
        with session.begin_nested():
            shop.order_and_send(session, 1)
        shop.order_and_send(session, 2)
        session.commit()
    gc.collect()
    assert (warnings_logged(), shop.tasks) == ([], ["1", "2"])


def test_a_session_closed_without_tasks_warns_of_nothing(
    sqlite_shop: Shop, warnings_logged: Logged
) -> None:
    with Session(sqlite_shop.engine) as session:
        insert_order(session, 1)
    assert warnings_logged() == []


@pytest.mark.parametrize("end", ["commit", "rollback", "close"])
def test_a_session_that_has_ended_is_kept_alive_by_nobody(sqlite_shop: Shop, end: str) -> None:
    session = Session(sqlite_shop.engine)
    sqlite_shop.order_and_send(session, 1)
    getattr(session, end)()
    is_alive = weakref.ref(session)
    del session
    gc.collect()
    assert is_alive() is None


def test_a_lost_connection_takes_the_tasks_with_it(
    furnished_engine: FurnishedEngine, make_engine: MakeEngine, open_shop: OpenShop
) -> None:
    shop = open_shop({"default": furnished_engine("postgresql")})
    with Session(shop.engine) as session:
        shop.order_and_send(session, 1)
        backend = session.scalar(sa.text("SELECT pg_backend_pid()"))
        with make_engine(shop.engine.url).connect() as killer:
            killer.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": backend})
        with pytest.raises(sa.exc.OperationalError):
            session.commit()
        session.rollback()
        shop.order_and_send(session, 2)
        session.commit()
    assert (shop.orders, shop.tasks) == ([2], ["2"])
