"""``retry``: let messages be tried again that deliveries have failed for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import click

from ..admin import Filter, Outcome, Reach, place, retry, retry_all
from ..storage.database import Database
from .choosing import Name, choose_databases, chooses_messages, find_outbox, reports_errors, wants_all
from .reporting import counting, each_database, report_outcomes
from .tables import utc

__all__ = ["retry_"]


@click.command("retry", short_help="Make messages that were tried due now.")
@click.argument("ids", metavar="ID... | all", nargs=-1, required=True, type=Name())
@chooses_messages(["ready", "retrying", "failed"])
@click.option("--database", metavar="NAME", help="Only in this database.")
@click.pass_context
@reports_errors
def retry_(ctx: click.Context, ids: Sequence[str], chosen: Filter, database: str | None) -> None:
    """Make messages due now whose delivery has failed, or at their intended time if that is later.

    IDs are task ids. "all" stands for every message that a relay has tried and none has reserved, of
    those that are chosen. The attempts stay, the errors go. An id that is in several databases needs
    --database.

    \b
    Examples:
      celery-outbox -A shop retry 8f14e45f-ceea-467f-9a0b-1c2d3e4f5a6b
      celery-outbox -A shop retry all --state failed --task "shop.billing.*"

    Exit code 1 when anything that was asked for was not done.
    """
    is_all = wants_all(ids, chosen)
    databases = choose_databases(find_outbox(ctx), database)
    if is_all:
        each_database(ctx, databases, partial(_retry_all, chosen=chosen))
    else:
        plan = place(databases, ids, require=Reach(databases).require)
        report_outcomes(ctx, retry(plan), "retried", _due)


def _retry_all(database: Database, chosen: Filter) -> str:
    with counting(f"{database.name}: retrying") as progress:
        count = retry_all(database, chosen, progress=progress)
    return f"{count:,} message{'' if count == 1 else 's'} will be tried again"


def _due(outcome: Outcome) -> str:
    message = outcome.message
    if message is None or message.next_attempt_at is None or message.state == "ready":
        return "due now"
    return f"due at its intended time, {utc(message.next_attempt_at)} UTC"
