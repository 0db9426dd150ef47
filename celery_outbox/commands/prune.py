"""``prune``: delete kept messages that are old enough."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import click

from ..admin import prune
from ..errors import OutboxError
from ..storage.database import Database
from .choosing import Duration, choose_databases, find_outbox, for_databases, reports_errors
from .reporting import counting, each_database

__all__ = ["prune_"]


@click.command("prune", short_help="Delete kept messages.")
@click.option(
    "--older-than",
    type=Duration(),
    help="Delete what has been delivered, or failed, for longer: 90s, 15m, 12h, 7d. Required.",
)
@click.option(
    "--state",
    "states",
    type=click.Choice(["delivered", "failed"]),
    multiple=True,
    default=["delivered"],
    show_default=True,
    help="Which ones; may be given twice.",
)
@for_databases
@click.pass_context
@reports_errors
def prune_(
    ctx: click.Context, database: str | None, older_than: timedelta | None, states: Sequence[str]
) -> None:
    """Delete kept messages that have been delivered for long.

    Delivered messages are kept where outbox_keep is on; failed ones always, and they go only when they
    are named. It goes in small steps, and may be interrupted.

    \b
    Examples:
      celery-outbox -A shop prune --older-than 7d
      celery-outbox -A shop prune billing --older-than 30d --state failed

    Exit code 1 when a database could not be used; the others are worked on.
    """
    if older_than is None:
        raise click.UsageError("Expected --older-than with a duration, such as 90s, 15m, 12h or 7d.")
    each_database(
        ctx,
        choose_databases(find_outbox(ctx), database),
        partial(_prune, older_than=older_than, states=list(dict.fromkeys(states))),
    )


def _prune(database: Database, *, older_than: timedelta, states: Sequence[str]) -> str:
    counts = dict.fromkeys(states, 0)
    try:
        for state in states:
            with counting(f"{database.name}: deleting {state} messages") as progress:

                def note(count: int, state: str = state) -> None:
                    counts[state] += count
                    progress(count)

                prune(database, state=state, older_than=older_than, progress=note)
    except (OutboxError, KeyboardInterrupt):
        if any(counts.values()):
            click.echo(f"{database.name}: {_deleted(counts)}, then it ended early")
        raise
    return _deleted(counts)


def _deleted(counts: dict[str, int]) -> str:
    parts = [f"{n:,} {state} message{'' if n == 1 else 's'}" for state, n in counts.items()]
    return f"deleted {' and '.join(parts)}"
