"""``schema``: create, check and migrate the tables, or print what creates them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from ..admin import Reach
from ..errors import OutboxError
from ..storage.database import Database
from ..storage.ddl import create_statements
from ..storage.examination import Examination, examine
from ..storage.install import install
from ..storage.migrate import migrate
from .choosing import choose_databases, find_outbox, for_databases, reports_errors
from .reporting import each_database

__all__ = ["schema"]

_DIALECTS = ["postgresql", "mysql", "mariadb", "sqlite"]


@click.group()
def schema() -> None:
    """Create and look after the tables."""


@schema.command("install")
@for_databases
@click.pass_context
@reports_errors
def schema_install(ctx: click.Context, database: str | None) -> None:
    """Create the tables and indexes that are missing, rebuild indexes that differ.

    It may be run again, and by several at once: what is there stays as it is.

    \b
    Example:
      celery-outbox -A shop schema install

    Exit code 1 when a database could not be used; the others are worked on.
    """
    each_database(ctx, choose_databases(find_outbox(ctx), database), _install)


@schema.command("migrate")
@click.option("--force", is_flag=True, help="Also while relays run.")
@for_databases
@click.pass_context
@reports_errors
def schema_migrate(ctx: click.Context, database: str | None, force: bool) -> None:
    """Bring older tables up to date. Stop the relays first; make a backup.

    Missing tables are created. It may be interrupted, and run again.

    \b
    Example:
      celery-outbox -A shop schema migrate billing

    Exit code 1 when a database could not be used, or relays run; the others are worked on.
    """
    databases = choose_databases(find_outbox(ctx), database)
    each_database(ctx, databases, lambda each: _migrate(each, force=force))


@schema.command("check")
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Threads that a relay shall have, to compare the pool with.",
)
@for_databases
@click.pass_context
@reports_errors
def schema_check(ctx: click.Context, database: str | None, concurrency: int) -> None:
    """Look at the tables and their servers: what is there, what could be better, what is WRONG.

    Nothing is changed. What could be better is a remark, and no fault.

    \b
    Example:
      celery-outbox -A shop schema check --concurrency 4

    Exit code 1 when anything is wrong, or a database could not be reached.
    """
    console = Console(highlight=False)
    is_well = True
    databases = choose_databases(find_outbox(ctx), database)
    reach = Reach(databases)
    for each in databases:
        try:
            reach.require(each)
        except OutboxError as error:
            found = Examination(faults=[str(error)])
        else:
            found = examine(each, concurrency=concurrency)
        _show(console, each, found)
        is_well = is_well and not found.faults
    if not is_well:
        ctx.exit(1)


@schema.command("sql")
@click.option("--dialect", type=click.Choice(_DIALECTS), help="Instead of the database's own.")
@for_databases
@click.pass_context
@reports_errors
def schema_sql(ctx: click.Context, database: str | None, dialect: str | None) -> None:
    """Print the statements that create the tables; no database is contacted.

    Of one database, the first if none is named.

    \b
    Example:
      celery-outbox -A shop schema sql --dialect postgresql > outbox.sql

    Exit code 0, unless there is no such database.
    """
    box = find_outbox(ctx)
    # The first database is the default, here too.
    backend = dialect or choose_databases(box, database)[0].url.get_backend_name()
    for statement in create_statements(box.settings.table, backend):
        click.echo(f"{statement};\n")


def _install(database: Database) -> str:
    repaired = [f"  {line}" for line in install(database)]
    end = f"the table {database.tables.messages.fullname} is installed."
    return "\n".join([end, *repaired])


def _migrate(database: Database, *, force: bool) -> str:
    with _progress() as progress:
        done = migrate(database, force=force, progress=progress)
    return "; ".join(done) if done else "the table is up to date, nothing was changed"


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each step; where nobody watches, a line for each."""
    console = Console(stderr=True, highlight=False)
    with Progress(console=console, disable=not console.is_terminal) as bars:
        tasks = {}

        def report(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total)
                if not console.is_terminal:
                    click.echo(f"{step} ...", err=True)
            bars.update(tasks[step], completed=done, total=total)

        yield report


def _show(console: Console, database: Database, found: Examination) -> None:
    url = database.url.render_as_string(hide_password=True)
    console.print(Text.assemble((database.name, "bold"), f"  {url}"), soft_wrap=not console.is_terminal)
    ends = [Text(f"remark: {remark}", "yellow") for remark in found.remarks]
    ends += [Text(f"WRONG: {fault}", "red") for fault in found.faults]
    if not found.faults:
        ends.append(Text("nothing is wrong", "green"))
    if console.is_terminal:
        facts = Table.grid(padding=(0, 2, 0, 0))
        for fact in found.facts:
            facts.add_row(*map(Text, fact))
        paragraphs: list[RenderableType] = [facts, *ends]
        console.print(*(Padding(each, (0, 0, 0, 2)) for each in paragraphs), sep="")
        return
    # A file or a pipe gets whole lines, however long.
    for line in [*(f"{name:<18}  {value}" for name, value in found.facts), *ends]:
        console.print("  ", line, sep="", soft_wrap=True, markup=False)
