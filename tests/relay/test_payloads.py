"""What a task is given, and its id: stored as it is, or refused at the call."""

from typing import Any

import pytest
import sqlalchemy as sa
from kombu.exceptions import EncodeError
from sqlalchemy.orm import Session

from celery_outbox import Outbox
from celery_outbox.errors import OptionError
from tests.relay.apps import relay_once, rows, send
from tests.relay.conftest import OpenOutbox
from tests.relay.wire import redis_envelopes


@pytest.fixture
def outbox(open_outbox: OpenOutbox, redis_url: str, database_url: str) -> Outbox:
    """An outbox on each database in turn, before Redis."""
    return open_outbox(redis_url, database_url)


class Unserializable:
    pass


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"args": (Unserializable(), 0)}, EncodeError),
        ({"args": (1, 2), "headers": {"h": Unserializable()}}, TypeError),
        ({"args": (1, 2), "serializer": "no such"}, Exception),
        ({"args": (1, 2), "task_id": "x" * 256}, OptionError),
        ({"args": (1, 2), "task_id": "a\0b"}, OptionError),
    ],
    ids=["argument", "header", "serializer", "long id", "NUL in the id"],
)
def test_what_cannot_be_stored_fails_at_the_call_and_leaves_the_transaction_usable(
    options: dict[str, Any], error: type[Exception], outbox: Outbox
) -> None:
    orders = sa.Table("orders", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True))
    bind = outbox.settings.databases["default"]
    assert isinstance(bind, sa.Engine)
    orders.create(bind)
    with Session(bind) as session, session.begin():
        session.execute(sa.insert(orders).values(id=1))
        with pytest.raises(error):
            outbox.app.send_task("shop.add", via_outbox=True, **options)
        session.execute(sa.insert(orders).values(id=2))
        send(outbox, task_id="good")
    assert [row.task_id for row in rows(outbox)] == ["good"]
    with bind.connect() as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(orders)).scalar() == 2


def test_a_wrong_number_of_arguments_fails_at_the_call(outbox: Outbox) -> None:
    with pytest.raises(TypeError, match="positional argument"):
        outbox.app.tasks["shop.add"].apply_async((1, 2, 3), via_outbox=True)
    assert rows(outbox) == []


def test_an_id_of_255_characters_is_stored_whole(outbox: Outbox) -> None:
    longest = "\U0001f600" + "x" * 254
    send(outbox, task_id=longest)
    assert [row.task_id for row in rows(outbox)] == [longest]


def test_an_id_of_a_rolled_back_call_can_be_used_again(outbox: Outbox, redis_url: str) -> None:
    bind = outbox.settings.databases["default"]
    assert isinstance(bind, sa.Engine)
    with pytest.raises(KeyboardInterrupt), Session(bind) as session, session.begin():
        session.execute(sa.text("SELECT 1"))
        send(outbox, task_id="fixed-1")
        raise KeyboardInterrupt
    assert rows(outbox) == []
    for _ in range(2):
        with Session(bind) as session, session.begin():
            session.execute(sa.text("SELECT 1"))
            send(outbox, task_id="fixed-1")
    relay_once(outbox)
    ids = [each["headers"]["id"] for each in redis_envelopes(redis_url)]
    assert ids == ["fixed-1", "fixed-1"]


@pytest.mark.parametrize("task_id", ["\ud800", "tab\tand\nnewline", "é漢", " "])
def test_an_odd_id_is_stored_or_refused_at_the_call(task_id: str, outbox: Outbox) -> None:
    bind = outbox.settings.databases["default"]
    assert isinstance(bind, sa.Engine)
    stored = []
    with Session(bind) as session, session.begin():
        session.execute(sa.text("SELECT 1"))
        try:
            stored.append(send(outbox, task_id=task_id))
        except OptionError:
            assert task_id == "\ud800"
    assert [row.task_id for row in rows(outbox)] == stored
