"""Whatever event a dispatch is made in, it is stored at most once, and never in a later transaction.

For each event that SQLAlchemy knows of, a listener dispatches whenever it is called, in transactions
that commit, roll back, do both in parts, or are given up. What a committed transaction was given must
be there; what a rolled-back one was given must not, unless it was sent when that was over already.
"""

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine.events import ConnectionEvents
from sqlalchemy.orm import Session
from sqlalchemy.orm.events import SessionEvents

from celery_outbox.errors import TransactionError
from tests.capture.shop import FurnishedEngine, Listen, OpenShop, Order, Shop, insert_order


def events_of(kind: type) -> list[str]:
    return sorted(name for name in vars(kind) if name[0] != "_" and name != "dispatch")


#: Here the transaction may be over, so that a task counts as sent outside of any.
AT_THE_END = {
    "after_commit",
    "after_rollback",
    "after_soft_rollback",
    "after_transaction_end",
    "commit_twophase",
    "deleted_to_detached",
    "deleted_to_persistent",
    "pending_to_transient",
    "persistent_to_detached",
    "persistent_to_transient",
    "rollback",
    "rollback_twophase",
}
#: Here the transaction of a Connection has not begun yet.
BEFORE_THE_START = {"begin", "begin_twophase"}
TWO_PHASE = {"begin_twophase", "prepare_twophase", "rollback_twophase", "commit_twophase"}


class Ears:
    """Listens to one event and sends a task each time that it is heard."""

    def __init__(self, shop: Shop, name: str) -> None:
        self.shop = shop
        self.name = name
        self.is_listening = self.is_sending = False
        self.sent: list[str] = []
        self.has_heard = False

    def __call__(self, *args: Any) -> Any:
        # Inserting before SQLite's BEGIN would be beginning.
        is_begin = self.name == "before_cursor_execute" and args[2] == "BEGIN"
        if self.is_listening and not self.is_sending and not is_begin:
            self._send()
        # Two kinds of listeners hand their arguments on.
        given = {"before_execute": args[1:4], "before_cursor_execute": args[2:4]}
        return given.get(self.name)

    def _send(self) -> None:
        self.has_heard = self.is_sending = True
        task_id = f"{self.name}-{len(self.sent)}"
        try:
            self.shop.send(task_id)
            self.sent.append(task_id)
        except TransactionError:
            pass  # refusing is right as well
        finally:
            self.is_sending = False


def work_of_session(session: Session, first: int) -> None:
    """Bring about what a Session can tell of, without a rollback."""
    session.add_all([Order(id=first), Order(id=first + 1), Order(id=first + 2)])
    session.flush()
    session.expire_all()
    order, other = session.scalars(sa.select(Order).where(Order.id >= first).limit(2)).all()
    session.query(Order).where(Order.id == first + 2).update({"note": "x"})
    session.query(Order).where(Order.id == first + 2).delete()
    session.expunge(order)
    session.add(order)
    session.delete(other)
    session.flush()
    with session.begin_nested():
        session.add(added := Order(id=first + 3))
    session.add(pending := Order(id=first + 4))
    session.expunge(pending)
    # What nobody holds has no events at the end.
    session.info[first] = [order, other, added]


def work_of_connection(connection: sa.Connection, first: int) -> None:
    """Bring about what a Connection and its Engine can tell of, without a rollback."""
    insert_order(connection, first)
    connection.execution_options(logging_token="x")
    connection.engine.execution_options(logging_token="y")
    with connection.begin_nested():
        insert_order(connection, first + 1)


Work = Callable[[Any, int], None]


def commit(transaction: Any, work: Work) -> None:
    work(transaction, 10)
    transaction.commit()


def rollback(transaction: Any, work: Work) -> None:
    work(transaction, 20)
    undo(transaction, work, 30)
    transaction.rollback()


def undo_and_commit(transaction: Any, work: Work) -> None:
    undo(transaction, work, 40)
    transaction.commit()


def give_up(transaction: Any, work: Work) -> None:
    work(transaction, 50)
    (transaction if isinstance(transaction, Session) else transaction.get_transaction()).close()


