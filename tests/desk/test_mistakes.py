"""What an operator can do wrong, and what can be wrong around one: an answer and an exit code."""

import json
import socket
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import click
import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result

from celery_outbox import Outbox
from celery_outbox.admin import reaching
from celery_outbox.cli import main
from celery_outbox.commands import monitor
from celery_outbox.storage.database import Database
from tests.desk.conftest import Call, caller
from tests.processes import HOST, unused_port
from tests.relay.commands import outbox_command, run
from tests.schema.old import make_old_table
from tests.schema.test_check import PROJECT, environment
from tests.storage.rows import add, change, make_message, rows

#: Every command that asks a database, on messages that "shop" has.
COMMANDS = [
    ["list"],
    ["list", "--json"],
    ["find", "a"],
    ["find", "a", "--json"],
    ["retry", "a"],
    ["retry", "all"],
    ["reschedule", "a", "--countdown", "1h"],
    ["forget", "a", "--force"],
    ["forget", "all", "--task", "shop.*", "--force"],
    ["prune", "--older-than", "1s"],
    ["monitor"],
    ["monitor", "--json"],
    ["restart"],
    ["schema", "check"],
    ["schema", "install"],
    ["schema", "migrate"],
]
#: What "schema" cures.
INSTALLING = [["schema", "install"], ["schema", "migrate"]]


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections and never says a word."""
    with socket.create_server((HOST, 0)) as server:
        yield f"postgresql+psycopg://shop:hunter2@{HOST}:{server.getsockname()[1]}/shop"


@pytest.fixture
def beside(
    boxes: Callable[[Mapping[str, str]], Outbox], shop: Database
) -> Callable[[str], tuple[Call, Outbox]]:
    """Call commands of an app with a "broken" database, and "shop", which holds a message."""
    add(shop, make_message("a"))
    change(shop, attempts=1, error="Refused")

    def make(url: str) -> tuple[Call, Outbox]:
        box = boxes({"broken": url, "shop": shop.url.render_as_string()})
        return caller(box), box

    return make


def assert_told(done: Result, command: list[str], said: str) -> None:
    """One line says what is wrong, "shop" was worked on, and JSON stands alone."""
    assert done.exit_code == 1
    assert "broken" in done.output
    assert said in done.output
    assert "shop" in done.stdout
    if "--json" in command:
        assert "broken" in done.stderr
        assert json.loads(done.stdout)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_database_that_refuses_hides_no_other(
    command: list[str], beside: Callable[[str], tuple[Call, Outbox]]
) -> None:
    call, _ = beside(f"postgresql+psycopg://shop:hunter2@{HOST}:{unused_port()}/shop")
    assert_told(call(*command), command, "OperationalError")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_database_that_never_answers_hides_no_other(
    command: list[str],
    silent: str,
    beside: Callable[[str], tuple[Call, Outbox]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reaching, "PATIENCE", timedelta(seconds=0.3))
    monkeypatch.setattr(monitor, "PATIENCE", timedelta(seconds=0.3))
    call, _ = beside(silent)
    assert_told(call(*command), command, "expected an answer within 0 s, got none")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_file_that_is_no_database_hides_no_other(
    command: list[str], tmp_path: Path, beside: Callable[[str], tuple[Call, Outbox]]
) -> None:
    (tmp_path / "text").write_text("no database, just text. " * 100)
    call, _ = beside(f"sqlite:///{tmp_path / 'text'}")
    assert_told(call(*command), command, "file is not a database")


@pytest.mark.parametrize("command", [each for each in COMMANDS if each not in INSTALLING], ids=" ".join)
def test_a_missing_table_is_named_with_what_makes_it(
    command: list[str], tmp_path: Path, beside: Callable[[str], tuple[Call, Outbox]]
) -> None:
    call, _ = beside(f"sqlite:///{tmp_path / 'empty.db'}")
    assert_told(call(*command), command, "celery-outbox -A your_app schema install")


@pytest.mark.parametrize("command", [each for each in COMMANDS if each not in INSTALLING], ids=" ".join)
def test_a_table_of_another_version_is_named_and_left_alone(
    command: list[str], tmp_path: Path, beside: Callable[[str], tuple[Call, Outbox]]
) -> None:
    url = f"sqlite:///{tmp_path / 'old.db'}"
    engine = sa.create_engine(url)
    make_old_table(engine, rows=3)
    call, _ = beside(url)
    done = call(*command)
    if command == ["restart"]:
        assert done.exit_code == 0  # its table has not changed
    else:
        assert_told(done, command, "schema migrate")
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM celery_outbox").scalar() == 3
    engine.dispose()


@pytest.mark.parametrize("command", [["list"], ["retry", "a"], ["schema", "check"]], ids=" ".join)
def test_a_wrong_password_is_told_of_and_not_told(
    command: list[str], mariadb_url: str, beside: Callable[[str], tuple[Call, Outbox]]
) -> None:
    url = sa.make_url(mariadb_url).set(username="nobody", password="hunter2")
    call, _ = beside(url.render_as_string(hide_password=False))
    assert_told(call(*command), command, "Access denied")


NAMED = [
    ["list"],
    ["find", "a"],
    ["retry", "a"],
    ["retry", "all"],
    ["reschedule", "a", "--countdown", "1h"],
    ["forget", "a", "--force"],
    ["prune", "--older-than", "1s"],
    ["monitor"],
    ["schema", "install"],
    ["schema", "check"],
    ["schema", "migrate"],
    ["schema", "sql"],
]


@pytest.mark.parametrize("name", ["nowhere", "", "shop\x1b[2J"], ids=["unknown", "empty", "control"])
@pytest.mark.parametrize("command", NAMED, ids=" ".join)
def test_a_name_of_no_database_is_an_error_and_stands_for_none(
    command: list[str], name: str, call: Call, shop: Database
) -> None:
    add(shop, make_message("a"))
    change(shop, attempts=1)
    before = rows(shop)
    done = call(*command, "--database", name)
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"expected one of the databases 'shop', 'billing', got {name!r}" in done.stderr
    assert rows(shop) == before


BY_ID = [["find"], ["retry"], ["reschedule", "--countdown", "1h"], ["forget", "--force"]]
STRANGE = {
    "a space": "a b",
    "a quote": "a'; DROP TABLE celery_outbox; --",
    "a wildcard": "a%",
    "another wildcard": "_",
    "an escape": "a\x1b[2Jb",
    "a right to left override": "a\u202eb",
    "markup": "[red]a[/red]",
    "a line": "a\nb",
    "as long as the column": "x" * 255,
    "a dash in front": "-a",
    "letters": "ä\N{SNOWMAN}\U0001f409",
}


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.parametrize("command", BY_ID, ids=" ".join)
def test_an_id_of_any_kind_stands_for_itself_alone(
    command: list[str], name: str, call: Call, shop: Database
) -> None:
    task_id = STRANGE[name]
    add(shop, make_message("ab"), make_message(task_id))
    change(shop, attempts=1, error="Refused")
    done = call(*command, "--", task_id)
    assert (done.exit_code, done.stderr) == (0, "")
    assert not [each for each in done.stdout if not each.isprintable() and each != "\n"]
    other = rows(shop)[0]
    assert (other.task_id, other.error, other.deliver_at) == ("ab", "Refused", None)


@pytest.mark.parametrize("name", [*STRANGE, "endless"])
@pytest.mark.parametrize("command", BY_ID, ids=" ".join)
def test_an_id_that_is_not_there_is_said_so_on_one_line(
    command: list[str], name: str, call: Call, shop: Database
) -> None:
    add(shop, make_message("ab"))
    done = call(*command, "--", STRANGE.get(name, "x" * 100_000))
    assert done.exit_code == 1
    assert len(done.output.splitlines()) == 1
    assert "not here" in done.output or "there is no message with this id" in done.output
    assert [row.task_id for row in rows(shop)] == ["ab"]


@pytest.mark.parametrize("task_id", ["", "\udcff"], ids=["empty", "no UTF-8"])
@pytest.mark.parametrize("command", BY_ID, ids=" ".join)
def test_an_id_that_nothing_can_have_is_wrong_usage_and_stops_the_others(
    command: list[str], task_id: str, call: Call, shop: Database
) -> None:
    add(shop, make_message("ab"))
    change(shop, attempts=1)
    before = rows(shop)
    done = call(*command, "ab", task_id)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "ID" in done.stderr
    assert rows(shop) == before


@pytest.mark.parametrize("option", ["--task", "--broker", "--queue"])
@pytest.mark.parametrize("value", ["", "\udcff"], ids=["empty", "no UTF-8"])
def test_a_choice_that_nothing_can_be_is_wrong_usage(option: str, value: str, call: Call) -> None:
    for command in (["list"], ["retry", "all"], ["forget", "all", "--force"]):
        done = call(*command, option, value)
        assert done.exit_code == 2
        assert option in done.stderr


@pytest.mark.parametrize("text", ["shop%", "%", "_hop.add", "shop.\\", "'", "shop.add'--", "é"])
def test_a_choice_has_no_wildcard_but_a_star_at_its_end(
    text: str, call: Call, shop: Database, database_url: str, boxes: Callable[..., Outbox]
) -> None:
    box = boxes({"shop": database_url})
    box.install()
    database = box.databases["shop"]
    add(database, make_message("a"))
    for option in ("--task", "--broker", "--queue"):
        assert json.loads(caller(box)("list", "--json", option, text).stdout) == []
    assert json.loads(caller(box)("list", "--json", "--task", f"{text}*").stdout) == []
    assert caller(box)("forget", "all", "--task", f"{text}*", "--force").exit_code == 0
    assert len(rows(database)) == 1


NUMBERS = [
    ["list", "--limit"],
    ["monitor", "--max"],
    ["schema", "check", "--concurrency"],
    ["relay", "--batch"],
    ["relay", "--concurrency"],
]
DURATIONS = [
    ["prune", "--older-than"],
    ["monitor", "--age"],
    ["monitor", "--watch", "--interval"],
    ["relay", "--sleep"],
]
NO_NUMBERS = ["-1", "0", "", " ", "soon", "NaN", "inf", "1e400", "1,000", "0x10", "--", "9" * 5000]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda each: each[:10])
@pytest.mark.parametrize("option", [*NUMBERS, *DURATIONS], ids=" ".join)
def test_a_number_that_makes_no_sense_is_wrong_usage(option: list[str], value: str, call: Call) -> None:
    if option == ["monitor", "--max"] and value.startswith("9"):
        return  # more than there can ever be
    done = call(*option, value)
    assert (done.exit_code, done.stdout) == (2, "")
    assert option[-1] in done.stderr


@pytest.mark.parametrize("number", ["1000000", "9223372036854775807", "9" * 30])
def test_a_number_as_large_as_one_likes_is_no_trouble_for_a_database(
    number: str, database_url: str, boxes: Callable[..., Outbox]
) -> None:
    box = boxes({"shop": database_url})
    box.install()
    add(box.databases["shop"], make_message("a"))
    call = caller(box)
    assert call("monitor", "--max", number).exit_code == 0
    assert call("list", "--limit", number).exit_code == (0 if number == "1000000" else 2)


@pytest.mark.parametrize(
    "eta", ["", "soon", "2030-13-01", "10000-01-01", "2030-01-01T00:00+99:00", "7"]
)
def test_a_time_that_is_none_is_wrong_usage(eta: str, call: Call, shop: Database) -> None:
    add(shop, make_message("a"))
    before = rows(shop)
    done = call("reschedule", "a", "--eta", eta)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "eta" in done.stderr
    assert rows(shop) == before


def leaves(group: click.Group, *names: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, *names, name)
        else:
            yield (*names, name), command


LEAVES = dict(leaves(main))


@pytest.mark.parametrize("names", LEAVES, ids=" ".join)
def test_the_help_of_a_command_has_its_exit_codes_and_an_example(names: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, [*names, "--help"], terminal_width=80)
    assert done.exit_code == 0
    assert "xit code" in done.output
    assert f"celery-outbox -A shop {' '.join(names)}" in done.output
    assert max(map(len, done.output.splitlines())) <= 80
    options = [each for each in LEAVES[names].params if isinstance(each, click.Option)]
    assert all(option.help for option in options)


@pytest.mark.parametrize("app", ["no_such_module", "json", "tests", "json:none", ""])
@pytest.mark.parametrize("names", LEAVES, ids=" ".join)
def test_an_app_that_is_not_there_is_wrong_usage_of_every_command(
    names: tuple[str, ...], app: str
) -> None:
    given = {"prune": ["--older-than", "1s"], "reschedule": ["a", "--countdown", "1h"]}
    ids = ["a"] if names[0] in {"find", "retry", "forget"} else given.get(names[0], [])
    done = CliRunner().invoke(main, ["-A", app, *names, *ids])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "-A" in done.stderr


def test_a_module_that_cannot_be_imported_shows_where_it_fails(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import json\nraise RuntimeError('no settings')\n")
    done = run(outbox_command("list", app="broken"), cwd=tmp_path)
    assert done.returncode == 1
    assert "no settings" in done.stderr
    assert 'broken.py", line 2' in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["list", "--limit", "300"], ["list", "--json"], ["monitor"], ["find", "a"], ["schema", "sql"]],
    ids=" ".join,
)
def test_output_that_cannot_be_written_is_an_error_of_one_line(
    arguments: list[str], shop: Database
) -> None:
    add(shop, make_message("a"))
    command = outbox_command(*arguments, app=PROJECT)
    line = ["/bin/sh", "-c", '"$@" > /dev/full', "sh", *command]
    done = run(line, environment(default=shop.url.render_as_string()))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "Error: the output cannot be written: No space left on device.\n"


@pytest.mark.parametrize("closing", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_descriptors_are_no_trouble(closing: str, shop: Database) -> None:
    add(shop, make_message("a"))
    for arguments in (["monitor", "--json"], ["retry", "all"]):
        command = outbox_command(*arguments, app=PROJECT)
        done = run(
            ["/bin/sh", "-c", f'"$@" {closing}', "sh", *command],
            environment(default=shop.url.render_as_string()),
        )
        assert (done.returncode, done.stderr) == (0, "")
