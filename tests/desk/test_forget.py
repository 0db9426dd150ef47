"""``forget``: what is deleted, what is asked before, and what is never deleted."""

import subprocess
from typing import Any

import pytest

from celery_outbox.admin import Filter, sweeping
from celery_outbox.storage.database import Database
from celery_outbox.storage.schema import FAR_FUTURE
from tests.desk.conftest import Call
from tests.desk.terminal import Shown, call_on_terminal
from tests.relay.commands import ROOT, outbox_command, run
from tests.schema.test_check import PROJECT, environment
from tests.storage.conftest import database, shared_database
from tests.storage.rows import add, change, claim, hours_from_now, make_message, rows

__all__ = ["database", "shared_database"]


def left(database: Database) -> list[str]:
    return [row.task_id for row in rows(database)]


def url_of(database: Database) -> str:
    return database.url.render_as_string(hide_password=False)


def ask(database: Database, answer: str, *arguments: str) -> Shown:
    """Call the command on a terminal and answer its question."""
    return call_on_terminal("forget", *arguments, answer=answer, columns=120, default=url_of(database))


def test_messages_are_deleted_by_their_ids(call: Call, shop: Database) -> None:
    add(shop, *map(make_message, ["a", "b", "c", "d"]))
    change(shop, "b", attempts=2, error="no", scheduled_at=hours_from_now(1))
    change(shop, "c", finished_at=hours_from_now(-1), scheduled_at=FAR_FUTURE, error="no")
    done = call("forget", "a", "b", "c", "--force")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == (
        "a: forgotten (shop, row 1)\nb: forgotten (shop, row 2)\nc: forgotten (shop, row 3)\n"
    )
    assert left(shop) == ["d"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "reserved": ({"lease_until": hours_from_now(1)}, "a relay has reserved it"),
    "delivered": (
        {"finished_at": hours_from_now(-1), "scheduled_at": FAR_FUTURE},
        "it has been delivered",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_reserved_and_delivered_messages_are_never_deleted(
    name: str, call: Call, shop: Database
) -> None:
    columns, reason = REFUSED[name]
    add(shop, make_message("a"))
    change(shop, attempts=1, claim_token="x", **columns)
    before = rows(shop)
    done = call("forget", "a", "--force")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"Error: a: not forgotten, {reason} (shop, row 1)\n"
    assert rows(shop) == before
    done = call("forget", "all", "--task", "*", "--force")
    assert (done.exit_code, rows(shop)) == (0, before)


def test_what_can_be_deleted_is_deleted_although_another_id_cannot(call: Call, shop: Database) -> None:
    add(shop, *map(make_message, ["a", "b"]))
    done = call("forget", "a", "unknown", "b", "a", "--force")
    assert done.exit_code == 1
    assert done.stdout == "a: forgotten (shop, row 1)\nb: forgotten (shop, row 2)\n"
    assert done.stderr == "Error: unknown: not forgotten, there is no message with this id\n"
    assert left(shop) == []


def test_an_id_in_several_databases_needs_the_name_of_one(
    call: Call, shop: Database, billing: Database
) -> None:
    for each in (shop, billing):
        add(each, make_message("a"))
    done = call("forget", "a", "--force")
    assert done.exit_code == 1
    assert "it is in the databases 'shop', 'billing': choose one with --database" in done.stderr
    assert (left(shop), left(billing)) == (["a"], ["a"])
    done = call("forget", "a", "--force", "--database", "billing")
    assert (done.exit_code, left(shop), left(billing)) == (0, ["a"], [])


def test_every_message_with_an_id_is_deleted_and_that_is_said(call: Call, shop: Database) -> None:
    add(shop, *map(make_message, ["a", "a"]))
    done = call("forget", "a", "--force")
    assert done.stdout.splitlines() == [
        "a: 2 messages have this id",
        "a: forgotten (shop, row 1)",
        "a: forgotten (shop, row 2)",
    ]
    assert left(shop) == []


def test_a_corrupt_message_is_deleted(call: Call, shop: Database) -> None:
    add(shop, make_message("a"))
    change(shop, message="{", body=b"\xff\x00")
    assert call("forget", "a", "--force").exit_code == 0
    assert left(shop) == []


def test_a_database_that_is_down_is_named_and_the_others_are_worked_on(
    call_half: Call, shop: Database
) -> None:
    add(shop, *map(make_message, ["a", "b"]))
    done = call_half("forget", "a", "--force")
    assert (done.exit_code, done.stdout) == (1, "a: forgotten (shop, row 1)\n")
    assert done.stderr.startswith("Error: database 'down': OperationalError")
    done = call_half("forget", "all", "--task", "shop.*", "--force")
    assert (done.exit_code, done.stdout) == (1, "shop: forgot 1 message\n")


@pytest.mark.parametrize("answer", ["n\n", "\n", "\x04"], ids=["no", "nothing", "end of input"])
def test_without_a_yes_nothing_is_deleted(answer: str, shop: Database) -> None:
    add(shop, make_message("a", queue="reports"))
    shown = ask(shop, answer, "a")
    assert shown.exit_code == 1
    assert "Forget this message?" in shown.text
    assert "reports" in shown.text
    assert left(shop) == ["a"]


def test_with_a_yes_it_is_deleted(shop: Database) -> None:
    add(shop, *map(make_message, ["a", "b"]))
    shown = ask(shop, "y\n", "a", "b", "unknown")
    assert shown.exit_code == 1
    assert "Forget these 2 messages?" in shown.text
    assert "a: forgotten (default, row 1)" in shown.text
    assert left(shop) == []


def test_where_nothing_can_be_deleted_nobody_is_asked(shop: Database) -> None:
    add(shop, make_message("a"))
    claim(shop)
    shown = ask(shop, "", "a", "unknown")
    assert shown.exit_code == 1
    assert "Forget" not in shown.text
    assert "a relay has reserved it" in shown.text


@pytest.mark.parametrize("which", [["a"], ["all", "--task", "shop.add"]], ids=["an id", "all"])
@pytest.mark.parametrize("stdin", ["a pipe", "nothing", "closed"])
def test_without_a_terminal_nothing_is_deleted(which: list[str], stdin: str, shop: Database) -> None:
    add(shop, make_message("a"))
    command, env = outbox_command("forget", *which, app=PROJECT), environment(default=url_of(shop))
    if stdin == "closed":
        done = run(["/bin/sh", "-c", 'exec "$@" <&-', "sh", *command], env)
    else:
        given = "y\n" if stdin == "a pipe" else ""
        done = subprocess.run(
            command, cwd=ROOT, env=env, input=given, capture_output=True, text=True, timeout=30
        )
    assert done.returncode == 1
    assert done.stderr == "Error: expected an answer, found no terminal to ask at. Add --force.\n"
    assert left(shop) == ["a"]


def test_all_of_a_choice_is_counted_before_the_question(shop: Database) -> None:
    add(shop, *map(make_message, ["a", "b", "c"]), make_message("d", task_name="other"))
    shown = ask(shop, "n\n", "all", "--task", "shop.*")
    assert (shown.exit_code, len(left(shop))) == (1, 4)
    assert "default: 3 messages" in shown.text
    assert "Forget these 3 messages?" in shown.text
    shown = ask(shop, "y\n", "all", "--task", "shop.*")
    assert (shown.exit_code, left(shop)) == (0, ["d"])
    assert "default: forgot 3 messages" in shown.text


def test_all_of_a_choice_in_every_database(call: Call, shop: Database, billing: Database) -> None:
    for each in (shop, billing):
        add(each, make_message("a"), make_message("b", queue="slow"))
        change(each, attempts=1, error="no", scheduled_at=hours_from_now(1))
        add(each, make_message("c"))
    chosen = ["--state", "retrying", "--queue", "celery", "--broker", "shop"]
    done = call("forget", "all", *chosen, "--database", "shop", "--force")
    assert (done.exit_code, done.stdout) == (0, "shop: forgot 1 message\n")
    done = call("forget", "all", *chosen, "--force")
    assert done.stdout == "shop: forgot 0 messages\nbilling: forgot 1 message\n"
    assert (left(shop), left(billing)) == (["b", "c"], ["b", "c"])


@pytest.mark.parametrize("size", [1, 3, 100])
def test_many_go_in_batches_and_none_is_missed(
    size: int, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BATCH", "CONTENTS"):
        monkeypatch.setattr(sweeping, name, size)
    monkeypatch.setattr(sweeping, "PAGE", 2 * size)
    add(database, make_message("reserved"))
    claim(database)
    add(database, *(make_message(f"{number}") for number in range(8)))
    counted: list[int] = []
    found = sweeping.doomed(database, Filter(tasks=["shop.add"]), progress=counted.append)
    assert (len(found.ids), sum(counted), found.bound) == (8, 8, 0)
    add(database, make_message("later"))
    told: list[int] = []
    assert sweeping.forget_all(database, found, progress=told.append) == 8
    assert (sum(told), max(told) <= size) == (8, True)
    assert left(database) == ["reserved", "later"]


def test_what_a_relay_took_after_the_count_is_said_to_be_left(
    call: Call, shop: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(shop, *map(make_message, ["a", "b"]))
    count = sweeping.doomed

    def count_too_early(*args: Any, **options: Any) -> sweeping.Doomed:
        found = count(*args, **options)
        claim(shop, limit=1)
        return found

    monkeypatch.setattr("celery_outbox.commands.forget.doomed", count_too_early)
    done = call("forget", "all", "--task", "*", "--force", "--database", "shop")
    assert (done.exit_code, done.stdout) == (1, "shop: forgot 1 message\n")
    assert done.stderr == "Error: shop: 1 message not forgotten, because a relay was faster\n"
    assert left(shop) == ["a"]


WRONG = [
    [],
    ["all"],
    ["all", "--database", "shop"],
    ["all", "a", "--task", "x"],
    ["a", "--task", "shop.add"],
    ["all", "--state", "reserved"],
    ["all", "--state", "delivered"],
]


@pytest.mark.parametrize("arguments", WRONG, ids=str)
def test_wrong_usage_deletes_nothing(arguments: list[str], call: Call, shop: Database) -> None:
    add(shop, make_message("a"))
    done = call("forget", "--force", *arguments)
    assert done.exit_code == 2
    assert left(shop) == ["a"]
