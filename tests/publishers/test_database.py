"""Kombu's database transport: whole batches in one transaction, as Kombu would have written them."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa
from kombu import Connection, Exchange, Queue
from sqlalchemy import event

from celery_outbox.relay.publishers.kombu import KombuPublisher
from tests.proxy import TcpProxy
from tests.publishers.batches import message, publish
from tests.publishers.conftest import OpenPublisher
from tests.relay.wire import database_connection, database_envelopes

# Kombu's tables use what SQLAlchemy 2.1 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")

MakeProxy = Callable[[str, int], TcpProxy]

DIRECT, TOPIC = Exchange("bills", "direct"), Exchange("weather", "topic")
BOTH = [Queue("first", TOPIC, "news.#"), Queue("second", TOPIC, "*.city")]

MESSAGES: Mapping[str, Mapping[str, Any]] = {
    "usual": {},
    "bytes": {"body": bytes(range(256)) * 5},
    "odd headers": {"headers": {'a"\n': [1, None, {"b": "é\U0001f600"}], "\nheaders": "\\%s:x?"}},
    "another queue": {"queue": "other"},
    "expiring": {"expires_in": 1_000_000.0},
    "expired": {"expires_in": -5.0},
    "priority": {"properties": {"priority": 6}},
    "type of the application": {"headers": {"x": {"__type__": "money", "__value__": 1}}},
    "odd id": {"properties": {"correlation_id": 'a"b\\'}},
    "direct": {
        "exchange": DIRECT,
        "routing_key": "eu",
        "declare": [Queue("bills-eu", DIRECT, "eu")],
    },
    "topic": {"exchange": TOPIC, "routing_key": "news.city", "declare": BOTH},
}


@pytest.fixture
def url(database_url: str) -> str:
    """A broker's URL, on each of the three databases in turn."""
    return f"sqla+{database_url}"


def table(url: str, name: str = "kombu_message") -> list[dict[str, Any]]:
    """The rows of a table, whole, by their ids."""
    with database_connection(url) as connection:
        rows = connection.execute(sa.text(f"SELECT * FROM {name} ORDER BY id"))
        return [dict(row) for row in rows.mappings()]


def ids(url: str, queue: str = "celery") -> list[str]:
    return [each["headers"]["id"] for name, each in database_envelopes(url) if name == queue]


