"""The commands on terminals of all kinds: narrow, without colours, without UTF-8, and none at all."""

import re

import pytest

from celery_outbox.storage.database import Database
from tests.desk.terminal import call_on_terminal
from tests.relay.commands import outbox_command, run
from tests.schema.test_check import PROJECT, environment
from tests.storage.rows import add, change, make_message

TASK_ID = "8f14e45f-ceea-467f-9a0b-1c2d3e4f5a6b"
SCREENS = [["list"], ["find", TASK_ID], ["monitor"], ["schema", "check"]]
COLOUR = re.compile(r"\x1b\[[0-9;]*(?:3[0-7]|9[0-7])[0-9;]*m")


@pytest.fixture
def url(shop: Database) -> str:
    """A database with a message that was tried."""
    add(shop, make_message(TASK_ID, queue="büro"))
    change(shop, attempts=1, error="Refused: “voll” " * 3)
    return shop.url.render_as_string()


@pytest.mark.parametrize("arguments", SCREENS, ids=" ".join)
def test_nothing_is_wider_than_the_terminal(arguments: list[str], url: str) -> None:
    for columns in (30, 100):
        shown = call_on_terminal(*arguments, columns=columns, default=url)
        assert shown.exit_code == 0
        assert COLOUR.search(shown.sent)
        # The URL of the database stands for itself, in a line that a terminal may break.
        assert max(map(len, shown.text.splitlines())) <= columns


@pytest.mark.parametrize("arguments", SCREENS, ids=" ".join)
@pytest.mark.parametrize("told", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_colours_are_left_out_where_none_are_wanted(
    told: dict[str, str], arguments: list[str], url: str
) -> None:
    shown = call_on_terminal(*arguments, told=told, default=url)
    assert shown.exit_code == 0
    assert not COLOUR.search(shown.sent)
    if "TERM" in told:
        assert "\x1b" not in shown.sent


ASCII = {
    "the locale C as of old": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "nothing but ASCII": {"PYTHONIOENCODING": "ascii"},
}


@pytest.mark.parametrize("name", ASCII)
def test_a_locale_without_umlauts_hides_no_message(name: str, url: str) -> None:
    for arguments in (["list"], ["monitor"]):
        command = outbox_command(*arguments, app=PROJECT)
        done = run(command, {**environment(default=url), **ASCII[name]})
        assert (done.returncode, done.stderr) == (0, "")
        assert "Refused: " in done.stdout
    shown = call_on_terminal("list", told=ASCII[name], default=url)
    assert shown.exit_code == 0
    assert TASK_ID in shown.text
