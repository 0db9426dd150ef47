"""The commands: what they do, what they refuse, and with which exit code they end."""

import os
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from celery_outbox import Outbox
from celery_outbox.cli import main
from celery_outbox.cli import outbox as commands
from tests.relay.apps import make_outbox, rows, send
from tests.relay.commands import PROJECT, ROOT, environment, outbox_command, program, run, running
from tests.relay.wire import task_ids
from tests.storage.rows import add, change, make_message
from tests.waiting import wait_until


@pytest.fixture
def broker(tmp_path: Path) -> str:
    """A broker that needs no server."""
    return f"sqla+sqlite:///{tmp_path / 'broker.db'}"


@pytest.fixture
def env(sqlite_url: str, broker: str) -> dict[str, str]:
    """What a process of the project is told."""
    return environment(broker=broker, database=sqlite_url)


@pytest.fixture
def shop(sqlite_url: str, broker: str) -> Iterator[Outbox]:
    """The project's outbox, installed, in this process."""
    engine = sa.create_engine(sqlite_url)
    yield make_outbox(broker, engine)
    engine.dispose()


@pytest.mark.parametrize(
    "command",
    [
        outbox_command("schema", "install"),
        [program("celery"), "-A", PROJECT, "outbox", "schema", "install"],
    ],
    ids=["celery-outbox", "celery outbox"],
)
def test_schema_install_creates_the_table(
    command: list[str], env: dict[str, str], sqlite_url: str
) -> None:
    done = run(command, env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "default: the table celery_outbox is installed.\n"
    engine = sa.create_engine(sqlite_url)
    assert sa.inspect(engine).has_table("celery_outbox")
    engine.dispose()


def test_relay_once_takes_one_batch(shop: Outbox, env: dict[str, str], broker: str) -> None:
    stored = [send(shop) for _ in range(25)]
    done = run(outbox_command("relay", "--once", "--batch", "10"), env)
    assert done.returncode == 0, done.stderr
    assert task_ids(broker) == stored[:10]
    assert [row.task_id for row in rows(shop)] == stored[10:]


def test_celery_outbox_relay_does_the_same(shop: Outbox, env: dict[str, str], broker: str) -> None:
    stored = send(shop)
    done = run([program("celery"), "-A", PROJECT, "outbox", "relay", "--once"], env)
    assert done.returncode == 0, done.stderr
    assert task_ids(broker) == [stored]


def test_relay_stops_when_nothing_is_ready_and_waits_for_nothing(
    shop: Outbox, env: dict[str, str], broker: str
) -> None:
    ready = [send(shop) for _ in range(25)]
    delayed = send(shop, countdown=3600)
    retrying = send(shop, countdown=3600)
    change(shop.databases["default"], retrying, attempts=1, error="no")
    done = run(outbox_command("relay", "--stop-when-empty", "--batch", "10"), env)
    assert done.returncode == 0, done.stderr
    assert task_ids(broker) == ready
    assert [row.task_id for row in rows(shop)] == [delayed, retrying]


def test_relay_goes_on_behind_messages_that_cannot_be_delivered(
    shop: Outbox, env: dict[str, str], broker: str
) -> None:
    bad = [make_message(f"bad {number}", envelope="no envelope") for number in range(3)]
    add(shop.databases["default"], *bad)
    good = [send(shop) for _ in range(3)]
    done = run(outbox_command("relay", "--stop-when-empty", "--batch", "1"), env)
    assert done.returncode == 0, done.stderr
    assert task_ids(broker) == good
    assert [(row.task_id, row.attempts >= 1) for row in rows(shop)] == [
        ("bad 0", True),
        ("bad 1", True),
        ("bad 2", True),
    ]


def test_relay_takes_the_database_that_is_named(shop: Outbox, env: dict[str, str], broker: str) -> None:
    stored = send(shop)
    done = run(outbox_command("relay", "default", "--once"), env)
    assert done.returncode == 0, done.stderr
    assert task_ids(broker) == [stored]


def test_an_unknown_database_is_an_error_that_lists_the_known(env: dict[str, str]) -> None:
    done = run(outbox_command("relay", "billing", "--once"), env)
    assert done.returncode == 1
    assert "expected one of the databases 'default', got 'billing'" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_app_without_an_outbox_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text("from celery import Celery\napp = Celery('bare')\n")
    done = run(outbox_command("relay", "--once", app="bare"), cwd=tmp_path)
    assert done.returncode == 1
    assert "expected an Outbox on the Celery app 'bare', found none" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_setting_is_an_error_without_a_traceback(sqlite_url: str, broker: str) -> None:
    wrong = environment(broker=broker, database=sqlite_url, settings={"retry_after": "soon"})
    done = run(outbox_command("relay", "--once"), wrong)
    assert done.returncode == 1
    assert "retry_after: expected a number of seconds" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_table_is_named_with_the_command_that_makes_it(env: dict[str, str]) -> None:
    done = run(outbox_command("relay", "--once"), env)
    assert "celery-outbox -A your_app schema install" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broker_in_the_memory_of_one_process_is_refused_and_its_row_kept(
    shop: Outbox, sqlite_url: str
) -> None:
    stored = send(shop)
    memory = environment(broker="memory://", database=sqlite_url)
    done = run(outbox_command("relay", "--once"), memory)
    assert done.returncode == 1
    assert "memory" in done.stderr
    assert "Traceback" not in done.stderr
    assert [(row.task_id, row.attempts) for row in rows(shop)] == [(stored, 0)]


WRONG_USAGE = {
    "a batch of none": (["relay", "--batch", "0"], "--batch"),
    "a batch too large": (["relay", "--batch", "1001"], "--batch"),
    "no batch": (["relay", "--batch", "many"], "--batch"),
    "no sleep": (["relay", "--sleep", "0"], "--sleep"),
    "a negative sleep": (["relay", "--sleep", "-1"], "--sleep"),
    "no duration": (["relay", "--sleep", "soon"], "90s, 15m, 12h or 7d"),
    "two databases": (["relay", "one", "two"], "two"),
    "an unknown option": (["relay", "--twice"], "--twice"),
    "an unknown command": (["deliver"], "deliver"),
}


@pytest.mark.parametrize("name", WRONG_USAGE)
def test_wrong_usage_ends_with_exit_code_2(
    name: str, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, expected = WRONG_USAGE[name]
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    done = CliRunner().invoke(main, ["-A", PROJECT, *arguments])
    assert done.exit_code == 2
    assert expected in done.output


@pytest.mark.parametrize(
    ("app", "expected"),
    [
        ([], "Expected -A"),
        (["-A", "no_such_module"], "there is no module named 'no_such_module'"),
        (["-A", "json"], "-A json"),
        (["-A", ""], "-A"),
        (["-A", "json:none"], "-A json:none"),
        (["-A", "."], "-A"),
        (["-A", "a b/c"], "-A"),
    ],
    ids=["none", "no module", "no app in it", "empty", "no such name", "a dot", "a path"],
)
def test_an_app_that_cannot_be_found_is_wrong_usage(
    app: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("APP", raising=False)
    done = CliRunner().invoke(main, [*app, "relay", "--once"])
    assert done.exit_code == 2
    assert expected in done.output


@pytest.mark.parametrize("arguments", [["--help"], ["relay", "--help"], ["schema", "--help"]], ids=str)
def test_help_needs_no_app(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("APP", raising=False)
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0
    assert "Usage:" in done.output


@pytest.mark.parametrize("name", commands.commands)
def test_every_command_explains_itself_to_a_narrow_terminal(name: str) -> None:
    done = CliRunner().invoke(main, [name, "--help"], terminal_width=80)
    assert done.exit_code == 0
    assert max(map(len, done.output.splitlines())) <= 80
    for option in (each for each in commands.commands[name].params if isinstance(each, click.Option)):
        assert option.help
    if name != "schema":
        assert "xit code" in done.output


COMPLETED = {
    "celery-outbox re": ["relay", "reschedule", "restart", "retry"],
    "celery-outbox forget --fo": ["--force"],
    "celery-outbox list --state re": ["ready", "retrying", "reserved"],
    "celery-outbox -A shop schema i": ["install"],
}


@pytest.mark.parametrize("line", COMPLETED)
def test_a_shell_completes_commands_options_and_states(line: str) -> None:
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    env = {**os.environ, **asked, "_CELERY_OUTBOX_COMPLETE": "bash_complete"}
    done = run([program("celery-outbox")], env)
    assert [each.removeprefix("plain,") for each in done.stdout.split()] == COMPLETED[line]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_page_says_how_a_shell_learns_to_complete(shell: str) -> None:
    variable = f"_CELERY_OUTBOX_COMPLETE={shell}_source"
    assert f"{variable} celery-outbox" in (ROOT / "docs" / "operations.md").read_text()
    name, _, value = variable.partition("=")
    done = run([program("celery-outbox")], {**os.environ, name: value})
    assert (done.returncode, "celery_outbox" in done.stdout) == (0, True)


def test_a_pipe_that_is_closed_early_is_no_error(shop: Outbox, env: dict[str, str]) -> None:
    add(shop.databases["default"], *(make_message(f"{number}" * 200) for number in range(500)))
    listing = shlex.join(outbox_command("list", "--limit", "500"))
    done = run(["/bin/sh", "-c", f"{listing} | head -n 1"], env)
    assert done.stdout.startswith("state")
    assert done.stderr in {"", "default: there are more than 500; see --limit and --state.\n"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_an_idle_relay_ends_at_once_when_told(
    number: signal.Signals, shop: Outbox, env: dict[str, str], tmp_path: Path
) -> None:
    send(shop)
    with running(outbox_command("relay", "--sleep", "1h"), tmp_path, env) as relay:
        wait_until(lambda: not rows(shop), message="the first delivery")
        relay.send(number)
        assert relay.wait(timeout=5) == 0, relay.output
        assert "Traceback" not in relay.output
