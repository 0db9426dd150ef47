"""``monitor``: what it shows to people and to programs, and when it is an alarm."""

import json
import re
from typing import Any

import pytest

from celery_outbox.signals import outbox_busy
from celery_outbox.storage.database import Database
from tests.monitor.conftest import Call
from tests.monitor.terminal import on_a_terminal
from tests.pages import ROOT
from tests.relay.commands import outbox_command, run
from tests.schema.test_check import PROJECT, environment
from tests.storage.rows import add, change, claim, hours_from_now, make_message

SECONDS = 1796000000


def found_by(monitor: Call, *arguments: str) -> list[dict[str, Any]]:
    done = monitor("--json", *arguments)
    assert done.stderr == ""
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def make_waiting(database: Database) -> None:
    add(database, make_message("old"), make_message("new"), make_message("w", broker="warehouse"))
    error = "ConnectionRefusedError: \x1b[31m[bold]no[/bold]\nsecond line"
    waits = {"scheduled_at": hours_from_now(0.1), "attempts": 4, "error": error}
    change(database, "old", created_at=hours_from_now(-2.01), **waits)


def run_relay(database: Database, **about: Any) -> None:
    told = {"host": "web-1", "pid": 4711, "since": SECONDS, "app": "shop"} | about
    database.run(lambda connection: database.state.see_relay(connection, "r", told))


def test_people_see_counts_ages_relays_and_what_fails(monitor: Call, shop: Database) -> None:
    make_waiting(shop)
    run_relay(shop)
    done = monitor("shop")
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "shop: 3 messages wait, the oldest has been due for 2 h"
    assert lines[1].startswith("UNKNOWN: 1 message for the broker 'warehouse'")
    assert lines[2].startswith("  failing shop, celery: 1 message, 4 attempts: ConnectionRefusedError")
    rows = [re.split(r"  +", line.strip()) for line in lines[3:6]]
    assert rows[0][-1] == "oldest due"
    assert rows[1] == ["shop", "1", "0", "1", "0", "0", "0", "2 h"]
    assert rows[2][:2] == ["warehouse", "1"]
    assert re.fullmatch(
        r"  relay web-1, process 4711, since 2026-11-30 00:53:20 UTC, seen \d+ s ago", lines[6]
    )
    assert re.fullmatch(r"  looked at in \d+ ms", lines[7])
    assert len(lines) == 8


def test_an_empty_database_says_so(monitor: Call) -> None:
    done = monitor("billing")
    assert done.exit_code == 0
    assert done.stdout.startswith("billing: nothing waits\n")
    assert "no relay is running" in done.stdout
    assert "NO RELAY" not in done.stdout


def test_messages_that_are_due_without_a_relay_are_told_of(monitor: Call, shop: Database) -> None:
    add(shop, make_message())
    assert "NO RELAY is running, and messages are due" in monitor("shop").stdout


def test_numbers_that_were_not_counted_to_their_end_say_so(monitor: Call, shop: Database) -> None:
    add(shop, *(make_message(str(number)) for number in range(10_001)))
    done = monitor("shop")
    assert done.stdout.startswith("shop: 10,000+ messages wait")
    assert "+: at least, since no more than 10,000 rows of a kind are counted" in done.stdout
    (found,) = found_by(monitor, "shop")
    assert found["states"]["ready"] == {"count": 10_000, "is_exact": False}
    assert (found["pending"], found["pending_is_exact"]) == (10_000, False)
    assert found["age_is_exact"] is True
    (found,) = found_by(monitor, "shop", "--max", "10001")
    assert (found["pending"], found["is_busy"]) == (10_001, True)
    (found,) = found_by(monitor, "shop", "--max", "10002")
    assert (found["pending"], found["pending_is_exact"], found["is_busy"]) == (10_001, True, False)


def test_json_has_every_field_that_the_page_documents(monitor: Call, shop: Database) -> None:
    make_waiting(shop)
    run_relay(shop)
    found, empty = found_by(monitor)
    page = (ROOT / "docs" / "monitoring.md").read_text()
    said: dict[str, set[str]] = {}
    for title, table in re.findall(r"^### (.+)\n\n\| field.*\n\|.*\n((?:\|.*\n)+)", page, re.MULTILINE):
        cells = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
        said[title] = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert said == {
        "Each database": set(found),
        "Each broker": set(found["brokers"][0]),
        "Each failing queue": set(found["failing"][0]),
        "Each relay": set(found["relays"][0]),
    }
    assert set(empty) == set(found)
    assert list(found["states"]) == ["ready", "delayed", "retrying", "reserved", "failed", "delivered"]


def test_json_is_in_numbers_and_unix_seconds(monitor: Call, shop: Database) -> None:
    make_waiting(shop)
    run_relay(shop)
    found, empty = found_by(monitor)
    now = hours_from_now(0).timestamp()
    assert found["read_at"] == pytest.approx(now, abs=60)
    assert found["age"] == pytest.approx(2.01 * 3600, abs=60)
    assert found["due_since"] == pytest.approx(now - 2.01 * 3600, abs=60)
    assert 0 < found["took"] < 10
    assert [each["broker"] for each in found["brokers"]] == ["shop", "warehouse"]
    assert [each["is_known"] for each in found["brokers"]] == [True, False]
    assert found["brokers"][0]["states"]["retrying"] == {"count": 1, "is_exact": True}
    (failing,) = found["failing"]
    assert failing["error"].endswith("\nsecond line")
    assert failing | {"error": ""} == {
        "broker": "shop",
        "queue": "celery",
        "count": 1,
        "is_exact": True,
        "attempts": 4,
        "error": "",
    }
    (relay,) = found["relays"]
    assert relay["seen_at"] == pytest.approx(now, abs=60)
    assert relay | {"seen_at": 0} == {
        "host": "web-1",
        "pid": 4711,
        "app": "shop",
        "since": SECONDS,
        "seen_at": 0,
        "is_running": True,
    }
    assert (empty["pending"], empty["age"], empty["due_since"]) == (0, None, None)
    assert (empty["failing"], empty["relays"], empty["is_busy"]) == ([], [], False)


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["table", "json"])
def test_a_database_that_is_down_is_named_beside_the_others(
    form: list[str], monitor_half: Call, shop: Database
) -> None:
    add(shop, make_message())
    done = monitor_half(*form)
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: database 'down': OperationalError")
    if not form:
        assert done.stdout.startswith("shop: 1 message waits")
        return
    down, up = json.loads(done.stdout)
    assert down["error"].startswith("database 'down': OperationalError")
    assert {name: value for name, value in down.items() if value is not None} == {
        "database": "down",
        "error": down["error"],
    }
    assert (set(down), up["error"], up["pending"]) == (set(up), None, 1)


