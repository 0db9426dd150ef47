"""``list``: the stored messages, for people or as JSON; never what they carry."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import click

from ..admin import STATES, StoredMessage, list_messages
from ..errors import OutboxError
from .choosing import choose_databases, find_outbox, for_databases, reports_errors
from .tables import show_messages

__all__ = ["list_"]


@click.command("list")
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=50,
    show_default=True,
    help="Messages of each database at most.",
)
@click.option(
    "--state",
    "states",
    type=click.Choice(STATES),
    multiple=True,
    help="Only these; may be given several times.",
)
@click.option("--json", "as_json", is_flag=True, help="As JSON, with whole errors.")
@for_databases
@click.pass_context
@reports_errors
def list_(
    ctx: click.Context, database: str | None, limit: int, states: Sequence[str], *, as_json: bool
) -> None:
    """Show the stored messages, those whose time comes first in front."""
    found: dict[str, Sequence[StoredMessage]] = {}
    failed = False
    for each in choose_databases(find_outbox(ctx), database):
        try:
            listing = list_messages(each, limit=limit, states=states or STATES)
        except OutboxError as error:
            click.echo(f"Error: {error}", err=True)
            failed = True
            continue
        found[each.name] = listing.messages
        if listing.has_more and not as_json:
            click.echo(f"{each.name}: there are more than {limit}; see --limit and --state.", err=True)
    if as_json:
        click.echo(json.dumps([_json(name, each) for name in found for each in found[name]], indent=2))
    elif any(found.values()):
        show_messages(found)
    elif found:
        click.echo("There are no messages.", err=True)
    if failed:
        ctx.exit(1)


def _json(database: str, message: StoredMessage) -> dict[str, Any]:
    return {
        "database": database,
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
