"""Delivering: whose messages, in spite of which neighbours, with what recomputed."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import amqp
import kombu
import pytest
import redis
import sqlalchemy as sa
from celery import Celery
from kombu import Exchange, Queue

from celery_outbox import Outbox
from celery_outbox.errors import PublisherContractError
from celery_outbox.message import ClaimedMessage
from celery_outbox.relay.publishers import Outcome
from celery_outbox.signals import outbox_failed, outbox_published
from tests.relay.apps import make_due, relay_once, relaying, rows, send
from tests.relay.conftest import OpenOutbox
from tests.relay.wire import amqp_connection, amqp_messages, redis_envelopes, task_ids
from tests.storage.rows import add, change, hours_from_now, make_message
from tests.waiting import wait_until


@pytest.fixture
def redis_outbox(open_outbox: OpenOutbox, redis_url: str, sqlite_url: str) -> Outbox:
    """An outbox before Redis."""
    return open_outbox(redis_url, sqlite_url)


@pytest.fixture
def rabbit_outbox(open_outbox: OpenOutbox, rabbitmq_url: str, sqlite_url: str) -> Outbox:
    """An outbox before an empty virtual host of RabbitMQ."""
    return open_outbox(rabbitmq_url, sqlite_url)


def test_two_apps_share_a_table_and_each_relay_touches_only_its_own(
    open_outbox: OpenOutbox, database_url: str, redis_server: Any
) -> None:
    one_url, two_url = redis_server.empty_database(), redis_server.empty_database()
    one = open_outbox(one_url, database_url, main="one")
    two = open_outbox(two_url, database_url, main="two")
    ids = [send(each) for each in (one, two, one, two)]
    before = {row.task_id: row for row in rows(one)}
    relay_once(one)
    assert task_ids(one_url) == [ids[0], ids[2]]
    assert task_ids(two_url) == []
    assert list(rows(one)) == [before[ids[1]], before[ids[3]]]
    relay_once(two)
    assert task_ids(two_url) == [ids[1], ids[3]]


def test_named_brokers_get_their_own_messages(
    open_outbox: OpenOutbox, sqlite_url: str, redis_server: Any
) -> None:
    own, reports = redis_server.empty_database(), redis_server.empty_database()
    outbox = open_outbox(own, sqlite_url, brokers={"reports": reports})
    mine = send(outbox)
    other = outbox.app.send_task("shop.add", (1, 2), outbox_broker="reports").id
    relay_once(outbox)
    assert (task_ids(own), task_ids(reports)) == ([mine], [other])


CORRUPT = {
    "no JSON": "truncated {",
    "empty": "",
    "another value": "7",
    "a list": "[]",
    "a newer version": '{"v": 2}',
    "nothing in it": '{"v": 1}',
    "wrong types": '{"v": 1, "exchange": 5, "routing_key": {}, "content_type": [], '
    '"content_encoding": 1, "headers": 3, "properties": 4, "declare": 5}',
    "an unknown entity": '{"v": 1, "exchange": {"planet": {}}, "routing_key": "celery", '
    '"content_type": "x", "content_encoding": "utf-8", "headers": {}, "properties": {}, "declare": []}',
    "unknown properties": '{"v": 1, "exchange": "", "routing_key": "celery", "content_type": "x", '
    '"content_encoding": "utf-8", "headers": {}, "properties": {"routing_key": 7}, "declare": []}',
    "deeply nested": "[" * 100_000,
}


@pytest.mark.parametrize("name", CORRUPT)
def test_a_corrupt_row_keeps_an_error_and_its_neighbours_are_delivered(
    name: str, redis_outbox: Outbox, redis_url: str
) -> None:
    ids = [send(redis_outbox) for _ in range(5)]
    change(redis_outbox.databases["default"], ids[2], message=CORRUPT[name])
    relay_once(redis_outbox)
    assert task_ids(redis_url) == [*ids[:2], *ids[3:]]
    (row,) = rows(redis_outbox)
    assert (row.task_id, row.attempts, row.claim_token) == (ids[2], 1, None)
    assert row.error


@pytest.mark.parametrize("server", ["redis", "rabbitmq"])
@pytest.mark.parametrize(
    "broken",
    [
        {"exchange": "nope", "routing_key": "x"},
        {"priority": 300},
        {"headers": {"x": -(2**80)}},
    ],
    ids=["exchange", "priority", "huge number in a header"],
)
def test_a_message_that_its_broker_refuses_holds_up_no_other(
    server: str, broken: dict[str, Any], open_outbox: OpenOutbox, sqlite_url: str, request: Any
) -> None:
    url = request.getfixturevalue(f"{server}_url")
    outbox = open_outbox(url, sqlite_url)
    first = send(outbox)
    bad = send(outbox, **broken)
    last = send(outbox)
    relay_once(outbox)
    assert [each for each in task_ids(url) if each != bad] == [first, last]
    make_due(outbox)
    again = send(outbox)
    relay_once(outbox)
    assert again in task_ids(url)
    assert {row.task_id for row in rows(outbox)} <= {bad}


def test_rabbitmq_never_loses_a_message_for_an_exchange_that_is_not_there(
    rabbit_outbox: Outbox,
) -> None:
    bad = send(rabbit_outbox, exchange="nope", routing_key="x")
    relay_once(rabbit_outbox)
    (row,) = rows(rabbit_outbox)
    assert row.task_id == bad
    assert "nope" in row.error


def test_a_message_that_no_queue_takes_stays(rabbit_outbox: Outbox, rabbitmq_url: str) -> None:
    with amqp_connection(rabbitmq_url) as connection:
        connection.channel().exchange_declare("lonely", "direct", durable=True, auto_delete=False)
    send(rabbit_outbox, exchange="lonely", routing_key="x")
    good = send(rabbit_outbox)
    relay_once(rabbit_outbox)
    assert task_ids(rabbitmq_url) == [good]
    (row,) = rows(rabbit_outbox)
    assert row.error


def test_queues_are_declared_on_an_empty_rabbitmq(rabbit_outbox: Outbox, rabbitmq_url: str) -> None:
    default, reports = send(rabbit_outbox), send(rabbit_outbox, queue="reports")
    relay_once(rabbit_outbox)
    assert task_ids(rabbitmq_url) == [default]
    assert task_ids(rabbitmq_url, "reports") == [reports]
    assert rows(rabbit_outbox) == []


def test_a_queue_of_the_callers_own_is_declared_whole(rabbit_outbox: Outbox, rabbitmq_url: str) -> None:
    vip = Queue(
        "vip", Exchange("vipx", "topic"), routing_key="vip.#", queue_arguments={"x-max-priority": 10}
    )
    stored = send(rabbit_outbox, queue=vip, routing_key="vip.eu")
    relay_once(rabbit_outbox)
    with amqp_connection(rabbitmq_url) as connection:
        channel = connection.channel()
        # Declared alike it is no error; the arguments, the type and the binding are there.
        channel.queue_declare("vip", durable=True, auto_delete=False, arguments={"x-max-priority": 10})
        channel.exchange_declare("vipx", "topic", durable=True, auto_delete=False)
        probe = amqp.Message("probe", application_headers={"id": "probe"})
        channel.basic_publish(probe, "vipx", "vip.us")
    assert [each.headers.get("id") for each in amqp_messages(rabbitmq_url, "vip")] == [stored, "probe"]


def test_a_queue_deleted_under_a_running_relay_costs_no_message(
    rabbit_outbox: Outbox, rabbitmq_url: str
) -> None:
    before = send(rabbit_outbox, queue="reports")
    with relaying(rabbit_outbox):
        wait_until(lambda: not rows(rabbit_outbox), message="the first delivery")
        assert task_ids(rabbitmq_url, "reports") == [before]
        with amqp_connection(rabbitmq_url) as connection:
            connection.channel().queue_delete("reports")
        after = send(rabbit_outbox, queue="reports")
        wait_until(lambda: not rows(rabbit_outbox), message="the delivery after it")
    assert task_ids(rabbitmq_url, "reports") == [after]


def test_a_conflicting_declaration_stops_only_its_own_queue(
    rabbit_outbox: Outbox, rabbitmq_url: str
) -> None:
    with amqp_connection(rabbitmq_url) as connection:
        channel = connection.channel()
        channel.queue_declare("q1", durable=True, auto_delete=False, arguments={"x-max-priority": 10})
    mine = {queue: [send(rabbit_outbox, queue=queue) for _ in range(3)] for queue in ("q1", "q2")}
    relay_once(rabbit_outbox)
    assert task_ids(rabbitmq_url, "q2") == mine["q2"]
    assert [row.task_id for row in rows(rabbit_outbox)] == mine["q1"]
    assert all("x-max-priority" in row.error for row in rows(rabbit_outbox))


def test_a_conflict_ends_when_the_relays_configuration_is_set_right(
    rabbit_outbox: Outbox, rabbitmq_url: str
) -> None:
    arguments = {"x-max-priority": 10}
    with amqp_connection(rabbitmq_url) as connection:
        connection.channel().queue_declare("q1", durable=True, auto_delete=False, arguments=arguments)
    usual, odd = send(rabbit_outbox, queue="q1"), send(rabbit_outbox, queue="q1", app_id="shop")
    relay_once(rabbit_outbox)
    assert len(rows(rabbit_outbox)) == 2
    app = Celery("shop", broker=rabbitmq_url, set_as_current=False)
    app.conf.task_queues = [Queue("q1", Exchange("q1"), "q1", queue_arguments=arguments)]
    restarted = Outbox(app, databases=dict(rabbit_outbox.settings.databases))
    make_due(rabbit_outbox)
    relay_once(restarted)
    assert rows(rabbit_outbox) == []
    assert sorted(task_ids(rabbitmq_url, "q1")) == sorted([usual, odd])
    app.close()


@pytest.fixture
def full_redis(redis_url: str) -> Any:
    """A Redis that takes nothing more until it is told to."""
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("maxmemory", 1)
        yield lambda: client.config_set("maxmemory", 0)
        client.config_set("maxmemory", 0)


def test_a_redis_that_is_full_keeps_the_rows_until_it_has_room(
    full_redis: Any, redis_outbox: Outbox, redis_url: str
) -> None:
    stored = [send(redis_outbox) for _ in range(20)]
    relay_once(redis_outbox)
    waiting = rows(redis_outbox)
    assert [row.task_id for row in waiting] == stored
    assert all("maxmemory" in row.error and row.attempts == 1 for row in waiting)
    full_redis()
    make_due(redis_outbox)
    relay_once(redis_outbox)
    assert sorted(task_ids(redis_url)) == sorted(stored)


def test_the_time_to_live_is_what_is_left(rabbit_outbox: Outbox, rabbitmq_url: str) -> None:
    send(rabbit_outbox, expires=600)
    change(rabbit_outbox.databases["default"], expires_at=hours_from_now(0.1))
    relay_once(rabbit_outbox)
    (message,) = amqp_messages(rabbitmq_url)
    assert int(message.properties["expiration"]) == pytest.approx(360_000, abs=20_000)


@pytest.mark.parametrize("server", ["redis", "rabbitmq"])
def test_an_expired_message_is_delivered_without_a_time_to_live(
    server: str, open_outbox: OpenOutbox, sqlite_url: str, request: Any
) -> None:
    url = request.getfixturevalue(f"{server}_url")
    outbox = open_outbox(url, sqlite_url)
    send(outbox, expires=600)
    change(outbox.databases["default"], expires_at=hours_from_now(-1))
    relay_once(outbox)
    if server == "redis":
        (envelope,) = redis_envelopes(url)
        properties, headers = envelope["properties"], envelope["headers"]
    else:
        (message,) = amqp_messages(url)
        properties, headers = message.properties, message.headers
    assert "expiration" not in properties
    assert headers["expires"] is not None


def test_a_delivered_row_is_kept_on_request(
    open_outbox: OpenOutbox, redis_url: str, database_url: str
) -> None:
    outbox = open_outbox(redis_url, database_url, keep=True)
    stored = send(outbox)
    relay_once(outbox)
    relay_once(outbox)
    (row,) = rows(outbox)
    assert row.finished_at is not None
    assert (row.task_id, row.error, row.claim_token) == (stored, None, None)
    assert task_ids(redis_url) == [stored]


def test_a_message_is_given_up_after_its_last_attempt_and_kept_as_failed(
    open_outbox: OpenOutbox, redis_url: str, database_url: str
) -> None:
    outbox = open_outbox(redis_url, database_url, retry={"max_attempts": 2})
    send(outbox)
    change(outbox.databases["default"], message="corrupt")
    for expected in (False, True):
        make_due(outbox)
        relay_once(outbox)
        (row,) = rows(outbox)
        assert (row.finished_at is not None) is expected
    make_due(outbox)
    relay_once(outbox)
    assert [row.attempts for row in rows(outbox)] == [2]


def test_a_failed_delivery_waits_longer_each_time(redis_outbox: Outbox) -> None:
    send(redis_outbox)
    database = redis_outbox.databases["default"]
    change(database, message="corrupt")
    for attempts, longest in ((0, 1), (4, 16), (30, 600)):
        change(database, attempts=attempts, scheduled_at=hours_from_now(-1))
        with database.begin() as connection:
            now = connection.execute(sa.select(database.dialect.now())).scalar_one()
        relay_once(redis_outbox)
        (row,) = rows(redis_outbox)
        wait = row.scheduled_at - now
        assert timedelta(seconds=longest / 2 - 0.1) <= wait <= timedelta(seconds=longest + 20)


def test_a_broker_in_memory_works_inside_its_process(open_outbox: OpenOutbox, sqlite_url: str) -> None:
    outbox = open_outbox("memory://", sqlite_url)
    stored = send(outbox, queue="in-memory")
    relay_once(outbox)
    assert rows(outbox) == []
    with kombu.Connection("memory://") as connection, connection.channel() as channel:
        message = channel.basic_get("in-memory", no_ack=True)
    assert message.headers["id"] == stored


def test_signals_tell_what_was_published_and_what_failed(
    redis_outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = send(redis_outbox), send(redis_outbox)
    change(redis_outbox.databases["default"], bad, message="corrupt")
    told: list[Any] = []

    def published(sender: str, database: str, messages: list[ClaimedMessage], **_: Any) -> None:
        told.append((sender, database, [message.task_id for message in messages]))
        raise RuntimeError("a broken receiver")

    def failed(sender: str, database: str, errors: dict[int, str], **_: Any) -> None:
        told.append((sender, database, list(errors)))
        raise RuntimeError("another broken receiver")

    outbox_published.connect(published)
    outbox_failed.connect(failed)
    try:
        relay_once(redis_outbox)
    finally:
        outbox_published.disconnect(published)
        outbox_failed.disconnect(failed)
    (row,) = rows(redis_outbox)
    assert told == [("shop", "default", [row.id]), ("shop", "default", [good])]
    assert "a broken receiver" in caplog.text


def test_an_answer_that_does_not_fit_its_batch_is_a_contract_error() -> None:
    def message(row_id: int, due_in: float | None = None) -> ClaimedMessage:
        values = dict.fromkeys(("broker", "task_id", "task_name", "queue", "envelope"), "x")
        return ClaimedMessage(
            id=row_id, identity=f"row{row_id}", body=b"", attempts=1, due_in=due_in, **values
        )

    batch = [message(1), message(2, due_in=5.0)]
    Outcome(accepted={1}, deferred={2}).check(batch)
    Outcome(errors={1: "no"}, unsent={2}).check(batch)
    for wrong, expected in [
        (Outcome(accepted={1, 2, 3}), "ids that are not in the batch"),
        (Outcome(accepted={1, 2}, unsent={2}), "ids named more than once"),
        (Outcome(accepted={1}), "ids of which nothing is said"),
        (Outcome(accepted={2}, deferred={1}), "ids deferred that have no delay"),
    ]:
        with pytest.raises(PublisherContractError, match=expected):
            wrong.check(batch)


def test_messages_are_added_by_others_while_a_relay_works(
    open_outbox: OpenOutbox, redis_url: str, database_url: str, tmp_path: Path
) -> None:
    outbox = open_outbox(redis_url, database_url)
    with relaying(outbox, batch=10):
        for number in range(10):
            add(outbox.databases["default"], *(make_message(f"{number}-{each}") for each in range(10)))
        wait_until(lambda: not rows(outbox), message="every delivery")
    assert len(set(task_ids(redis_url))) == len(task_ids(redis_url)) == 100
