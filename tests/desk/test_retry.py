"""``retry``: which messages are tried again, what is said of the others, and the exit code."""

from collections.abc import Sequence
from typing import Any

import pytest

from celery_outbox import Outbox, admin
from celery_outbox.admin import sweeping
from celery_outbox.storage.database import Database
from celery_outbox.storage.schema import FAR_FUTURE
from tests.desk.conftest import Call
from tests.relay.apps import relay_once, send
from tests.relay.apps import rows as rows_of_outbox
from tests.relay.conftest import OpenOutbox, open_outbox
from tests.relay.wire import task_ids
from tests.storage.conftest import database, shared_database
from tests.storage.rows import add, change, claim, hours_from_now, make_message, rows

__all__ = ["database", "open_outbox", "shared_database"]


def make_tried(database: Database, *task_ids: str) -> None:
    """Store messages that were tried, and wait for their next attempt."""
    add(database, *map(make_message, task_ids))
    for task_id in task_ids:
        change(database, task_id, attempts=3, error="no", scheduled_at=hours_from_now(1))


def make_failed(database: Database, *task_ids: str) -> None:
    """Store messages that used up their attempts."""
    make_tried(database, *task_ids)
    for task_id in task_ids:
        finished = hours_from_now(-1)
        change(database, task_id, scheduled_at=FAR_FUTURE, finished_at=finished, max_attempts=3)


def due(database: Database) -> list[str]:
    return [message.task_id for message in claim(database).messages]


def test_messages_that_were_tried_are_due_now(call: Call, shop: Database) -> None:
    make_tried(shop, "a")
    make_failed(shop, "b", "c")
    done = call("retry", "a", "b")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == "a: due now (shop, row 1)\nb: due now (shop, row 2)\n"
    assert [(row.attempts, row.error) for row in rows(shop)] == [(3, None), (3, None), (3, "no")]
    assert due(shop) == ["a", "b"]


def test_a_message_is_due_at_its_intended_time_if_that_is_later(call: Call, shop: Database) -> None:
    make_tried(shop, "a")
    change(shop, deliver_at=hours_from_now(5))
    done = call("retry", "a")
    (row,) = rows(shop)
    assert row.scheduled_at == row.deliver_at
    when = f"{row.deliver_at:%Y-%m-%d %H:%M:%S} UTC"
    assert done.stdout == f"a: due at its intended time, {when} (shop, row 1)\n"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "never tried": ({"attempts": 0}, "no relay has tried it yet (shop, row 1)"),
    "reserved": (
        {"attempts": 2, "lease_until": hours_from_now(1), "claim_token": "x"},
        "a relay has reserved it (shop, row 1)",
    ),
    "delivered": (
        {"attempts": 1, "finished_at": hours_from_now(-1), "scheduled_at": FAR_FUTURE},
        "it has been delivered (shop, row 1)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_messages_are_refused_with_the_reason(name: str, call: Call, shop: Database) -> None:
    columns, reason = REFUSED[name]
    add(shop, make_message("a"))
    change(shop, **columns)
    before = rows(shop)
    done = call("retry", "a")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"Error: a: not retried, {reason}\n"
    assert rows(shop) == before


def test_of_several_ids_each_outcome_is_named(call: Call, shop: Database) -> None:
    make_tried(shop, "good", "also good")
    done = call("retry", "good", "unknown", "also good", "good")
    assert done.exit_code == 1
    assert done.stdout == "good: due now (shop, row 1)\nalso good: due now (shop, row 2)\n"
    assert done.stderr == "Error: unknown: not retried, there is no message with this id\n"


def test_an_id_in_several_databases_needs_the_name_of_one(
    call: Call, shop: Database, billing: Database
) -> None:
    make_tried(shop, "a")
    make_tried(billing, "a")
    done = call("retry", "a")
    assert done.exit_code == 1
    assert done.stderr == (
        "Error: a: not retried, it is in the databases 'shop', 'billing': choose one with --database\n"
    )
    assert (due(shop), due(billing)) == ([], [])
    done = call("retry", "a", "--database", "billing")
    assert (done.exit_code, done.stdout) == (0, "a: due now (billing, row 1)\n")
    assert (due(shop), due(billing)) == ([], ["a"])


def test_every_message_with_an_id_is_retried_and_that_is_said(call: Call, shop: Database) -> None:
    make_tried(shop, "a")
    make_tried(shop, "a", "b")
    done = call("retry", "a")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "a: 2 messages have this id",
        "a: due now (shop, row 1)",
        "a: due now (shop, row 2)",
    ]
    assert due(shop) == ["a", "a"]


def test_one_of_several_messages_with_an_id_that_is_refused_is_a_failure(
    call: Call, shop: Database
) -> None:
    add(shop, make_message("a"))
    claim(shop)
    add(shop, make_message("a"))
    change(shop, attempts=2)
    done = call("retry", "a")
    assert done.exit_code == 1
    assert done.stdout == "a: 2 messages have this id\na: due now (shop, row 2)\n"
    assert done.stderr == "Error: a: not retried, a relay has reserved it (shop, row 1)\n"


