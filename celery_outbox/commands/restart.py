"""``restart``: let every running relay of this app end, for its supervisor to start it again."""

from __future__ import annotations

from functools import partial

import click
from sqlalchemy.engine import Connection

from ..storage.database import Database
from .choosing import choose_databases, find_outbox, reports_errors
from .reporting import each_database

__all__ = ["restart"]


@click.command(short_help="Let the relays be started again.")
@click.pass_context
@reports_errors
def restart(ctx: click.Context) -> None:
    """Let every running relay of this app finish its batches and end with exit code 0.

    Their supervisors start them again. Relays of other apps in the same tables go on.

    \b
    Example, after a deployment:
      celery-outbox -A shop restart

    Exit code 1 when a database could not be used; relays of the others are told.
    """
    box = find_outbox(ctx)
    each_database(ctx, choose_databases(box, None), partial(_restart, app=box.settings.name))


def _restart(database: Database, *, app: str) -> str:
    if database.is_for_one_thread:
        return "in memory, where no other process can relay"

    def ask(connection: Connection) -> int:
        database.state.ask_restart(connection, app)
        relays = database.state.relays(connection)
        return sum(relay.is_running and relay.about.get("app") == app for relay in relays)

    count = database.run(ask)
    if not count:
        return "no relay is running"
    return f"{count:,} running relay{'s end' if count > 1 else ' ends'} within seconds"
