"""``retry``: let messages be tried again that deliveries have failed for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import click

from ..admin import Outcome, retry, retry_all
from ..storage.database import Database
from .choosing import choose_databases, find_outbox, reports_errors
from .reporting import counting, each_database
from .tables import printable

__all__ = ["retry_"]


@click.command("retry")
@click.argument("ids", metavar="ID... | all", nargs=-1, required=True)
@click.option("--database", help="Only in this database.")
@click.pass_context
@reports_errors
def retry_(ctx: click.Context, ids: Sequence[str], database: str | None) -> None:
    """Make messages due now whose delivery has failed, or at their intended time if that is later.

    IDs are task ids. "all" stands for every message that a relay has tried and none has reserved.
    """
    if "all" in ids and len(ids) > 1:
        raise click.UsageError('Expected either ids or "all", got both.')
    databases = choose_databases(find_outbox(ctx), database)
    if "all" in ids:
        each_database(ctx, databases, _retry_all)
        return
    outcomes = retry(databases, ids)
    rows = Counter(outcome.task_id for outcome in outcomes.each)
    for outcome in outcomes.each:
        if rows[outcome.task_id] > 1:
            click.echo(
                f"{printable(outcome.task_id)}: {rows.pop(outcome.task_id)} messages have this id"
            )
        _say(outcome)
    for error in outcomes.errors:
        click.echo(f"Error: {error}", err=True)
    if outcomes.errors or any(outcome.refusal for outcome in outcomes.each):
        ctx.exit(1)


def _retry_all(database: Database) -> str:
    with counting(f"{database.name}: retrying") as progress:
        count = retry_all(database, progress=progress)
    return f"{count:,} message{'' if count == 1 else 's'} will be tried again"


def _say(outcome: Outcome) -> None:
    about = printable(outcome.task_id)
    place = "" if outcome.database is None else f" ({outcome.database}, row {outcome.row_id})"
    if outcome.refusal is not None:
        click.echo(f"Error: {about}: not retried, {outcome.refusal}{place}", err=True)
        return
    message, when = outcome.message, "now"
    if message is not None and message.next_attempt_at is not None and message.state != "ready":
        when = f"at its intended time, {message.next_attempt_at:%Y-%m-%d %H:%M:%S} UTC"
    click.echo(f"{about}: due {when}{place}")