def test_a_delivered_message_is_passed_over_when_another_has_its_id(call: Call, shop: Database) -> None:
    add(shop, make_message("a"))
    change(shop, finished_at=hours_from_now(-1), scheduled_at=FAR_FUTURE, attempts=1)
    add(shop, make_message("a"))
    (_, second) = rows(shop)
    with shop.begin() as connection:
        t = shop.tables.messages
        connection.execute(t.update().where(t.c.id == second.id).values(attempts=4, error="no"))
    done = call("retry", "a")
    assert (done.exit_code, done.stdout) == (0, f"a: due now (shop, row {second.id})\n")


def test_a_database_that_is_down_is_named_and_the_others_are_worked_on(
    call_half: Call, shop: Database
) -> None:
    make_tried(shop, "a")
    done = call_half("retry", "a", "b")
    assert done.exit_code == 1
    assert done.stdout == "a: due now (shop, row 1)\n"
    missing, down = done.stderr.splitlines()
    assert missing == (
        "Error: b: not retried, there is no message with this id; 'down' could not be asked"
    )
    assert down.startswith("Error: database 'down': OperationalError")
    done = call_half("retry", "all")
    assert (done.exit_code, done.stdout) == (1, "shop: 1 message will be tried again\n")


def test_all_stands_for_every_message_that_was_tried(
    call: Call, shop: Database, billing: Database
) -> None:
    add(shop, make_message("reserved"))
    claim(shop)
    make_tried(shop, "a", "b")
    make_failed(shop, "c")
    add(shop, make_message("new"))
    make_tried(billing, "d")
    done = call("retry", "all", "--database", "shop")
    assert (done.exit_code, done.stdout) == (0, "shop: 3 messages will be tried again\n")
    assert due(billing) == []
    assert sorted(due(shop)) == ["a", "b", "c", "new"]
    make_tried(billing, "e")
    done = call("retry", "all")
    assert done.stdout == (
        "shop: 0 messages will be tried again\nbilling: 2 messages will be tried again\n"
    )


def test_all_can_be_narrowed(call: Call, shop: Database, billing: Database) -> None:
    make_tried(shop, "a")
    make_failed(shop, "b", "c")
    change(shop, "c", queue="slow")
    make_failed(billing, "d")
    change(billing, "d", task_name="billing.charge")
    done = call("retry", "all", "--state", "failed", "--task", "shop.*", "--queue", "celery")
    assert done.stdout == (
        "shop: 1 message will be tried again\nbilling: 0 messages will be tried again\n"
    )
    assert (due(shop), due(billing)) == (["b"], [])


@pytest.mark.parametrize("size", [1, 3, 100])
def test_all_goes_in_batches_and_misses_nobody(
    size: int, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "BATCH", size)
    monkeypatch.setattr(sweeping, "PAGE", 2 * size)
    names = [f"{number}" for number in range(8)]
    make_tried(database, *names[:4])
    add(database, make_message("new"))
    make_failed(database, *names[4:])
    told: list[int] = []
    assert admin.retry_all(database, admin.EVERYTHING, progress=told.append) == 8
    assert sum(told) == 8
    assert max(told) <= size
    assert sorted(due(database)) == [*names, "new"]


def test_a_failed_message_that_is_retried_gets_one_more_attempt(
    open_outbox: OpenOutbox, redis_url: str, database_url: str
) -> None:
    outbox = open_outbox(redis_url, database_url)
    sent = send(outbox, outbox_retry={"max_attempts": 1})
    database = outbox.databases["default"]
    good = rows_of_outbox(outbox)[0].message
    change(database, message="corrupt")
    for attempts in (1, 2):
        relay_once(outbox)
        (row,) = rows_of_outbox(outbox)
        assert (row.attempts, row.finished_at is None) == (attempts, False)
        retry(outbox, sent)
    change(database, message=good)
    relay_once(outbox)
    assert task_ids(redis_url) == [sent]


def retry(outbox: Outbox, task_id: str) -> None:
    databases: Sequence[Database] = list(outbox.databases.values())
    (outcome,) = admin.retry(admin.place(databases, [task_id])).each
    assert outcome.refusal is None


WRONG = [
    [],
    ["all", "a"],
    ["a", "--database", "x"],
    ["a", "--task", "shop.add"],
    ["all", "--state", "delayed"],
]


@pytest.mark.parametrize("arguments", WRONG, ids=str)
def test_wrong_usage_changes_nothing(arguments: list[str], call: Call, shop: Database) -> None:
    make_tried(shop, "a")
    before = rows(shop)
    done = call("retry", *arguments)
    assert done.exit_code == (1 if "x" in arguments else 2)
    assert "Traceback" not in done.output
    assert rows(shop) == before
