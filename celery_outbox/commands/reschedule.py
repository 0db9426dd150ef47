"""``reschedule``: let messages that wait be delivered at another time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, tzinfo

import click

from ..admin import Outcome, Reach, place, reschedule
from ..capture.times import read_eta
from ..errors import OptionError
from .choosing import Duration, Name, choose_databases, find_outbox, reports_errors
from .reporting import report_outcomes
from .tables import utc

__all__ = ["reschedule_"]


@click.command("reschedule", short_help="Move messages to another time.")
@click.argument("ids", metavar="ID...", nargs=-1, required=True, type=Name())
@click.option(
    "--eta",
    metavar="TIME",
    help="The new time, as 2030-01-31T12:00:00+01:00; without an offset, UTC.",
)
@click.option(
    "--countdown",
    type=Duration(allows_zero=True),
    help="The new time from now on: 90s, 15m, 12h, 7d; 0 is now.",
)
@click.option("--database", metavar="NAME", help="Only in this database.")
@click.pass_context
@reports_errors
def reschedule_(
    ctx: click.Context,
    ids: Sequence[str],
    eta: str | None,
    countdown: timedelta | None,
    database: str | None,
) -> None:
    """Move messages that wait to another time, earlier or later.

    IDs are task ids. The task runs at the new time, whatever was asked for at its dispatch; until then
    the message stays in the outbox, where it can be forgotten or moved again. What a relay has reserved
    is never moved, nor what was delivered or has failed. An id that is in several databases needs
    --database.

    \b
    Examples:
      celery-outbox -A shop reschedule TASK_ID --countdown 2h
      celery-outbox -A shop reschedule TASK_ID --eta 2030-01-31T12:00+01:00

    Exit code 1 when anything that was asked for was not done.
    """
    box = find_outbox(ctx)
    databases = choose_databases(box, database)
    try:
        when = _when(_read(eta, box.app.timezone), countdown)
        plan = place(databases, ids, require=Reach(databases).require)
        outcomes = reschedule(plan, when)
    except OptionError as error:
        raise click.UsageError(str(error)) from error
    report_outcomes(ctx, outcomes, "rescheduled", _moved)


def _read(eta: str | None, timezone: tzinfo) -> datetime | None:
    try:
        return read_eta(eta, timezone)
    except OptionError as error:
        raise click.BadParameter(
            f"expected a time such as 2030-01-31T12:00:00+01:00, got {eta!r}. For a time from now on "
            "there is --countdown.",
            param_hint="--eta",
        ) from error


def _when(eta: datetime | None, countdown: timedelta | None) -> datetime | timedelta:
    when = eta if countdown is None else countdown
    if when is None or None not in {eta, countdown}:
        raise click.UsageError("Expected either --eta or --countdown.")
    return when


def _moved(outcome: Outcome) -> str:
    message = outcome.message
    if message is None or message.next_attempt_at is None or message.state == "ready":
        return "due now"
    return f"due at {utc(message.next_attempt_at)} UTC"