@pytest.mark.parametrize(
    ("arguments", "heard"),
    [
        (["--max", "2"], [("shop", 2)]),
        (["--max", "3"], []),
        (["--age", "119m"], [("shop", 2)]),
        (["--age", "3h"], []),
        (["--max", "1", "--age", "3h"], [("shop", 2), ("billing", 1)]),
    ],
)
def test_a_threshold_that_a_database_reaches_is_a_signal_and_exit_code_1(
    arguments: list[str],
    heard: list[tuple[str, int]],
    monitor: Call,
    shop: Database,
    billing: Database,
) -> None:
    add(shop, make_message("old"), make_message("new"))
    change(shop, "old", created_at=hours_from_now(-2))
    add(billing, make_message())
    got: list[tuple[str, int, float]] = []

    def listen(sender: str, pending: int, age: float, **_: Any) -> None:
        got.append((sender, pending, age))

    outbox_busy.connect(listen)
    try:
        done = monitor(*arguments)
    finally:
        outbox_busy.disconnect(listen)
    assert [(sender, pending) for sender, pending, _ in got] == heard
    assert done.exit_code == bool(heard)
    assert done.stdout.count("BUSY: a threshold is reached") == len(heard)
    if heard:
        assert got[0][2] == pytest.approx(7200, abs=60)


def test_a_busy_database_where_nothing_is_due_has_no_age(monitor: Call, shop: Database) -> None:
    add(shop, make_message())
    change(shop, scheduled_at=hours_from_now(1), deliver_at=hours_from_now(1))
    ages: list[float | None] = []

    def listen(age: float | None, **_: Any) -> None:
        ages.append(age)

    outbox_busy.connect(listen)
    try:
        done = monitor("--max", "1")
    finally:
        outbox_busy.disconnect(listen)
    assert (done.exit_code, ages) == (1, [None])
    assert done.stdout.startswith("shop: 1 message waits, none is due\n")


def test_a_listener_that_raises_leaves_the_alarm_as_it_is(monitor: Call, shop: Database) -> None:
    add(shop, make_message())

    def fail(**_: Any) -> None:
        raise RuntimeError("broken pager")

    outbox_busy.connect(fail)
    try:
        done = monitor("--max", "1")
    finally:
        outbox_busy.disconnect(fail)
    assert done.exit_code == 1
    assert "BUSY" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max", "0"], "0 is not in the range"),
        (["--age", "soon"], "expected a number of seconds or text such as 90"),
        (["--age", "0"], "expected more than zero"),
        (["--watch", "--interval", "0"], "expected more than zero"),
        (["--watch", "--json"], "Expected either --watch or --json"),
    ],
)
def test_wrong_usage_is_said_with_exit_code_2(arguments: list[str], said: str, monitor: Call) -> None:
    done = monitor(*arguments)
    assert done.exit_code == 2
    assert said in done.stderr


def test_neither_contents_nor_tokens_nor_what_a_terminal_would_obey_are_shown(
    monitor: Call, shop: Database
) -> None:
    make_waiting(shop)
    add(shop, make_message("s", body=b"a secret body", queue="a\rb\x1b[0m", broker="x\x1b[0m"))
    token = claim(shop).token
    change(shop, attempts=1, error="[red]Refused[/red]", message="a secret envelope")
    run_relay(shop, host="web\x1b[31m-1")
    for arguments in ([], ["--json"]):
        said = monitor(*arguments).output
        assert "secret" not in said
        assert token not in said
        assert not [each for each in said if not each.isprintable() and each != "\n"]
    assert "[red]Refused[/red]" in monitor().stdout


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_terminal_is_too_narrow(columns: int, shop: Database) -> None:
    make_waiting(shop)
    run_relay(shop)
    shown = on_a_terminal(columns, "monitor", default=shop.url.render_as_string())
    assert max(map(len, shown.splitlines())) <= columns
    together = re.sub(r"\s+", "", shown)
    for part in ("3messageswait", "web-1,process4711", "warehouse", "ConnectionRefusedError", "2h"):
        assert part in together


def test_a_pipe_gets_whole_lines(shop: Database) -> None:
    name = "b" * 150
    add(shop, make_message(broker=name, queue="q" * 200))
    change(shop, attempts=1, error="Refused " * 15)
    env = environment(default=shop.url.render_as_string()) | {"COLUMNS": "20"}
    done = run(outbox_command("monitor", app=PROJECT), env)
    assert (done.returncode, done.stderr) == (0, "")
    assert any(name in line and "q" * 200 in line for line in done.stdout.splitlines())
    assert any(line.split()[:2] == [name, "1"] for line in done.stdout.splitlines())
