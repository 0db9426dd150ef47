"""What application code asks of an Outbox about single tasks: find, forget, reschedule."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from celery_outbox import Outbox, StoredMessage
from celery_outbox.errors import ConfigurationError, DatabaseError, OptionError
from celery_outbox.storage.database import Database
from tests.processes import HOST, unused_port
from tests.relay.apps import rows, send
from tests.relay.conftest import OpenOutbox, open_outbox
from tests.storage.rows import add, change, claim, make_message

__all__ = ["open_outbox"]

BROKER = "redis://localhost:1/0"


def test_a_task_is_found_forgotten_and_found_no_more(
    open_outbox: OpenOutbox, database_url: str
) -> None:
    outbox = open_outbox(BROKER, database_url)
    sent = send(outbox, countdown=3600)
    (message,) = outbox.find(sent)
    assert isinstance(message, StoredMessage)
    assert (message.database, message.state, message.task_name) == ("default", "delayed", "shop.add")
    assert outbox.forget(sent) is True
    assert outbox.find(sent) == []
    assert outbox.forget(sent) is False


def test_what_a_relay_has_reserved_is_neither_forgotten_nor_moved(
    open_outbox: OpenOutbox, database_url: str
) -> None:
    outbox = open_outbox(BROKER, database_url)
    sent = send(outbox)
    claim(outbox.databases["default"])
    assert [message.state for message in outbox.find(sent)] == ["reserved"]
    before = rows(outbox)
    assert outbox.forget(sent) is False
    assert outbox.reschedule(sent, timedelta(hours=1)) is False
    assert rows(outbox) == before


def test_a_task_of_which_one_message_is_reserved_may_still_be_delivered(
    box: Outbox, shop: Database
) -> None:
    add(shop, make_message("a"))
    claim(shop)
    add(shop, make_message("a"))
    assert box.forget("a") is False
    assert [message.state for message in box.find("a")] == ["reserved"]


@pytest.mark.parametrize(
    "eta",
    [
        datetime(2050, 1, 1, tzinfo=UTC),
        datetime(2050, 1, 1),
        datetime(2050, 1, 1, 2, tzinfo=datetime.strptime("+0200", "%z").tzinfo),
    ],
    ids=str,
)
def test_a_task_is_moved_to_an_instant(
    eta: datetime, open_outbox: OpenOutbox, database_url: str
) -> None:
    outbox = open_outbox(BROKER, database_url)
    sent = send(outbox, countdown=60)
    assert outbox.reschedule(sent, eta) is True
    (message,) = outbox.find(sent)
    assert message.next_attempt_at == message.deliver_at == datetime(2050, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("eta", [60, "2050-01-01", None, datetime.max, timedelta.max], ids=str)
def test_what_is_no_time_is_refused(eta: Any, box: Outbox, shop: Database) -> None:
    add(shop, make_message("a"))
    with pytest.raises(OptionError, match="eta: expected a"):
        box.reschedule("a", eta)


CALLS: dict[str, Callable[..., Any]] = {
    "find": lambda box, **options: box.find("a", **options),
    "forget": lambda box, **options: box.forget("a", **options),
    "reschedule": lambda box, **options: box.reschedule("a", timedelta(hours=1), **options),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_database_is_refused(name: str, box: Outbox) -> None:
    with pytest.raises(ConfigurationError, match="expected one of the databases 'shop', 'billing'"):
        CALLS[name](box, database="elsewhere")


@pytest.mark.parametrize("name", ["forget", "reschedule"])
def test_a_task_in_several_databases_needs_the_name_of_one(
    name: str, box: Outbox, shop: Database, billing: Database
) -> None:
    for each in (shop, billing):
        add(each, make_message("a"))
    with pytest.raises(
        ConfigurationError, match=r"found it in 'shop', 'billing'. Name one with database="
    ):
        CALLS[name](box)
    assert [message.database for message in box.find("a")] == ["shop", "billing"]
    assert CALLS[name](box, database="billing") is True
    assert [message.deliver_at for message in box.find("a", database="shop")] == [None]


@pytest.fixture
def half(boxes: Callable[[Mapping[str, str]], Outbox], shop: Database) -> Outbox:
    """An Outbox whose first database is down; the other is "shop"."""
    down = f"postgresql+psycopg://shop:hunter2@{HOST}:{unused_port()}/shop"
    return boxes({"down": down, "shop": shop.url.render_as_string()})


@pytest.mark.parametrize("name", CALLS)
def test_a_database_that_is_down_is_an_error_unless_the_task_is_in_another(
    name: str, half: Outbox, shop: Database
) -> None:
    with pytest.raises(DatabaseError, match="database 'down'"):
        CALLS[name](half)
    add(shop, make_message("a"))
    assert CALLS[name](half)


def test_they_work_beside_a_transaction_of_the_caller(
    open_outbox: OpenOutbox, postgresql_url: str
) -> None:
    outbox = open_outbox(BROKER, postgresql_url)
    waiting = send(outbox)
    engine = outbox.settings.databases["default"]
    assert isinstance(engine, sa.Engine)
    with engine.connect() as connection, connection.begin() as transaction, outbox.using(connection):
        own = send(outbox)
        assert outbox.find(own) == []
        assert outbox.forget(waiting) is True
        transaction.rollback()
    assert rows(outbox) == []


def test_kept_rows_have_the_time_of_their_delivery(box: Outbox, shop: Database) -> None:
    add(shop, make_message("a"))
    now = datetime.now(UTC)
    change(shop, attempts=1, finished_at=now)
    (message,) = box.find("a")
    assert (message.state, message.finished_at) == ("delivered", now)
    assert box.forget("a") is False
