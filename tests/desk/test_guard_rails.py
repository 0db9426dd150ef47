"""Commands that act on messages, as an operator starts them: each in a process of its own."""

import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest

from celery_outbox import Outbox
from celery_outbox.errors import OptionError
from celery_outbox.storage.database import Database
from celery_outbox.storage.schema import FAR_FUTURE
from tests.desk.conftest import Call
from tests.desk.terminal import call_on_terminal
from tests.relay.commands import outbox_command, run
from tests.schema.test_check import PROJECT, environment
from tests.storage.rows import add, change, claim, hours_from_now, make_message, rows


def url_of(database: Database) -> str:
    return database.url.render_as_string(hide_password=False)


def make_failed(database: Database, task_id: str) -> None:
    add(database, make_message(task_id))
    failed = {"finished_at": hours_from_now(-1), "scheduled_at": FAR_FUTURE, "error": "no"}
    change(database, task_id, attempts=3, **failed)


@pytest.fixture
def start(shop: Database, billing: Database) -> Callable[..., tuple[int, Sequence[str]]]:
    """Run a command in its own process; its exit code, and the lines that it wrote."""
    env = environment(default=url_of(shop), billing=url_of(billing))

    def start(*arguments: str) -> tuple[int, Sequence[str]]:
        done = run(outbox_command(*arguments, app=PROJECT), env)
        assert "Traceback" not in done.stderr
        return done.returncode, [*done.stdout.splitlines(), *done.stderr.splitlines()]

    return start


def test_a_retry_does_what_can_be_done_and_names_what_cannot(
    start: Callable[..., tuple[int, Sequence[str]]], shop: Database, billing: Database
) -> None:
    add(shop, make_message("reserved"))
    claim(shop)
    add(shop, make_message("new"), make_message("both"))
    make_failed(shop, "failed")
    for task_id in ("both", "other"):
        make_failed(billing, task_id)
    exit_code, lines = start("retry", "new", "reserved", "both", "failed")
    assert (exit_code, lines[0]) == (1, "failed: due now (default, row 4)")
    for line, task_id, reason in zip(
        lines[1:],
        ["new", "reserved", "both"],
        ["no relay has tried it", "a relay has reserved it", "choose one with --database"],
        strict=True,
    ):
        assert line.startswith(f"Error: {task_id}: not retried, ")
        assert reason in line
    (*_, failed) = rows(shop)
    assert (failed.attempts, failed.error, failed.finished_at) == (3, None, None)
    assert start("retry", "all", "--database", "billing") == (
        0,
        ["billing: 2 messages will be tried again"],
    )
    assert [row.error for row in rows(billing)] == [None, None]


def test_a_forced_forget_deletes_what_can_be_deleted_and_names_what_cannot(
    start: Callable[..., tuple[int, Sequence[str]]], shop: Database, billing: Database
) -> None:
    add(shop, make_message("reserved"))
    claim(shop)
    add(shop, make_message("both"), make_message("good"))
    add(billing, make_message("both"))
    exit_code, lines = start("forget", "--force", "good", "reserved", "unknown", "both")
    assert (exit_code, lines[0]) == (1, "good: forgotten (default, row 3)")
    assert [line.split(",")[0] for line in lines[1:]] == [
        f"Error: {task_id}: not forgotten" for task_id in ("reserved", "unknown", "both")
    ]
    assert [row.task_id for row in rows(shop)] == ["reserved", "both"]
    assert start("forget", "--force", "both", "--database", "billing")[0] == 0
    assert (len(rows(shop)), len(rows(billing))) == (2, 0)


def test_a_no_still_tells_what_could_not_have_been_forgotten(shop: Database) -> None:
    add(shop, make_message("reserved"))
    claim(shop)
    add(shop, make_message("a"))
    shown = call_on_terminal(
        "forget", "a", "reserved", "unknown", answer="n\n", columns=120, default=url_of(shop)
    )
    assert shown.exit_code == 1
    asked, _, told = shown.text.partition("Nothing was forgotten.\n")
    assert "Forget this message?" in asked
    assert told.splitlines() == [
        "Error: unknown: not forgotten, there is no message with this id",
        "Error: reserved: not forgotten, a relay has reserved it (default, row 1)",
    ]
    assert [row.task_id for row in rows(shop)] == ["reserved", "a"]


@pytest.mark.parametrize("eta", ["90", "tomorrow"])
def test_what_is_said_of_a_wrong_time_names_options_of_the_command(eta: str, call: Call) -> None:
    done = call("reschedule", "a", "--eta", eta)
    assert done.exit_code == 2
    assert (
        f"Invalid value for --eta: expected a time such as 2030-01-31T12:00:00+01:00, got {eta!r}"
        in (done.stderr)
    )
    assert "there is --countdown" in done.stderr
    assert "countdown=" not in done.stderr


ASKED: dict[str, Callable[[Outbox, Any], object]] = {
    "find": lambda box, task_id: box.find(task_id),
    "forget": lambda box, task_id: box.forget(task_id),
    "reschedule": lambda box, task_id: box.reschedule(task_id, timedelta(hours=1)),
}


@pytest.mark.parametrize("task_id", [uuid.UUID(int=7), None, ["a"], "\ud800"], ids=ascii)
@pytest.mark.parametrize("name", ASKED)
def test_code_that_asks_for_what_is_no_task_id_is_told(name: str, task_id: Any, box: Outbox) -> None:
    with pytest.raises(OptionError, match="task_id: expected the id of a task as text, got "):
        ASKED[name](box, task_id)
