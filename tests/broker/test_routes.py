"""Which tasks are written into the broker's own tables, as which rows, and which need a relay."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery
from kombu import Connection, Exchange, Queue
from sqlalchemy.orm import Session

from tests.broker.conftest import Beside, MakeBeside, furnish
from tests.relay.apps import add, make_due, relay_once, rows, send
from tests.relay.wire import database_connection, database_envelopes, task_ids
from tests.servers import DatabaseServer

# Kombu's tables use what SQLAlchemy 2.1 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")

PAST = datetime.now(UTC) - timedelta(hours=1)
BILLS = Exchange("accounts", "direct")

STRAIGHT: Mapping[str, Mapping[str, Any]] = {
    "usual": {},
    "another queue": {"queue": "other"},
    "due at once": {"countdown": 0},
    "due already": {"eta": PAST},
    "expiring": {"expires": datetime(2100, 1, 1, tzinfo=UTC)},
    "headers": {"headers": {"a": [1, None, "é\U0001f600%s:x?"]}},
    "priority": {"priority": 7},
    "reply": {"reply_to": "answers"},
    "pickle": {"serializer": "pickle"},
    "compressed": {"compression": "zlib"},
    "direct exchange": {
        "exchange": BILLS,
        "routing_key": "eu",
        "declare": [Queue("other", BILLS, "eu")],
    },
}


def whole(url: str) -> list[dict[str, Any]]:
    """Every row of Kombu's messages, without what is drawn by lot, counted, or the sender's own."""
    with database_connection(url) as connection:
        found = connection.execute(sa.text("SELECT * FROM kombu_message ORDER BY id")).mappings()
        made = [dict(row) for row in found]
    for row in made:
        del row["id"]
        row["payload"] = json.loads(row["payload"])
        assert len(row["payload"]["properties"].pop("delivery_tag")) == 36
        if "expiration" in row["payload"]["properties"]:
            row["payload"]["properties"]["expiration"] = "later"
        if row["payload"]["properties"]["reply_to"] != "answers":
            row["payload"]["properties"]["reply_to"] = ""
    return made


@pytest.mark.parametrize("name", STRAIGHT)
def test_the_row_is_the_one_that_celery_writes_itself(
    name: str, sqlite_url: str, make_beside: MakeBeside
) -> None:
    beside = make_beside(sqlite_url, "celery", "other")
    plain = Celery("plain", broker=beside.url, set_as_current=False)
    plain.task(add, name="shop.add", shared=False)
    for app, choice in [(plain, {}), (beside.outbox.app, {"via_outbox": True})]:
        task = app.tasks["shop.add"]
        task.apply_async((1, 2), task_id="the-id", **STRAIGHT[name], **choice)
    plain.close()
    assert beside.to_relay == []
    celerys, ours = whole(beside.url)
    assert ours == celerys


def test_the_rows_of_each_database_are_those_of_kombu(beside: Beside) -> None:
    beside.send(task_id="first")
    plain = Celery("plain", broker=beside.url, set_as_current=False)
    plain.send_task("shop.add", (1, 2), task_id="first")
    plain.close()
    ours, celerys = whole(beside.url)
    assert ours == celerys
    with Connection(beside.url) as broker:
        message = broker.default_channel.basic_get("celery", no_ack=True)
        assert message.decode()[0] == [1, 2]
        assert message.headers["id"] == "first"


TOPIC = Exchange("reports", "topic")

RELAYED: Mapping[str, Mapping[str, Any]] = {
    "delayed": {"countdown": 600},
    "at a time": {"eta": datetime(2100, 1, 1, tzinfo=UTC)},
    "a queue that is not there": {"queue": "new"},
    "topic": {
        "exchange": TOPIC,
        "routing_key": "a.b",
        "declare": [Queue("celery", TOPIC, "a.#")],
    },
    "two queues": {
        "exchange": BILLS,
        "routing_key": "us",
        "declare": [Queue("celery", BILLS, "us"), Queue("other", BILLS, "us")],
    },
    "a queue beside it": {"declare": [Queue("celery"), Queue("new")]},
    "another key": {
        "exchange": BILLS,
        "routing_key": "us",
        "declare": [Queue("celery", BILLS, "eu")],
    },
}


@pytest.mark.parametrize("name", RELAYED)
def test_what_would_need_to_ask_is_left_to_a_relay(
    name: str, sqlite_url: str, make_beside: MakeBeside
) -> None:
    beside = make_beside(sqlite_url, "celery", "other")
    sent = beside.send(**RELAYED[name])
    assert beside.to_relay == [sent]
    assert database_envelopes(beside.url) == []


def test_options_that_may_lead_elsewhere_are_left_to_a_relay(
    sqlite_url: str, make_beside: MakeBeside
) -> None:
    options = {"execution_options": {"schema_translate_map": {None: "main"}}}
    beside = make_beside(sqlite_url, config={"broker_transport_options": options})
    furnish(beside.url, "celery")
    sent = beside.send()
    assert (beside.on_broker, beside.to_relay) == ([], [sent])
    relay_once(beside.outbox)
    assert (beside.on_broker, beside.to_relay) == ([sent], [])


def test_a_relay_makes_what_is_missing_and_the_next_task_needs_none(
    database_url: str, make_beside: MakeBeside
) -> None:
    beside = make_beside(database_url)
    for queue in ("celery", "other"):
        first = beside.send(queue=queue)
        assert beside.to_relay == [first]
        relay_once(beside.outbox)
        second = beside.send(queue=queue)
        assert beside.to_relay == []
        assert task_ids(beside.url, queue) == [first, second]


def test_a_missing_table_harms_no_transaction(database_url: str, make_beside: MakeBeside) -> None:
    beside = make_beside(database_url)
    with beside.engine.begin() as connection:
        sent = beside.order_and_send(connection, 1)
        beside.order_and_send(connection, 2, queue="other")
    assert beside.orders == [1, 2]
    assert beside.to_relay[0] == sent


def test_another_database_needs_a_relay(
    database_url: str, tmp_path: Any, make_beside: MakeBeside
) -> None:
    url = f"sqla+sqlite:///{tmp_path / 'another.db'}"
    furnish(url, "celery")
    beside = make_beside(database_url, broker=url)
    with Session(beside.engine) as where, where.begin():
        sent = beside.order_and_send(where, 1)
    assert (beside.on_broker, beside.to_relay) == ([], [sent])
    relay_once(beside.outbox)
    assert (beside.on_broker, beside.to_relay) == ([sent], [])


def test_tables_of_other_names(database_url: str, make_beside: MakeBeside) -> None:
    names = {"queue_tablename": "shop_queue", "message_tablename": "shop_message"}
    beside = make_beside(database_url, config={"broker_transport_options": names})
    first = beside.send()
    assert beside.to_relay == [first]
    relay_once(beside.outbox)
    second = beside.send()
    assert beside.to_relay == []
    with database_connection(beside.url) as connection:
        assert not sa.inspect(connection).has_table("kombu_message")
        payloads = connection.scalars(sa.text("SELECT payload FROM shop_message ORDER BY id"))
        assert [json.loads(each)["headers"]["id"] for each in payloads] == [first, second]


def test_what_a_column_would_cut_goes_to_the_relay(mariadb_url: str, make_beside: MakeBeside) -> None:
    careless = {"connect_args": {"init_command": "SET SESSION sql_mode = ''"}}
    beside = make_beside(mariadb_url, "celery", engine=careless)
    with Session(beside.engine) as where, where.begin():
        small = beside.order_and_send(where, 1)
        large = beside.outbox.app.send_task("shop.add", ["x" * 60_000], via_outbox=True).id
    assert (beside.on_broker, beside.to_relay, beside.orders) == ([small], [large], [1])
    relay_once(beside.outbox)
    (row,) = rows(beside.outbox)
    assert "at most 65535 bytes" in row.error


def test_a_connection_that_looks_for_tables_elsewhere_writes_where_workers_read(
    postgresql_url: str, make_beside: MakeBeside
) -> None:
    beside = make_beside(postgresql_url, "celery", table="public.celery_outbox")
    first = beside.send()
    beside.change("CREATE SCHEMA tenant")
    with beside.engine.begin() as connection:
        connection.execute(sa.text("SET LOCAL search_path TO tenant"))
        second = beside.send()
    moved = beside.engine.execution_options(schema_translate_map={None: "tenant"})
    with moved.begin():
        third = beside.send()
    assert (beside.on_broker, beside.to_relay) == ([first, second, third], [])


def test_a_user_who_may_not_write_there_needs_a_relay(
    postgresql_url: str, make_beside: MakeBeside
) -> None:
    beside = make_beside(postgresql_url, "celery")
    role = f"clerk_{beside.engine.url.database}"
    beside.change(f"CREATE ROLE {role} LOGIN")
    beside.change(f"GRANT SELECT, INSERT ON celery_outbox, orders, kombu_queue TO {role}")
    beside.change(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {role}")
    clerk = sa.create_engine(beside.engine.url.set(username=role), poolclass=sa.NullPool)
    with Session(clerk) as where, where.begin():
        sent = beside.order_and_send(where, 1)
    assert (beside.on_broker, beside.to_relay, beside.orders) == ([], [sent], [1])


@pytest.mark.parametrize("rights", [None, "SELECT"])
def test_a_user_of_mariadb_who_may_not_write_there_needs_a_relay(
    rights: str | None, mariadb: DatabaseServer, mariadb_url: str, make_beside: MakeBeside
) -> None:
    beside = make_beside(mariadb_url, "celery")
    clerk = f"clerk_{beside.engine.url.database}"
    granted = dict.fromkeys(("celery_outbox", "orders"), "SELECT, INSERT")
    if rights:
        granted |= dict.fromkeys(("kombu_queue", "kombu_message"), rights)
    # Only root may give any.
    socket = mariadb.processes[0].log.parent / "socket"
    root = sa.create_engine(
        f"mysql+pymysql://root@localhost/{beside.engine.url.database}?unix_socket={socket}",
        poolclass=sa.NullPool,
    )
    with root.begin() as connection:
        connection.execute(sa.text(f"CREATE USER '{clerk}'@'%' IDENTIFIED BY 'secret'"))
        for table, what in granted.items():
            connection.execute(sa.text(f"GRANT {what} ON {table} TO '{clerk}'@'%'"))
    engine = sa.create_engine(beside.engine.url.set(username=clerk), poolclass=sa.NullPool)
    with Session(engine) as where, where.begin():
        sent = beside.order_and_send(where, 1)
    assert (beside.on_broker, beside.to_relay, beside.orders) == ([], [sent], [1])


# By way of the relay


def test_a_relay_that_died_before_it_deleted_sends_the_same_id_again(beside: Beside) -> None:
    sent = beside.send(countdown=600)
    make_due(beside.outbox)
    database = beside.outbox.databases["default"]
    lease = beside.outbox.settings.retry_after
    with database.begin() as connection:
        claim = database.store.claim(connection, broker="shop", limit=10, lease=lease)
    publisher = beside.outbox.publisher("shop")
    publisher.connect()
    outcome = publisher.publish(claim.messages, deadline=claim.expires, read_at=claim.read_at)
    publisher.close()
    assert len(outcome.accepted) == 1
    make_due(beside.outbox)
    relay_once(beside.outbox)
    assert (beside.on_broker, beside.to_relay) == ([sent, sent], [])


@pytest.mark.parametrize("most", [3, None])
def test_the_policy_of_publishing_retries_reaches_no_engine(
    most: int | None, sqlite_url: str, tmp_path: Any, make_beside: MakeBeside
) -> None:
    policy = {"max_retries": most, "interval_start": 0, "interval_step": 0.1, "interval_max": 0.2}
    url = f"sqla+sqlite:///{tmp_path / 'another.db'}"
    beside = make_beside(sqlite_url, broker=url, config={"task_publish_retry_policy": policy})
    beside.outbox.app.send_task("shop.add", (1, 2), task_id="plain")
    sent = [send(beside.outbox) for _ in range(3)]
    for _ in sent:
        relay_once(beside.outbox, batch=1)
    assert beside.on_broker == ["plain", *sent]
