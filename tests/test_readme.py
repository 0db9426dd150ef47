"""What README.md and docs/ say is so: their Python runs, their tables name what is there.

The examples run against SQLite files in place of PostgreSQL and Redis.
"""

import ast
import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
import sqlalchemy as sa

from celery_outbox.cli import outbox as commands
from celery_outbox.config import Settings, read_settings
from tests.pages import PAGES, README, ROOT, blocks

# Kombu's database transport, on SQLAlchemy 2.1.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


def run(code: list[str], names: dict[str, Any]) -> None:
    for block in code:
        exec(compile(block, "<documentation>", "exec"), names)


def rows(database: Path, query: str) -> list[tuple[Any, ...]]:
    engine = sa.create_engine(f"sqlite:///{database}", poolclass=sa.NullPool)
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(sa.text(query))]


def stored(database: Path) -> list[str]:
    names = rows(database, "SELECT task_name FROM celery_outbox ORDER BY id")
    return [name.removeprefix("shop.") for (name,) in names]


def at_the_broker(directory: Path) -> int:
    return len(rows(directory / "broker.db", "SELECT id FROM kombu_message"))


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The names that the README's application defines, its tables made."""
    names: dict[str, Any] = {"__name__": "shop"}
    run(blocks(README, tmp_path)[:2], names)
    yield names
    names["engine"].dispose()
    names["app"].close()


def post(names: Mapping[str, Any], path: str) -> dict[str, str]:
    async def request() -> dict[str, str]:
        transport = httpx.ASGITransport(app=names["web"])
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            response = await client.post(path, params={"item": "tea"})
        if "async_engine" in names:
            await names["async_engine"].dispose()
        answer: dict[str, str] = response.raise_for_status().json()
        return answer

    return asyncio.run(request())


def test_the_readmes_examples_store_what_they_say(shop: dict[str, Any], tmp_path: Path) -> None:
    database = tmp_path / "shop.db"
    run(blocks(README, tmp_path)[2:], shop)
    charged = ["charge", "warehouse.pack", "send_receipt", "charge"]
    assert stored(database) == [*charged, "send_receipt", "send_receipt"]
    assert at_the_broker(tmp_path) == 1  # the one with via_outbox=False


def test_the_readmes_functions_store_an_order_with_its_task(
    shop: dict[str, Any], tmp_path: Path
) -> None:
    run([block for block in blocks(README, tmp_path)[2:] if "\nwith " not in block], shop)

    async def place_order() -> None:
        await shop["place_order_async"]("tea")
        await shop["async_engine"].dispose()

    ids = [shop["place_order"]("tea")]
    asyncio.run(place_order())
    ids.append(post(shop, "/orders")["task"])
    database = tmp_path / "shop.db"
    assert stored(database) == ["send_receipt"] * 3
    assert rows(database, "SELECT count(*) FROM orders") == [(3,)]
    (first, _, last) = rows(database, "SELECT task_id FROM celery_outbox ORDER BY id")
    assert [*first, *last] == ids


def test_the_readmes_application_has_at_most_thirty_lines(tmp_path: Path) -> None:
    assert len(blocks(README, tmp_path)[0].splitlines()) <= 30


@pytest.mark.parametrize("command", ["celery-outbox -A shop", "celery -A shop outbox"])
def test_the_readmes_application_is_relayed_by_its_command(command: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(blocks(README, tmp_path)[0])
    order = "Base.metadata.create_all(engine); place_order('tea')"
    program, *arguments = command.split()
    for each in (
        [str(Path(sys.executable).with_name(program)), *arguments, "schema", "install"],
        [sys.executable, "-c", f"from shop import *; {order}"],
        [str(Path(sys.executable).with_name(program)), *arguments, "relay", "--stop-when-empty"],
    ):
        subprocess.run(each, cwd=tmp_path, timeout=30, check=True)
    assert stored(tmp_path / "shop.db") == []
    assert at_the_broker(tmp_path) == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run(page: Path, shop: dict[str, Any], tmp_path: Path) -> None:
    run(blocks(page, tmp_path), shop)


def test_no_python_of_a_page_goes_without_being_run() -> None:
    # Those of testing.md are files of a project of their own: tests/testing/test_page.py runs them.
    found = [
        page.name for page in [README, *PAGES] if re.search(r"^```py$", page.read_text(), re.MULTILINE)
    ]
    assert found == ["testing.md"]


def test_the_pages_examples_of_dispatching_store_what_they_say(
    shop: dict[str, Any], tmp_path: Path
) -> None:
    run(blocks(ROOT / "docs" / "dispatching.md", tmp_path), shop)
    assert stored(tmp_path / "shop.db") == [
        "charge",
        "charge",
        *["resize"] * 4,
        "charge",
        "send_receipt",
    ]
    assert at_the_broker(tmp_path) == 1  # with via_outbox=False


def test_the_pages_examples_of_transactions_store_what_they_say(
    shop: dict[str, Any], tmp_path: Path
) -> None:
    run(blocks(ROOT / "docs" / "transactions.md", tmp_path), shop)
    bodies = rows(tmp_path / "shop.db", "SELECT body FROM celery_outbox ORDER BY id")
    assert [body[:5] for (body,) in bodies] == [b"[[1],", b"[[1],"]


def test_the_pages_examples_of_several_databases_store_where_they_say(
    shop: dict[str, Any], tmp_path: Path
) -> None:
    run(blocks(ROOT / "docs" / "databases.md", tmp_path), shop)
    assert stored(tmp_path / "billing.db") == ["billing.invoice", "billing.remind"]
    assert stored(tmp_path / "shop.db") == []
    assert shop["late_outbox"].settings.require_transaction is True


@pytest.mark.parametrize("path", ["/orders", "/async-orders"])
def test_the_pages_endpoints_store_an_order_with_its_task(
    path: str, shop: dict[str, Any], tmp_path: Path
) -> None:
    run(blocks(ROOT / "docs" / "fastapi.md", tmp_path), shop)
    answer = post(shop, path)
    database = tmp_path / "shop.db"
    assert rows(database, "SELECT task_id FROM celery_outbox") == [(answer["task"],)]
    assert rows(database, "SELECT item FROM orders") == [("tea",)]


def test_the_table_of_settings_names_each_with_its_default() -> None:
    table = dict(re.findall(r"^\| `outbox_(\w+)` \| (.*?) \|", README.read_text(), flags=re.MULTILINE))
    assert table.keys() == set(Settings.__dataclass_fields__)
    given = {"databases": {"default": "sqlite:///shop.db"}, "name": "shop"}
    said = {
        name: ast.literal_eval(text.strip("`"))
        for name, text in table.items()
        if name not in {"databases", "name"}
    }
    nothing: dict[str, object] = {}
    assert read_settings(given | said, nothing.get, None) == read_settings(given, nothing.get, None)


def test_the_table_of_commands_names_each_with_its_options() -> None:
    text = README.read_text().partition("## Commands")[2].partition("## Read on")[0]
    said = set(re.findall(r"^\| `([a-z ]+?)[ `]*[\[`|]", text, flags=re.MULTILINE))
    there = dict(walk(commands))
    assert said == set(there)
    options = {
        option
        for command in there.values()
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--")
    }
    assert set(re.findall(r"--[a-z][a-z-]+", text)) == options


def walk(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from walk(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        text = (page.parent / path).read_text()
        headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
        assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}
