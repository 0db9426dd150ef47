"""``reschedule``: the task runs at the new time, earlier or later; what cannot be moved is refused."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from celery_outbox import Outbox
from celery_outbox.message import Envelope
from celery_outbox.storage.database import Database
from celery_outbox.storage.schema import FAR_FUTURE
from tests.desk.conftest import Call, caller
from tests.publishers import sqs_wire
from tests.publishers.test_amqp_delayed import JOBS, next_id, prepare_delays
from tests.relay.apps import relay_once, send
from tests.relay.apps import rows as rows_of_outbox
from tests.relay.conftest import OpenOutbox, open_outbox
from tests.relay.wire import redis_envelopes, task_ids
from tests.storage.rows import add, change, claim, hours_from_now, make_message, rows

__all__ = ["next_id", "open_outbox"]

MINUTE = timedelta(minutes=1)


def eta_of(row: Any) -> datetime:
    return datetime.fromisoformat(json.loads(row.message)["headers"]["eta"])


@pytest.mark.parametrize("countdown", [None, 60.0, 7200.0], ids=["none", "earlier", "later"])
def test_a_message_is_due_at_its_new_time_alone(
    countdown: float | None, call: Call, shop: Database
) -> None:
    add(shop, make_message("a", countdown=countdown))
    (before,) = rows(shop)
    eta = datetime(2050, 1, 31, 12, tzinfo=UTC)
    done = call("reschedule", "a", "--eta", "2050-01-31T13:00:00+01:00")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == "a: due at 2050-01-31 12:00:00 UTC (shop, row 1)\n"
    (row,) = rows(shop)
    assert (row.scheduled_at, row.deliver_at, eta_of(row)) == (eta, eta, eta)
    assert row.body == before.body
    moved, old = Envelope.from_text(row.message), Envelope.from_text(before.message)
    assert {**moved.headers, "eta": None} == {**old.headers, "eta": None}
    assert moved == Envelope.from_text(row.message)
    assert (moved.properties, moved.routing_key) == (old.properties, old.routing_key)


def test_a_countdown_counts_from_now(call: Call, shop: Database) -> None:
    add(shop, make_message("a", countdown=60.0))
    call("reschedule", "a", "--countdown", "2h")
    (row,) = rows(shop)
    assert abs(row.scheduled_at - hours_from_now(2)) < MINUTE
    assert row.deliver_at == row.scheduled_at == eta_of(row)


@pytest.mark.parametrize("when", [["--countdown", "0"], ["--eta", "2001-01-01"]], ids=" ".join)
def test_a_time_that_has_passed_means_now(when: list[str], call: Call, shop: Database) -> None:
    add(shop, make_message("a", countdown=7200.0))
    done = call("reschedule", "a", *when)
    assert done.stdout == "a: due now (shop, row 1)\n"
    (row,) = rows(shop)
    assert abs(eta_of(row) - datetime.now(UTC)) < MINUTE
    assert [each.task_id for each in claim(shop).messages] == ["a"]


@pytest.mark.parametrize("enable_utc", [True, False])
def test_a_time_without_an_offset_is_what_celery_takes_it_for(
    enable_utc: bool, box: Outbox, shop: Database
) -> None:
    box.app.conf.update(timezone="Asia/Kolkata", enable_utc=enable_utc)
    naive = datetime(2050, 1, 1)
    box.app.send_task("shop.add", task_id="sent", eta=naive, via_outbox=True, outbox_database="shop")
    add(shop, make_message("moved"))
    assert caller(box)("reschedule", "moved", "--eta", "2050-01-01 00:00").exit_code == 0
    sent, moved = rows(shop)
    assert moved.deliver_at == sent.deliver_at


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "reserved": ({"lease_until": hours_from_now(1)}, "a relay has reserved it"),
    "delivered": (
        {"finished_at": hours_from_now(-1), "scheduled_at": FAR_FUTURE},
        "it has been delivered",
    ),
    "failed": (
        {"finished_at": hours_from_now(-1), "scheduled_at": FAR_FUTURE, "error": "no"},
        "it has failed: retry it first",
    ),
    "corrupt": ({"message": "{"}, "its stored envelope cannot be read"),
    "expiring": (
        {"expires_at": datetime(2030, 1, 1, tzinfo=UTC)},
        "it expires before that, at 2030-01-01 00:00:00 UTC",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_moved_is_refused_with_the_reason(name: str, call: Call, shop: Database) -> None:
    columns, reason = REFUSED[name]
    add(shop, make_message("a"))
    change(shop, attempts=1, claim_token="x", **columns)
    before = rows(shop)
    done = call("reschedule", "a", "--eta", "2050-01-01")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"Error: a: not rescheduled, {reason} (shop, row 1)\n"
    assert rows(shop) == before


def test_a_task_of_celerys_first_protocol_is_refused(box: Outbox, shop: Database) -> None:
    box.app.conf.task_protocol = 1
    result = box.app.send_task("shop.add", countdown=60, via_outbox=True, outbox_database="shop")
    done = caller(box)("reschedule", result.id, "--countdown", "0")
    assert done.exit_code == 1
    assert "its time is no header, but part of its body" in done.stderr


def test_the_event_that_a_task_was_sent_stays_as_it_is(box: Outbox, shop: Database) -> None:
    box.app.conf.task_send_sent_event = True
    result = box.app.send_task("shop.add", countdown=60, via_outbox=True, outbox_database="shop")
    before = {row.task_name: row for row in rows(shop)}
    assert set(before) == {"shop.add", "task-sent"}
    done = caller(box)("reschedule", result.id, "--countdown", "2h")
    assert (done.exit_code, done.stderr) == (0, "")
    after = {row.task_name: row for row in rows(shop)}
    assert after["task-sent"] == before["task-sent"]
    assert abs(after["shop.add"].deliver_at - hours_from_now(2)) < MINUTE


def test_an_id_in_several_databases_needs_the_name_of_one(
    call: Call, shop: Database, billing: Database
) -> None:
    for each in (shop, billing):
        add(each, make_message("a"))
    done = call("reschedule", "a", "unknown", "--countdown", "1h")
    assert done.exit_code == 1
    assert "it is in the databases 'shop', 'billing': choose one" in done.stderr
    assert "unknown: not rescheduled, there is no message with this id" in done.stderr
    assert call("reschedule", "a", "--countdown", "1h", "--database", "shop").exit_code == 0
    assert [rows(each)[0].deliver_at is None for each in (shop, billing)] == [False, True]


WRONG = [
    ["a"],
    ["--countdown", "1h"],
    ["a", "--countdown", "1h", "--eta", "2050-01-01"],
    ["a", "--eta", "tomorrow"],
    ["a", "--eta", "9999-06-01"],
    ["a", "--countdown", "9999999999d"],
    ["a", "--countdown", "soon"],
]


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_wrong_usage_changes_nothing(arguments: list[str], call: Call, shop: Database) -> None:
    add(shop, make_message("a"))
    before = rows(shop)
    done = call("reschedule", *arguments)
    assert done.exit_code == 2
    assert rows(shop) == before


def test_an_earlier_time_reaches_the_worker(
    open_outbox: OpenOutbox, redis_url: str, database_url: str
) -> None:
    outbox = open_outbox(redis_url, database_url)
    sent = send(outbox, countdown=86_400)
    relay_once(outbox)
    assert redis_envelopes(redis_url) == []
    assert outbox.reschedule(sent, timedelta(0)) is True
    relay_once(outbox)
    (envelope,) = redis_envelopes(redis_url)
    assert abs(datetime.fromisoformat(envelope["headers"]["eta"]) - datetime.now(UTC)) < MINUTE


def test_a_later_time_keeps_the_message_in_the_outbox(
    open_outbox: OpenOutbox, redis_url: str, database_url: str
) -> None:
    outbox = open_outbox(redis_url, database_url)
    sent = send(outbox, countdown=1)
    # Redis would be given it by now, and its worker hold it.
    assert outbox.reschedule(sent, timedelta(minutes=10)) is True
    relay_once(outbox)
    assert redis_envelopes(redis_url) == []
    assert [row.task_id for row in rows_of_outbox(outbox)] == [sent]
    assert outbox.forget(sent) is True


def test_sqs_is_asked_for_no_longer_delay(
    open_outbox: OpenOutbox, sqs_url: str, sqlite_url: str
) -> None:
    outbox = open_outbox(sqs_url, sqlite_url)
    sent = send(outbox, countdown=600)
    outbox.reschedule(sent, timedelta(0))
    relay_once(outbox)
    assert sqs_wire.task_ids(sqs_url) == [sent]


def test_rabbitmq_delays_it_no_longer_itself(
    open_outbox: OpenOutbox, rabbitmq_url: str, sqlite_url: str, next_id: Callable[[], str]
) -> None:
    prepare_delays(rabbitmq_url)
    outbox = open_outbox(rabbitmq_url, sqlite_url, config={"task_queues": [JOBS]})
    sent = send(outbox, queue="jobs", countdown=3600)
    (row,) = rows_of_outbox(outbox)
    assert "celery_delayed_27" in row.message
    outbox.reschedule(sent, timedelta(0))
    relay_once(outbox)
    assert next_id() == sent
    assert task_ids(rabbitmq_url, "jobs") == []