def prepare_and_commit(connection: Any, work: Work) -> None:
    work(connection, 60)
    connection.get_transaction().prepare()
    connection.commit()


def prepare_and_rollback(connection: Any, work: Work) -> None:
    work(connection, 70)
    connection.get_transaction().prepare()
    connection.rollback()


def undo(transaction: Any, work: Work, first: int) -> None:
    savepoint = transaction.begin_nested()
    work(transaction, first)
    savepoint.rollback()


def listen_during(
    ears: Ears,
    act: Callable[[Any, Work], None],
    transaction: Any,
    work: Work,
    begin: Callable[[], Any],
) -> None:
    """Check what is stored by an act during which all was heard, and by a quiet one after it."""
    outside = AT_THE_END | (set() if isinstance(transaction, Session) else BEFORE_THE_START)
    before = ears.shop.tasks
    ears.sent.clear()
    ears.is_listening = True
    begin()
    act(transaction, work)
    ears.is_listening = False
    after = ears.shop.tasks
    stored = after[len(before) :]
    begin()
    transaction.execute(sa.select(Order)).all()
    transaction.commit()

    assert ears.shop.tasks == after, "a later transaction stored what was left over"
    assert len(set(stored)) == len(stored), "stored twice"
    if act in {commit, prepare_and_commit}:
        assert sorted(stored) == sorted(ears.sent)
    elif act is not undo_and_commit and ears.name not in outside:
        assert stored == []


def nothing() -> None:
    """Let a Session begin by itself."""


@pytest.fixture
def lenient_shop(sqlite_engine: sa.Engine, open_shop: OpenShop) -> Shop:
    """A shop where what is sent outside of transactions is stored by itself."""
    return open_shop({"default": sqlite_engine}, require_transaction=False)


@pytest.mark.parametrize("name", events_of(SessionEvents))
def test_every_event_of_a_session(lenient_shop: Shop, listen: Listen, name: str) -> None:
    ears = Ears(lenient_shop, name)
    with Session(lenient_shop.engine) as session:
        listen(session, name, ears)
        for act in (commit, rollback, undo_and_commit, give_up):
            listen_during(ears, act, session, work_of_session, nothing)
    assert ears.has_heard


@pytest.mark.parametrize("name", sorted({*events_of(ConnectionEvents)} - TWO_PHASE))
def test_every_event_of_an_engine_while_a_session_works(
    lenient_shop: Shop, listen: Listen, name: str
) -> None:
    ears = Ears(lenient_shop, name)
    listen(lenient_shop.engine, name, ears)
    with Session(lenient_shop.engine) as session:
        for act in (commit, rollback, undo_and_commit, give_up):
            listen_during(ears, act, session, work_of_session, nothing)


@pytest.mark.parametrize("name", sorted({*events_of(ConnectionEvents)} - TWO_PHASE))
def test_every_event_of_an_engine_while_a_connection_works(
    lenient_shop: Shop, listen: Listen, name: str
) -> None:
    ears = Ears(lenient_shop, name)
    listen(lenient_shop.engine, name, ears)
    with lenient_shop.engine.connect() as connection:
        for act in (commit, rollback, undo_and_commit, give_up):
            listen_during(ears, act, connection, work_of_connection, connection.begin)
    lenient_shop.engine.dispose()


@pytest.mark.parametrize("name", sorted({*events_of(ConnectionEvents)} & TWO_PHASE))
def test_every_event_of_a_two_phase_transaction(
    furnished_engine: FurnishedEngine, open_shop: OpenShop, listen: Listen, name: str
) -> None:
    shop = open_shop({"default": furnished_engine("postgresql")}, require_transaction=False)
    ears = Ears(shop, name)
    listen(shop.engine, name, ears)
    with shop.engine.connect() as connection:
        for act in (commit, rollback, prepare_and_commit, prepare_and_rollback, undo_and_commit):
            listen_during(ears, act, connection, work_of_connection, connection.begin_twophase)
    assert ears.has_heard
