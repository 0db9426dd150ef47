"""What commands over several databases have in common: each is tried, and what they do is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..errors import OutboxError
from ..storage.database import Database

__all__ = ["counting", "each_database"]


def each_database(
    ctx: click.Context, databases: Sequence[Database], work: Callable[[Database], str]
) -> None:
    """Do the work for every database and print what it says; exit code 1 when one could not be used."""
    failed = False
    for database in databases:
        try:
            click.echo(f"{database.name}: {work(database)}")
        except OutboxError as error:
            click.echo(f"Error: {error}", err=True)
            failed = True
    if failed:
        ctx.exit(1)


@contextmanager
def counting(what: str) -> Iterator[Callable[[int], object]]:
    """Show how many rows have been worked on, and for how long; nothing where nobody watches."""
    console = Console(stderr=True, highlight=False)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.completed:,}")
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=None)
        yield lambda count: progress.advance(task, count)
