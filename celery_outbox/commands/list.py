"""``list``: the stored messages, for people or as JSON; never what they carry."""

from __future__ import annotations

import json

import click

from ..admin import STATES, Filter, Reach, StoredMessage, list_messages
from ..errors import OutboxError
from .choosing import choose_databases, chooses_messages, find_outbox, for_databases, reports_errors
from .reporting import as_json
from .tables import show_messages

__all__ = ["list_"]


@click.command("list", short_help="Show the stored messages.")
@click.option(
    "--limit",
    type=click.IntRange(1, 1_000_000),
    default=50,
    show_default=True,
    help="Messages of each database at most.",
)
@chooses_messages(STATES)
@click.option("--json", "is_json", is_flag=True, help="As JSON, with whole errors.")
@for_databases
@click.pass_context
@reports_errors
def list_(
    ctx: click.Context, database: str | None, limit: int, chosen: Filter, *, is_json: bool
) -> None:
    """Show the stored messages, those whose time comes first in front.

    The time shown is: of a ready message, since when it is due; of a delayed or retrying one, its next
    attempt; of a reserved one, the end of its lease; of the others, when it ended. Neither arguments
    nor tokens are shown.

    \b
    Examples:
      celery-outbox -A shop list --state failed --state retrying
      celery-outbox -A shop list billing --task "shop.billing.*" --json

    Exit code 1 when a database could not be read; the others are shown all the same.
    """
    found: list[StoredMessage] = []
    is_read = failed = False
    databases = choose_databases(find_outbox(ctx), database)
    reach = Reach(databases)
    for each in databases:
        try:
            reach.require(each)
            listing = list_messages(each, limit=limit, chosen=chosen)
        except OutboxError as error:
            click.echo(f"Error: {error}", err=True)
            failed = True
            continue
        is_read = True
        found += listing.messages
        if listing.has_more and not is_json:
            click.echo(f"{each.name}: there are more than {limit}; see --limit and --state.", err=True)
    if is_json:
        click.echo(json.dumps([as_json(each) for each in found], indent=2))
    elif found:
        show_messages(found, tells_database=len(databases) > 1)
    elif is_read:
        click.echo("There are no messages.", err=True)
    if failed:
        ctx.exit(1)
