"""What commands have in common: each database is tried, what they do is counted, and told by id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..admin import Outcome, Outcomes, Reach, StoredMessage
from ..errors import OutboxError
from ..storage.database import Database
from .tables import printable

__all__ = ["as_json", "counting", "each_database", "report_errors", "report_outcomes"]


def each_database(
    ctx: click.Context, databases: Sequence[Database], work: Callable[[Database], str]
) -> None:
    """Do the work for every database and print what it says; exit code 1 when one could not be used."""
    failed = False
    reach = Reach(databases)
    for database in databases:
        try:
            reach.require(database)
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


def report_outcomes(
    ctx: click.Context, outcomes: Outcomes, undone: str, done: Callable[[Outcome], str]
) -> None:
    """Tell what became of each id; exit code 1 unless all went well.

    ``undone`` is the verb for what was not done; ``done`` says what was.
    """
    rows = Counter(outcome.task_id for outcome in outcomes.each)
    for outcome in outcomes.each:
        about = printable(outcome.task_id)
        if rows[outcome.task_id] > 1:
            click.echo(f"{about}: {rows.pop(outcome.task_id)} messages have this id")
        place = "" if outcome.row_id is None else f" ({outcome.database}, row {outcome.row_id})"
        if outcome.refusal is None:
            click.echo(f"{about}: {done(outcome)}{place}")
        else:
            click.echo(f"Error: {about}: not {undone}, {outcome.refusal}{place}", err=True)
    report_errors(outcomes.errors)
    if outcomes.has_failed:
        ctx.exit(1)


def report_errors(errors: Iterable[OutboxError]) -> None:
    """Tell why databases could not be used."""
    for error in errors:
        click.echo(f"Error: {error}", err=True)


def as_json(message: StoredMessage) -> dict[str, Any]:
    """What programs are shown of a message: times in Unix seconds, durations in seconds."""
    return {
        "database": message.database,
        "row_id": message.id,
        "task_id": message.task_id,
        "task_name": message.task_name,
        "broker": message.broker,
        "queue": message.queue,
        "state": message.state,
        "attempts": message.attempts,
        "max_attempts": message.max_attempts,
        "base_delay": _seconds(message.base_delay),
        "max_delay": _seconds(message.max_delay),
        "next_attempt_at": _unix(message.next_attempt_at),
        "deliver_at": _unix(message.deliver_at),
        "expires_at": _unix(message.expires_at),
        "reserved_until": _unix(message.reserved_until),
        "finished_at": _unix(message.finished_at),
        "created_at": _unix(message.created_at),
        "error": message.error,
    }


def _unix(instant: datetime | None) -> float | None:
    return None if instant is None else instant.timestamp()


def _seconds(duration: timedelta | None) -> float | None:
    return None if duration is None else duration.total_seconds()