def untagged(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what is drawn by lot or counted."""
    payload = json.loads(row["payload"])
    assert len(payload["properties"].pop("delivery_tag")) == 36
    return {**row, "id": None, "payload": payload}


@contextmanager
def listening(name: str, listener: Callable[..., Any]) -> Iterator[None]:
    """Hear of every engine's event until the block ends."""
    event.listen(sa.Engine, name, listener)
    try:
        yield
    finally:
        event.remove(sa.Engine, name, listener)


@contextmanager
def before_statement(beginning: str, action: Callable[[], Any]) -> Iterator[None]:
    """Do something once, before the first statement that begins so."""
    todo = [action]

    def listener(connection: Any, cursor: Any, statement: str, *args: Any) -> None:
        if todo and statement.startswith(beginning):
            todo.pop()()

    with listening("before_cursor_execute", listener):
        yield
    assert not todo


def test_a_batch_is_what_kombu_writes_one_by_one(
    url: str, open_publisher: OpenPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 1000.0)
    messages = [message(**options) for options in MESSAGES.values() for _ in range(3)]
    one_by_one = KombuPublisher(Connection(url))
    one_by_one.connect()
    publish(one_by_one, messages)
    one_by_one.close()
    expected = [untagged(row) for row in table(url)]
    assert len(expected) == len(messages) + 3
    with database_connection(url) as connection:
        connection.execute(sa.text("DELETE FROM kombu_message"))
    assert publish(open_publisher(url), messages).accepted == {each.id for each in messages}
    assert [untagged(row) for row in table(url)] == expected


def test_kombu_reads_them_in_the_order_of_the_batch(url: str, open_publisher: OpenPublisher) -> None:
    messages = [message(body=b"%d" % number) for number in range(700)]
    assert publish(open_publisher(url), messages).accepted == {each.id for each in messages}
    assert ids(url) == [each.task_id for each in messages]
    with Connection(url) as broker:
        first = broker.default_channel.basic_get("celery", no_ack=True)
        assert (first.headers["id"], first.body) == (messages[0].task_id, b"0")


def test_the_tables_are_made_as_kombu_makes_them(url: str, open_publisher: OpenPublisher) -> None:
    with Connection(url) as broker:
        broker.default_channel.queue_declare("celery")
        broker.default_channel.session.close()
    kombus = described(url)
    publisher = open_publisher(url)
    with database_connection(url) as connection:
        # As when somebody empties the database of a relay that runs.
        sa.inspect(connection)
        for name in ("kombu_message", "kombu_queue"):
            connection.execute(sa.text(f"DROP TABLE {name}"))
        if connection.dialect.supports_sequences:
            for name in ("message_id_sequence", "queue_id_sequence"):
                connection.execute(sa.text(f"DROP SEQUENCE {name}"))
    messages = [message(), message()]
    assert set(publish(publisher, messages).errors) == {each.id for each in messages}
    publisher.connect()
    assert publish(publisher, messages).accepted == {each.id for each in messages}
    assert described(url) == kombus


def described(url: str) -> dict[str, Any]:
    with database_connection(url) as connection:
        inspector = sa.inspect(connection)
        found: dict[str, Any] = {
            name: [
                [{**each, "type": str(each["type"])} for each in inspector.get_columns(name)],
                inspector.get_pk_constraint(name),
                inspector.get_foreign_keys(name),
                sorted(inspector.get_indexes(name), key=lambda each: str(each["name"])),
                inspector.get_unique_constraints(name),
                inspector.get_table_options(name) if connection.dialect.name == "mysql" else None,
            ]
            for name in ("kombu_queue", "kombu_message")
        }
        if connection.dialect.supports_sequences:
            found["sequences"] = sorted(inspector.get_sequence_names())
        if connection.dialect.name == "sqlite":
            found["sql"] = list(connection.scalars(sa.text("SELECT sql FROM sqlite_master ORDER BY 1")))
        return found


def test_each_broker_has_the_tables_that_its_options_name(
    url: str, open_publisher: OpenPublisher
) -> None:
    names = {"queue_tablename": "waiting_queue", "message_tablename": "waiting message"}
    sent = message()
    assert publish(open_publisher(url, **names), [sent]).accepted == {sent.id}
    with database_connection(url) as connection:
        assert not sa.inspect(connection).has_table("kombu_message")
        quoted = connection.dialect.identifier_preparer.quote("waiting message")
    (row,) = table(url, quoted)
    assert json.loads(row["payload"])["headers"]["id"] == sent.task_id
    assert [each["name"] for each in table(url, "waiting_queue")] == ["celery"]


# What is refused


FORBID = {
    "postgresql": "ALTER TABLE kombu_message ADD CHECK (payload NOT LIKE '%forbidden%')",
    "mysql": "ALTER TABLE kombu_message ADD CHECK (payload NOT LIKE '%forbidden%')",
    "sqlite": "CREATE TRIGGER no BEFORE INSERT ON kombu_message WHEN NEW.payload LIKE '%forbidden%' "
    "BEGIN SELECT RAISE(ABORT, 'no such thing'); END",
}


def test_what_the_database_refuses_holds_no_other(url: str, open_publisher: OpenPublisher) -> None:
    publisher = open_publisher(url)
    with database_connection(url) as connection:
        connection.exec_driver_sql(FORBID[connection.dialect.name].replace("%", "%%"), ())
    messages = [
        message(headers={"word": "forbidden"} if number in {3, 7} else {}) for number in range(9)
    ]
    outcome = publish(publisher, messages)
    assert list(outcome.errors) == [messages[3].id, messages[7].id]
    assert ids(url) == [each.task_id for each in messages if each.id in outcome.accepted]
    assert len(outcome.accepted) == 7
    # The row is a payload; databases like to quote it.
    assert not any("forbidden" in text or "INSERT" in text for text in outcome.errors.values())
    assert publisher.is_connected


def test_what_cannot_be_written_holds_no_other(url: str, open_publisher: OpenPublisher) -> None:
    strange = {"headers": {"when": datetime.now(UTC)}}
    messages = [message(), message(**strange), message(), message(**strange), message()]
    outcome = publish(open_publisher(url), messages)
    assert list(outcome.errors) == [messages[1].id, messages[3].id]
    assert all("not JSON serializable" in text for text in outcome.errors.values())
    assert ids(url) == [messages[0].task_id, messages[2].task_id, messages[4].task_id]


def test_an_exchange_without_a_queue_takes_nothing(url: str, open_publisher: OpenPublisher) -> None:
    nowhere = Exchange("nowhere", "direct")
    lost = message(exchange=nowhere, routing_key="x", declare=[nowhere])
    sent = message()
    outcome = publish(open_publisher(url), [lost, sent])
    assert list(outcome.errors) == [lost.id]
    assert "expected a queue bound" in outcome.errors[lost.id]
    assert ids(url) == [sent.task_id]


@pytest.mark.parametrize("server", ["postgresql", "mariadb"])  # SQLite takes any name
def test_a_queue_whose_name_is_too_long_holds_no_other(
    server: str, request: pytest.FixtureRequest, open_publisher: OpenPublisher
) -> None:
    url = f"sqla+{request.getfixturevalue(f'{server}_url')}"
    messages = [message(), message("q" * 201), message("other")]
    outcome = publish(open_publisher(url), messages)
    assert list(outcome.errors) == [messages[1].id]
    assert "too long" in outcome.errors[messages[1].id]
    assert outcome.accepted == {messages[0].id, messages[2].id}


def test_mariadb_cuts_no_message(mariadb_url: str, open_publisher: OpenPublisher) -> None:
    url = f"sqla+{mariadb_url}"
    careless = {"connect_args": {"init_command": "SET SESSION sql_mode = ''"}}
    publisher = open_publisher(url, **careless)
    messages = [message(), message(body=b"x" * 60_000), message()]
    outcome = publish(publisher, messages)
    assert list(outcome.errors) == [messages[1].id]
    assert "at most 65535 bytes" in outcome.errors[messages[1].id]
    assert ids(url) == [messages[0].task_id, messages[2].task_id]
    with database_connection(url) as connection:
        connection.execute(sa.text("ALTER TABLE kombu_message MODIFY payload LONGTEXT NOT NULL"))
    publisher.connect()
    assert publish(publisher, messages).accepted == {each.id for each in messages}


# Others who are in the way


def test_a_locked_database_keeps_the_messages(sqlite_url: str, open_publisher: OpenPublisher) -> None:
    url = f"sqla+{sqlite_url}"
    publisher = open_publisher(url, connect_args={"timeout": 0.1})
    messages = [message(), message()]
    with database_connection(url) as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        outcome = publish(publisher, messages)
    assert set(outcome.errors) == {each.id for each in messages}
    assert all("database is locked" in text for text in outcome.errors.values())
    assert publish(publisher, messages).accepted == {each.id for each in messages}
    assert ids(url) == [each.task_id for each in messages]


@pytest.mark.parametrize(
    ("server", "options"),
    [
        ("postgresql", {"connect_args": {"options": "-c lock_timeout=100"}}),
        ("mariadb", {"connect_args": {"init_command": "SET SESSION lock_wait_timeout = 1"}}),
    ],
)
def test_a_locked_table_keeps_the_messages(
    server: str, options: Any, request: pytest.FixtureRequest, open_publisher: OpenPublisher
) -> None:
    url = f"sqla+{request.getfixturevalue(f'{server}_url')}"
    publisher = open_publisher(url, **options)
    publish(publisher, [message()])
    lock = {"postgresql": "LOCK TABLE kombu_message", "mariadb": "LOCK TABLES kombu_message WRITE"}
    sent = message()
    with database_connection(url) as connection:
        connection.execute(sa.text(lock[server]))
        outcome = publish(publisher, [sent])
    assert list(outcome.errors) == [sent.id]
    assert "timeout" in outcome.errors[sent.id]
    assert publisher.is_connected
    assert publish(publisher, [sent]).accepted == {sent.id}


@pytest.mark.parametrize("server", ["postgresql", "mariadb"])  # SQLite has one writer at a time
def test_a_queue_that_somebody_else_makes_at_the_same_moment_is_used(
    server: str, request: pytest.FixtureRequest, open_publisher: OpenPublisher
) -> None:
    url = f"sqla+{request.getfixturevalue(f'{server}_url')}"
    publisher = open_publisher(url)

    def make_it_too() -> None:
        with database_connection(url) as connection:
            connection.execute(sa.text("INSERT INTO kombu_queue (id, name) VALUES (77, 'celery')"))

    sent = message()
    with before_statement("INSERT INTO kombu_queue", make_it_too):
        assert publish(publisher, [sent]).accepted == {sent.id}
    assert [row["queue_id"] for row in table(url)] == [77]


def test_a_queue_that_was_deleted_is_made_again(url: str, open_publisher: OpenPublisher) -> None:
    publisher = open_publisher(url)
    messages = [message(), message("other")]
    publish(publisher, messages)
    with database_connection(url) as connection:
        connection.execute(sa.text("DELETE FROM kombu_message"))
        connection.execute(sa.text("DELETE FROM kombu_queue WHERE name = 'celery'"))
    outcome = publish(publisher, messages)
    assert list(outcome.errors) == [messages[0].id]
    assert publish(publisher, messages[:1]).accepted == {messages[0].id}
    assert (len(ids(url)), len(ids(url, "other"))) == (1, 1)


def test_names_that_the_database_takes_for_one_are_one_queue(
    mariadb_url: str, open_publisher: OpenPublisher
) -> None:
    url = f"sqla+{mariadb_url}"
    messages = [message("orders"), message("Orders")]
    assert publish(open_publisher(url), messages).accepted == {each.id for each in messages}
    (queue,) = table(url, "kombu_queue")
    assert queue["name"] in {"orders", "Orders"}
    assert ids(url, queue["name"]) == [each.task_id for each in messages]


def test_no_transaction_stays_open(postgresql_url: str, open_publisher: OpenPublisher) -> None:
    url = f"sqla+{postgresql_url}"
    for _ in range(2):
        publish(open_publisher(url), [message(), message(**MESSAGES["topic"])])
    with database_connection(url) as connection:
        states = connection.scalars(
            sa.text(
                "SELECT state FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        )
        assert set(states) == {"idle"}


# The lease, and the wire


def test_nothing_is_sent_after_the_lease(url: str, open_publisher: OpenPublisher) -> None:
    messages = [message(), message()]
    assert publish(open_publisher(url), messages, seconds=-1).unsent == {each.id for each in messages}
    assert database_envelopes(url) == []


def test_nothing_is_committed_after_the_lease(
    url: str, open_publisher: OpenPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = open_publisher(url)
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)

    def time_passes() -> None:
        nonlocal now
        now += 61

    messages = [message(), message()]
    with before_statement("INSERT INTO kombu_message", time_passes):
        assert publish(publisher, messages).unsent == {each.id for each in messages}
    assert publisher.is_connected
    assert ids(url) == []
    assert publish(publisher, messages).accepted == {each.id for each in messages}
