"""What the files of examples/deploy say, read without the programs that they are for."""

import configparser
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from celery_outbox.cli import main
from tests.pages import ROOT

DEPLOY = ROOT / "examples" / "deploy"
#: Where the examples have their virtual environment.
PROGRAM = "/opt/shop/venv/bin/celery-outbox"
#: The app that they name; no module of ours.
APP = "shop"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work where no module has the name of the app."""
    monkeypatch.chdir(tmp_path)


def assert_begins(arguments: Sequence[str]) -> None:
    """Let the real command read its command line: it goes on to look for the app, and finds none."""
    done = CliRunner().invoke(main, list(arguments))
    assert f"there is no module named '{APP}'" in done.output


def unit(name: str) -> configparser.ConfigParser:
    """A unit of systemd; a name that is given several times is not understood."""
    parser = configparser.ConfigParser(interpolation=None, delimiters="=", comment_prefixes="#")
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # as its documentation says
    parser.read_string((DEPLOY / "systemd" / name).read_text())
    return parser


def variables(text: str) -> dict[str, str]:
    """The variables of an environment file."""
    return dict(re.findall(r"^(\w+)=(.*)$", text, flags=re.MULTILINE))


def exec_start(name: str, environment: Mapping[str, str], *, instance: str = "") -> list[str]:
    """The command line of a unit, expanded as systemd does."""
    line = unit(name)["Service"]["ExecStart"]
    line = re.sub(r"%(.)", lambda found: {"%": "%", "i": instance}[found[1]], line)
    words: list[str] = []
    for word in shlex.split(line):
        words += environment[word[1:]].split() if word.startswith("$") else [word]
    return words


def seconds(text: str) -> int:
    """So many seconds, as systemd and Docker write them."""
    assert text.endswith("s")
    return int(text[:-1])
