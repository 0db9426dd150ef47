"""``list``: what it shows to people, to programs, and what to nobody."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from celery_outbox.storage.database import Database
from celery_outbox.storage.schema import FAR_FUTURE
from tests.desk.conftest import Call
from tests.desk.terminal import call_on_terminal
from tests.relay.commands import outbox_command, run
from tests.schema.test_check import PROJECT, environment
from tests.storage.rows import add, change, claim, hours_from_now, make_message

#: As long as a task id of Celery's own.
LONG_ID = "8f14e45f-ceea-467f-9a0b-1c2d3e4f5a6b"

FIELDS = {
    "database",
    "row_id",
    "task_id",
    "task_name",
    "broker",
    "queue",
    "state",
    "attempts",
    "max_attempts",
    "base_delay",
    "max_delay",
    "next_attempt_at",
    "deliver_at",
    "expires_at",
    "reserved_until",
    "finished_at",
    "created_at",
    "error",
}


def rows_of(call: Call, *arguments: str) -> list[dict[str, Any]]:
    done = call("list", "--json", *arguments)
    assert (done.exit_code, done.stderr) == (0, "")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def lines_of(call: Call, *arguments: str) -> list[list[str]]:
    """The cells of each line but the heading, of columns that are two blanks apart."""
    done = call("list", *arguments)
    assert done.exit_code == 0
    return [re.split(r"  +", line) for line in done.stdout.splitlines()[1:]]


def make_every_state(database: Database) -> None:
    names = ["reserved", "ready", "delayed", "retrying", "failed", "delivered"]
    add(database, make_message("reserved"))
    claim(database)
    add(database, *map(make_message, names[1:]))
    change(database, "delayed", scheduled_at=hours_from_now(30.5), deliver_at=hours_from_now(30.5))
    change(database, "retrying", scheduled_at=hours_from_now(0.21), attempts=3, error="Refused: full")
    ended = {"scheduled_at": FAR_FUTURE, "attempts": 1, "finished_at": hours_from_now(-2.5)}
    change(database, "failed", error="Refused", **ended)
    change(database, "delivered", **ended)


def test_each_message_has_a_line_with_its_state(call: Call, shop: Database) -> None:
    make_every_state(shop)
    found = {line[2]: line for line in lines_of(call, "shop")}
    assert {name: line[0] for name, line in found.items()} == {name: name for name in found}
    assert len(found) == 6
    retrying = found["retrying"]
    assert retrying[1:6] == ["shop.add", "retrying", "shop", "celery", "3"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", retrying[6])
    assert retrying[7:] == ["in 12 min", "Refused: full"]
    assert found["delayed"][7] == "in 1 d"
    assert found["failed"][7:] == ["2 h ago", "Refused"]
    assert found["reserved"][7] in {"in 4 min", "in 5 min"}


def test_a_maximum_of_attempts_is_shown_beside_their_count(call: Call, shop: Database) -> None:
    add(shop, make_message())
    change(shop, attempts=3, max_attempts=20)
    assert lines_of(call)[0][6] == "3/20"


def test_several_databases_are_told_apart(call: Call, shop: Database, billing: Database) -> None:
    add(shop, make_message("a"))
    add(billing, make_message("b"))
    assert [line[:4] for line in lines_of(call)] == [
        ["shop", "ready", "shop.add", "a"],
        ["billing", "ready", "shop.add", "b"],
    ]
    assert [(row["database"], row["task_id"]) for row in rows_of(call)] == [
        ("shop", "a"),
        ("billing", "b"),
    ]
    assert [row["task_id"] for row in rows_of(call, "billing")] == ["b"]


def test_the_limit_is_one_for_each_database_and_says_when_there_is_more(
    call: Call, shop: Database, billing: Database
) -> None:
    add(shop, *(make_message(f"{number}") for number in range(5)))
    add(billing, *(make_message(f"{number}") for number in range(3)))
    done = call("list", "--limit", "3")
    assert len(done.stdout.splitlines()) == 1 + 3 + 3
    assert done.stderr == "shop: there are more than 3; see --limit and --state.\n"
    assert [row["task_id"] for row in rows_of(call, "--limit", "2")] == ["0", "1", "0", "1"]


def test_states_can_be_chosen(call: Call, shop: Database) -> None:
    make_every_state(shop)
    found = rows_of(call, "--state", "failed", "--state", "delayed")
    assert [row["state"] for row in found] == ["delayed", "failed"]


def test_messages_can_be_chosen_by_task_broker_and_queue(call: Call, shop: Database) -> None:
    add(shop, make_message("a"), make_message("b", task_name="shop.add.more", queue="slow"))
    add(shop, make_message("c", broker="billing"), make_message("d", task_name="other"))
    for arguments, expected in {
        ("--task", "shop.add"): ["a", "c"],
        ("--task", "shop.add.*", "--task", "other"): ["b", "d"],
        ("--queue", "slow"): ["b"],
        ("--broker", "billing", "--broker", "billing"): ["c"],
        ("--task", "shop.*", "--broker", "shop", "--queue", "celery"): ["a"],
        ("--queue", "no such queue"): [],
    }.items():
        assert [row["task_id"] for row in rows_of(call, *arguments)] == expected


@pytest.mark.parametrize("pattern", ["*.add", "shop.*.add", "shop.**"])
def test_a_star_that_is_not_at_the_end_is_wrong_usage(pattern: str, call: Call) -> None:
    done = call("list", "--task", pattern)
    assert done.exit_code == 2
    assert "a * at the end alone" in done.stderr


def test_json_has_every_field_with_times_in_unix_seconds(call: Call, shop: Database) -> None:
    make_every_state(shop)
    by_id = {row["task_id"]: row for row in rows_of(call)}
    now = hours_from_now(0).timestamp()
    for row in by_id.values():
        assert set(row) == FIELDS
        assert row["created_at"] == pytest.approx(now, abs=60)
    assert by_id["delayed"]["next_attempt_at"] == pytest.approx(now + 30.5 * 3600, abs=60)
    assert by_id["delayed"]["deliver_at"] == pytest.approx(now + 30.5 * 3600, abs=60)
    assert by_id["reserved"]["reserved_until"] == pytest.approx(now + 300, abs=60)
    assert by_id["failed"]["finished_at"] == pytest.approx(now - 2.5 * 3600, abs=60)
    for name in ("reserved", "failed", "delivered"):
        assert by_id[name]["next_attempt_at"] is None


def test_json_shows_delays_in_seconds_and_whole_errors(call: Call, shop: Database) -> None:
    add(shop, make_message())
    text = "Refused\n" + "x" * 5000
    change(shop, attempts=1, error=text, max_attempts=3, base_delay=250_000, max_delay=600_000_000)
    (row,) = rows_of(call)
    assert (row["max_attempts"], row["base_delay"], row["max_delay"]) == (3, 0.25, 600.0)
    assert row["error"] == text


def test_nothing_stored_is_an_empty_list(call: Call) -> None:
    assert rows_of(call) == []
    done = call("list")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "There are no messages.\n")


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["table", "json"])
def test_a_database_that_is_down_is_named_beside_what_the_others_hold(
    form: list[str], call_half: Call, shop: Database
) -> None:
    add(shop, make_message("waiting"))
    done = call_half("list", *form)
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: database 'down': OperationalError")
    assert "waiting" in done.stdout
    if form:
        assert [row["task_id"] for row in json.loads(done.stdout)] == ["waiting"]


def test_neither_contents_nor_tokens_are_shown(call: Call, shop: Database) -> None:
    add(shop, make_message(body=b"a secret body"))
    token = claim(shop).token
    change(shop, message="a secret envelope")
    for arguments in (["list"], ["list", "--json"]):
        said = call(*arguments).output
        assert "secret" not in said
        assert token not in said


def test_what_a_terminal_would_obey_is_not_printed(call: Call, shop: Database) -> None:
    error = "Refused \x1b[31mred\x07 [bold]markup[/bold]\nin a second line \u202e"
    add(shop, make_message(task_name="\x1b]0;title\x07", queue="a\rb"))
    change(shop, attempts=1, error=error)
    said = call("list").stdout
    assert "[bold]markup[/bold] in a second line" in said
    assert not [each for each in said if not each.isprintable() and each != "\n"]
    assert "\x1b" not in call("list", "--json").stdout


def test_a_pipe_gets_one_whole_line_for_each_message(tmp_path: Path, shop: Database) -> None:
    name, queue = "warehouse." + "pack" * 50, "q" * 200
    add(shop, make_message(LONG_ID, task_name=name, queue=queue))
    change(shop, attempts=1, error="Refused " * 50)
    env = environment(default=shop.url.render_as_string()) | {"COLUMNS": "20"}
    done = run(outbox_command("list", app=PROJECT), env)
    assert done.returncode == 0, done.stderr
    _, line = done.stdout.splitlines()
    for part in (LONG_ID, name, queue, "Refused Refused"):
        assert part in line


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_terminal_is_too_narrow(columns: int, shop: Database) -> None:
    add(shop, make_message(LONG_ID, queue="reports.monthly"))
    change(shop, attempts=1, error="Refused: the queue is full, and nobody knows for how long")
    shown = on_a_terminal(columns, "list", default=shop.url.render_as_string())
    assert max(map(len, shown.splitlines())) <= columns
    together = re.sub(r"\s+", "", shown)
    for part in ("ready", "shop.add", LONG_ID, "reports.monthly", "Refused:thequeueisfull"):
        assert part in together
    assert LONG_ID in shown


def on_a_terminal(columns: int, *arguments: str, **databases: str) -> str:
    """Call a command on a terminal of so many columns and return what is to be seen."""
    shown = call_on_terminal(*arguments, columns=columns, **databases)
    assert shown.exit_code == 0, shown.text
    return shown.text
