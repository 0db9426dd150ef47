"""``find``: where a task is, as far as the outbox knows."""

import json
from typing import Any

import pytest

from celery_outbox.storage.database import Database
from celery_outbox.storage.schema import FAR_FUTURE
from tests.desk.conftest import Call
from tests.desk.test_list import FIELDS, LONG_ID, make_every_state, on_a_terminal
from tests.storage.rows import add, change, claim, hours_from_now, make_message


def answers(call: Call, *arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(call("find", "--json", *arguments).stdout)
    return found


def test_each_task_is_shown_with_its_state_time_and_error(call: Call, shop: Database) -> None:
    make_every_state(shop)
    done = call("find", "retrying", "reserved", "delivered")
    assert (done.exit_code, done.stderr) == (0, "")
    _, retrying, reserved, delivered = done.stdout.splitlines()
    assert retrying.startswith("shop      retrying   shop.add")
    assert retrying.endswith("in 12 min  Refused: full")
    assert reserved.startswith("shop      reserved")
    assert delivered.startswith("shop      delivered")
    assert delivered.endswith("2 h ago")


def test_a_task_that_is_not_here_is_said_to_be_delivered_or_never_stored(
    call: Call, shop: Database
) -> None:
    add(shop, make_message("a"))
    done = call("find", "a", "gone")
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1] == "gone: not here: delivered, or never stored"
    assert answers(call, "gone") == [{"task_id": "gone", "messages": [], "not_asked": []}]


def test_every_message_of_a_task_is_found_in_all_databases(
    call: Call, shop: Database, billing: Database
) -> None:
    add(shop, *map(make_message, ["b", "a", "a"]))
    add(billing, make_message("a"))
    by_a, by_b = answers(call, "a", "b", "a")
    assert [(each["database"], each["row_id"]) for each in by_a["messages"]] == [
        ("shop", 2),
        ("shop", 3),
        ("billing", 1),
    ]
    assert (by_a["task_id"], by_b["task_id"], len(by_b["messages"])) == ("a", "b", 1)
    (by_a,) = answers(call, "a", "--database", "billing")
    assert [each["database"] for each in by_a["messages"]] == ["billing"]


def test_json_has_the_fields_of_list_and_the_time_of_delivery(call: Call, shop: Database) -> None:
    add(shop, make_message("a"))
    change(shop, attempts=1, finished_at=hours_from_now(-2), scheduled_at=FAR_FUTURE)
    ((message,),) = (each["messages"] for each in answers(call, "a"))
    assert set(message) == FIELDS
    assert message["state"] == "delivered"
    assert message["finished_at"] == pytest.approx(hours_from_now(-2).timestamp(), abs=60)


def test_a_database_that_is_down_is_named_beside_what_the_others_hold(
    call_half: Call, shop: Database
) -> None:
    add(shop, make_message("a"))
    done = call_half("find", "a", "gone")
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: database 'down': OperationalError")
    assert "shop.add" in done.stdout
    assert done.stdout.endswith("gone: not found; it may be in down, which could not be asked\n")
    found, gone = answers(call_half, "a", "gone")
    assert (len(found["messages"]), found["not_asked"]) == (1, ["down"])
    assert (gone["messages"], gone["not_asked"]) == ([], ["down"])


def test_neither_contents_nor_tokens_are_shown(call: Call, shop: Database) -> None:
    add(shop, make_message("a", body=b"a secret body"))
    token = claim(shop).token
    change(shop, message="a secret envelope")
    for arguments in (
        ["find", "a"],
        ["find", "a", "--json"],
        ["retry", "a"],
        ["forget", "a", "--force"],
    ):
        said = call(*arguments).output
        assert "secret" not in said
        assert token not in said


def test_what_a_terminal_would_obey_is_not_printed(call: Call) -> None:
    for command in (["find"], ["retry"], ["forget", "--force"], ["reschedule", "--countdown", "0"]):
        said = call(*command, "\x1b[31mred\x07").output
        assert "red" in said
        assert not [each for each in said if not each.isprintable() and each != "\n"]


@pytest.mark.parametrize("columns", [40, 80])
def test_no_terminal_is_too_narrow(columns: int, shop: Database) -> None:
    add(shop, make_message(LONG_ID, queue="reports.monthly"))
    shown = on_a_terminal(columns, "find", LONG_ID, default=shop.url.render_as_string())
    assert max(map(len, shown.splitlines())) <= columns
    assert LONG_ID in "".join(shown.split())
