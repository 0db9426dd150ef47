"""``find``: where a task is, as far as the outbox knows."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from ..admin import Reach, find
from .choosing import Name, choose_databases, find_outbox, reports_errors
from .reporting import as_json, report_errors
from .tables import printable, show_messages

__all__ = ["find_"]


@click.command("find", short_help="Say where tasks are.")
@click.argument("ids", metavar="ID...", nargs=-1, required=True, type=Name())
@click.option("--database", metavar="NAME", help="Only in this database.")
@click.option("--json", "is_json", is_flag=True, help="As JSON, with whole errors.")
@click.pass_context
@reports_errors
def find_(ctx: click.Context, ids: Sequence[str], database: str | None, *, is_json: bool) -> None:
    """Say where tasks are: stored and waiting, being relayed, or not here.

    IDs are task ids. A reserved message is being relayed. A task that is not here was delivered, or was
    never stored (or not committed); its time of delivery is known where outbox_keep is on.

    \b
    Example:
      celery-outbox -A shop find 8f14e45f-ceea-467f-9a0b-1c2d3e4f5a6b

    Exit code 1 when one of them is not here, or a database could not be read.
    """
    wanted = list(dict.fromkeys(ids))
    databases = choose_databases(find_outbox(ctx), database)
    found = find(databases, wanted, require=Reach(databases).require)
    report_errors(found.errors.values())
    by_id = {
        task_id: [each for each in found.messages if each.task_id == task_id] for task_id in wanted
    }
    if is_json:
        answers = [
            {
                "task_id": task_id,
                "messages": [as_json(each) for each in messages],
                "not_asked": list(found.errors),
            }
            for task_id, messages in by_id.items()
        ]
        click.echo(json.dumps(answers, indent=2))
    elif found.messages:
        messages_in_order = [each for messages in by_id.values() for each in messages]
        show_messages(messages_in_order, tells_database=len(databases) > 1)
    absent = [task_id for task_id, messages in by_id.items() if not messages]
    if not is_json:
        where = "not here: delivered, or never stored"
        if found.errors:
            where = f"not found; it may be in {', '.join(found.errors)}, which could not be asked"
        for task_id in absent:
            click.echo(f"{printable(task_id)}: {where}")
    if absent or found.errors:
        ctx.exit(1)
