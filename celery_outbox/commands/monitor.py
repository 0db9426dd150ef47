"""``monitor``: how much waits and for how long, for people, for programs, and as an alarm."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import click
from rich.console import Console

from ..errors import OutboxError
from ..monitoring import (
    Age,
    Backlog,
    BrokerBacklog,
    Count,
    Failing,
    Looking,
    Thresholds,
    announce,
    look,
)
from ..storage.state import RelayRow
from .backlogs import report, write_lines
from .choosing import Duration, choose_databases, find_outbox, for_databases, reports_errors
from .watching import watch

__all__ = ["monitor"]

#: How long a database may take to answer; the others are told of all the same.
PATIENCE = timedelta(seconds=10)


@click.command()
@click.option(
    "--max",
    "maximum",
    type=click.IntRange(1),
    help="Exit code 1 and the signal outbox_busy when a database holds so many undelivered messages.",
)
@click.option(
    "--age",
    type=Duration(),
    help="Likewise when its oldest message has been due for so long: 90s, 15m, 12h.",
)
@click.option("--json", "as_json", is_flag=True, help="As JSON, times in Unix seconds.")
@click.option("--watch", "watches", is_flag=True, help="Look again and again; q quits.")
@click.option(
    "--interval", type=Duration(), default="2s", show_default=True, help="With --watch: how often."
)
@for_databases
@click.pass_context
@reports_errors
def monitor(
    ctx: click.Context,
    database: str | None,
    maximum: int | None,
    age: timedelta | None,
    interval: timedelta,
    *,
    as_json: bool,
    watches: bool,
) -> None:
    """Show how many messages wait in each database, and for how long.

    The age is that of the oldest message whose intended time has come: a delay that was asked for does
    not count, failed attempts do. Numbers above 10,000 are not counted to their end, and are shown as
    10,000+.

    \b
    Examples:
      celery-outbox -A shop monitor --watch
      celery-outbox -A shop monitor billing --max 10000 --age 5m

    Exit code 1 when a threshold is reached, or a database could not be read.
    """
    if watches and as_json:
        raise click.UsageError("Expected either --watch or --json, got both.")
    box = find_outbox(ctx)
    thresholds = Thresholds(pending=maximum, age=age)
    looking = partial(look, brokers=box.brokers.names, thresholds=thresholds)
    databases = choose_databases(box, database)
    if watches:
        watch(databases, looking, interval)
        return
    looks = [Looking(each, looking) for each in databases]
    for looking_at in looks:
        looking_at.begin()
    found = {each.database.name: each.result(PATIENCE) for each in looks}
    backlogs = [each for each in found.values() if isinstance(each, Backlog)]
    if as_json:
        click.echo(json.dumps([_json(name, each) for name, each in found.items()], indent=2))
    else:
        _show(backlogs)
    for each in found.values():
        if isinstance(each, OutboxError):
            click.echo(f"Error: {each}", err=True)
    for backlog in backlogs:
        if backlog.is_busy:
            announce(backlog)
    if len(backlogs) < len(found) or any(backlog.is_busy for backlog in backlogs):
        ctx.exit(1)


def _show(backlogs: Sequence[Backlog]) -> None:
    console = Console(highlight=False)
    for backlog in backlogs:
        if console.is_terminal:
            console.print(report(backlog, console.width))
        else:
            write_lines(backlog)


_FIELDS = (
    "database",
    "error",
    "read_at",
    "took",
    "is_busy",
    "pending",
    "pending_is_exact",
    "age",
    "age_is_exact",
    "due_since",
    "states",
    "brokers",
    "failing",
    "relays",
)


def _json(database: str, found: Backlog | OutboxError) -> dict[str, Any]:
    if isinstance(found, OutboxError):
        return dict.fromkeys(_FIELDS) | {"database": database, "error": str(found)}
    return {
        "database": database,
        "error": None,
        "read_at": found.read_at.timestamp(),
        "took": found.took.total_seconds(),
        "is_busy": found.is_busy,
        "pending": found.pending.number,
        "pending_is_exact": found.pending.is_exact,
        **_age(found.age, found.read_at),
        "states": _states(found.counts),
        "brokers": [_broker(each, found.read_at) for each in found.brokers],
        "failing": [_failing(each) for each in found.failing],
        "relays": [_relay(each, found.read_at) for each in found.relays],
    }


def _age(age: Age, read_at: datetime) -> dict[str, Any]:
    return {
        "age": age.duration.total_seconds() if age.duration is not None else None,
        "age_is_exact": age.is_exact,
        "due_since": (read_at - age.duration).timestamp() if age.duration is not None else None,
    }


def _states(counts: Mapping[str, Count]) -> dict[str, Any]:
    return {state: {"count": each.number, "is_exact": each.is_exact} for state, each in counts.items()}


def _broker(broker: BrokerBacklog, read_at: datetime) -> dict[str, Any]:
    return {
        "broker": broker.broker,
        "is_known": broker.is_known,
        **_age(broker.age, read_at),
        "states": _states(broker.counts),
    }


def _failing(failing: Failing) -> dict[str, Any]:
    return {
        "broker": failing.broker,
        "queue": failing.queue,
        "count": failing.count.number,
        "is_exact": failing.count.is_exact,
        "attempts": failing.attempts,
        "error": failing.error,
    }


def _relay(relay: RelayRow, read_at: datetime) -> dict[str, Any]:
    return {
        "host": relay.about.get("host"),
        "pid": relay.about.get("pid"),
        "app": relay.about.get("app"),
        "since": relay.about.get("since"),
        "seen_at": (read_at - relay.seen_ago).timestamp(),
        "is_running": relay.is_running,
    }
