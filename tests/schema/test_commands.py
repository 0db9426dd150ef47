"""``schema install`` and ``schema migrate`` over several databases, as an operator sees them."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
from tests.processes import unused_port
from tests.relay.commands import ROOT, outbox_command, run
from tests.schema.old import make_old_table
from tests.schema.test_check import PROJECT, environment

MIGRATING = """
import sys
from celery_outbox.cli import main
from celery_outbox.storage import migrate
from tests.schema.old import MIGRATIONS

migrate.MIGRATIONS = MIGRATIONS
main(sys.argv[1:])
"""


def command(*arguments: str) -> list[str]:
    return outbox_command("schema", *arguments, app=PROJECT)


def migrate_command(*arguments: str) -> list[str]:
    """``schema migrate`` of a version that knows the way from version 0."""
    return [sys.executable, "-c", MIGRATING, "-A", PROJECT, "schema", "migrate", *arguments]


@pytest.fixture
def old_url(sqlite_url: str) -> str:
    """A database with a table of version 0."""
    engine = sa.create_engine(sqlite_url)
    make_old_table(engine, rows=25)
    engine.dispose()
    return sqlite_url


def test_every_database_is_installed_also_when_one_is_down(tmp_path: Path) -> None:
    down = f"postgresql+psycopg://shop:hunter2@127.0.0.1:{unused_port()}/shop"
    last = f"sqlite:///{tmp_path / 'last.db'}"
    done = run(command("install"), environment(down=down, last=last))
    assert done.returncode == 1
    assert "Error: database 'down': OperationalError" in done.stderr
    assert "Traceback" not in done.stderr
    assert "hunter2" not in done.stderr
    assert done.stdout == "last: the table celery_outbox is installed.\n"


def test_an_install_tells_what_it_has_repaired(sqlite_url: str) -> None:
    engine = sa.create_engine(sqlite_url)
    install(Database("default", engine, "celery_outbox"))
    with engine.begin() as connection:
        connection.execute(sa.text("DROP INDEX ix_celery_outbox_task_id"))
    engine.dispose()
    done = run(command("install"), environment(default=sqlite_url))
    assert done.stdout == (
        "default: the table celery_outbox is installed.\n  created the index ix_celery_outbox_task_id\n"
    )


@pytest.mark.parametrize("form", [["billing"], ["--database", "billing"]], ids=" ".join)
def test_one_database_is_installed_when_it_is_named(form: list[str], tmp_path: Path) -> None:
    shop, billing = (f"sqlite:///{tmp_path / name}.db" for name in ("shop", "billing"))
    done = run(command("install", *form), environment(default=shop, billing=billing))
    assert done.stdout == "billing: the table celery_outbox is installed.\n"
    assert not (tmp_path / "shop.db").exists()


def test_an_install_refuses_an_old_table_with_the_command_that_helps(old_url: str) -> None:
    done = run(command("install"), environment(default=old_url))
    assert done.returncode == 1
    assert "celery-outbox -A your_app schema migrate" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_migration_that_this_version_does_not_know_is_an_error(old_url: str) -> None:
    done = run(command("migrate"), environment(default=old_url))
    assert done.returncode == 1
    assert "found 0, which this celery-outbox does not know" in done.stderr


def test_a_migration_tells_its_steps_where_nobody_watches(old_url: str) -> None:
    done = run(migrate_command(), environment(default=old_url))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "default: migrated the table from version 0 to 1\n"
    assert done.stderr.splitlines() == [
        "add columns ...",
        "copy the queue ...",
        "drop a column ...",
    ]


def test_a_second_migration_says_that_nothing_was_changed(old_url: str) -> None:
    run(migrate_command(), environment(default=old_url))
    done = run(migrate_command(), environment(default=old_url))
    assert done.returncode == 0
    assert done.stdout == "default: the table is up to date, nothing was changed\n"


def test_a_migration_of_nothing_installs(sqlite_url: str) -> None:
    done = run(command("migrate"), environment(default=sqlite_url))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "default: installed the table\n"
    assert run(command("check"), environment(default=sqlite_url)).returncode == 0


def test_a_migration_is_refused_while_a_relay_runs_unless_it_is_forced(old_url: str) -> None:
    engine = sa.create_engine(old_url)
    database = Database("default", engine, "celery_outbox")
    database.run(
        lambda connection: database.state.see_relay(connection, "r", {"host": "web-1", "pid": 77})
    )
    engine.dispose()
    done = run(migrate_command(), environment(default=old_url))
    assert done.returncode == 1
    assert "expected no running relay, found 1: web-1, process 77" in done.stderr
    forced = run(migrate_command("--force"), environment(default=old_url))
    assert forced.returncode == 0, forced.stderr


def test_a_terminal_shows_a_progress_bar(old_url: str) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        migrate_command(),
        cwd=ROOT,
        env=environment(default=old_url) | {"TERM": "xterm", "COLUMNS": "80"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    said, _ = process.communicate(timeout=60)
    shown = read_all(ours)
    assert process.returncode == 0, shown
    assert said == "default: migrated the table from version 0 to 1\n"
    assert re.search(r"copy the queue.*100%", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown))


def read_all(terminal: int) -> str:
    """Read what was written to the other end of a pseudo-terminal, which is closed by now."""
    found = b""
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # Linux says so at the end
            chunk = b""
        if not chunk:
            os.close(terminal)
            return found.decode()
        found += chunk
