"""``forget``: delete messages before their delivery, after asking."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

import click

from ..admin import (
    EVERYTHING,
    FORGETTABLE_STATES,
    Doomed,
    Filter,
    Plan,
    Reach,
    chord_warnings,
    doomed,
    forget,
    forget_all,
    place,
    unforgettable,
)
from ..errors import OutboxError
from ..storage.database import Database
from .choosing import Name, choose_databases, chooses_messages, find_outbox, reports_errors, wants_all
from .reporting import counting, report_outcomes
from .tables import printable, show_messages

__all__ = ["forget_"]


@click.command("forget", short_help="Delete messages before their delivery.")
@click.argument("ids", metavar="ID... | all", nargs=-1, required=True, type=Name())
@chooses_messages(FORGETTABLE_STATES)
@click.option("--database", metavar="NAME", help="Only in this database.")
@click.option("--force", is_flag=True, help="Do not ask.")
@click.pass_context
@reports_errors
def forget_(
    ctx: click.Context, ids: Sequence[str], chosen: Filter, database: str | None, *, force: bool
) -> None:
    """Delete messages that shall not be delivered any more; their tasks never run.

    IDs are task ids. "all" needs at least one of --state, --task, --broker and --queue, and is counted
    before it asks. It asks everywhere; --force is for where nobody can answer. What a relay has
    reserved is never deleted, nor what was delivered: see prune. An id that is in several databases
    needs --database.

    \b
    Examples:
      celery-outbox -A shop forget 8f14e45f-ceea-467f-9a0b-1c2d3e4f5a6b
      celery-outbox -A shop forget all --state failed --queue reports

    Exit code 1 when anything that was asked for was not done.
    """
    is_all = wants_all(ids, chosen)
    if is_all and chosen == EVERYTHING:
        raise click.UsageError(
            'Expected "all" with at least one of --state, --task, --broker and --queue.'
        )
    databases = choose_databases(find_outbox(ctx), database)
    if not (force or _can_ask()):
        raise click.ClickException("expected an answer, found no terminal to ask at. Add --force.")
    if is_all:
        _forget_all(ctx, databases, chosen, force=force)
        return
    plan = place(databases, ids, require=Reach(databases).require)
    if force:
        _warn(plan)
    else:
        _agree_on(ctx, plan, tells_database=len(databases) > 1)
    report_outcomes(ctx, forget(plan), "forgotten", lambda _: "forgotten")


def _can_ask() -> bool:
    # Where its descriptor is closed, Python has none.
    stdin: TextIO | None = sys.stdin
    return stdin is not None and stdin.isatty()


def _agree_on(ctx: click.Context, plan: Plan, *, tells_database: bool) -> None:
    """Ask about those that can be forgotten, if there are any."""
    found = [
        message
        for placed in plan.each
        for message in placed.messages
        if message.state in FORGETTABLE_STATES
    ]
    if found:
        show_messages(found, tells_database=tells_database)
        _warn(plan)
        if not _agree(len(found)):
            report_outcomes(ctx, unforgettable(plan), "forgotten", lambda _: "")
            ctx.exit(1)


def _warn(plan: Plan) -> None:
    for message, warning in chord_warnings(plan):
        about = f"{printable(message.task_id)} ({message.database}, row {message.id})"
        click.echo(f"Warning: {about}: {warning}", err=True)


def _agree(count: int) -> bool:
    """Ask; whether the answer is yes."""
    which = "this message" if count == 1 else f"these {count:,} messages"
    agreed = click.confirm(f"Forget {which}? What is forgotten is never delivered.", err=True)
    if not agreed:
        click.echo("Nothing was forgotten.", err=True)
    return agreed


def _forget_all(
    ctx: click.Context, databases: Sequence[Database], chosen: Filter, *, force: bool
) -> None:
    failed = False
    found: list[tuple[Database, Doomed]] = []
    reach = Reach(databases)
    for database in databases:
        try:
            reach.require(database)
            with counting(f"{database.name}: counting") as progress:
                found.append((database, doomed(database, chosen, progress=progress)))
        except OutboxError as error:
            click.echo(f"Error: {error}", err=True)
            failed = True
    for database, messages in found:
        if messages.bound:
            click.echo(
                f"Warning: {database.name}: {messages.bound:,} of them are parts of chords or groups; "
                "a chord that lacks one can no longer finish",
                err=True,
            )
    if any(messages.ids for _, messages in found) and not force:
        for database, messages in found:
            click.echo(f"{database.name}: {_messages(len(messages.ids))}", err=True)
        if not _agree(sum(len(messages.ids) for _, messages in found)):
            ctx.exit(1)
    for database, messages in found:
        failed = not _delete(database, messages) or failed
    if failed:
        ctx.exit(1)


def _delete(database: Database, messages: Doomed) -> bool:
    """Delete what was counted and say what became of it; whether that was all of it."""
    done = 0

    def note(count: int) -> None:
        nonlocal done
        done += count
        progress(count)

    try:
        with counting(f"{database.name}: forgetting") as progress:
            forget_all(database, messages, progress=note)
    except (OutboxError, KeyboardInterrupt) as error:
        click.echo(f"{database.name}: forgot {_messages(done)}, then it ended early")
        if isinstance(error, KeyboardInterrupt):
            raise
        click.echo(f"Error: {error}", err=True)
        return False
    click.echo(f"{database.name}: forgot {_messages(done)}")
    if left := len(messages.ids) - done:
        click.echo(
            f"Error: {database.name}: {_messages(left)} not forgotten, because a relay was faster",
            err=True,
        )
    return not left


def _messages(count: int) -> str:
    return f"{count:,} message{'' if count == 1 else 's'}"
