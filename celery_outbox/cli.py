"""The commands: parse, call, print.

``celery-outbox -A proj …`` and ``celery -A proj outbox …`` are one group; what differs is who finds
the app.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property, partial, wraps
from typing import Any, TypeVar

import click
from celery import Celery
from celery.app.utils import find_app
from kombu import Connection

from .app import Outbox
from .capture.doors import attached
from .config import parse_duration
from .errors import ConfigurationError, OutboxError
from .relay.loop import Relay, RelayOptions
from .storage.database import Database
from .transports import describe

__all__ = ["main", "outbox"]

F = TypeVar("F", bound=Callable[..., Any])


class _Duration(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.4
    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta:
        try:
            duration = parse_duration(_number(value), "duration")
        except ConfigurationError as error:
            self.fail(str(error), param, ctx)
        if duration <= timedelta(0):
            self.fail("expected more than zero.", param, ctx)
        return duration


def _number(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def _reports_errors(command: F) -> F:
    """Turn the errors that an operator can cause into one line and exit code 1."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except OutboxError as error:
            raise click.ClickException(str(error)) from error

    return run  # type: ignore[return-value]  # the same signature


@click.group(name="outbox")
def outbox() -> None:
    """Store tasks in your database, deliver them to the broker."""


@outbox.command()
@click.argument("database", required=False)
@click.option(
    "--batch",
    type=click.IntRange(1, 1000),
    default=100,
    show_default=True,
    help="Messages taken at once.",
)
@click.option(
    "--sleep",
    type=_Duration(),
    default="1",
    show_default=True,
    help="Wait when there is nothing to do, and after a failure.",
)
@click.option("--once", is_flag=True, help="Take one batch from each database and end.")
@click.option("--stop-when-empty", is_flag=True, help="End when no message is ready.")
@click.pass_context
@_reports_errors
def relay(
    ctx: click.Context,
    database: str | None,
    batch: int,
    sleep: timedelta,
    once: bool,
    stop_when_empty: bool,
) -> None:
    """Publish committed messages, of one DATABASE or of all in turn."""
    box = _outbox(ctx)
    _set_up_logging(box.app)
    worker = Relay(
        _databases(box, database),
        _brokers(box),
        RelayOptions(
            batch=batch,
            sleep=sleep,
            lease=box.settings.retry_after,
            retry=box.settings.retry,
            keep=box.settings.keep,
            once=once,
            stop_when_empty=stop_when_empty,
        ),
    )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, lambda *_: worker.stop())
    if not worker.run():
        ctx.exit(1)


@outbox.group()
def schema() -> None:
    """Create and look after the tables."""


@schema.command("install")
@click.option("--database", help="Only this database.")
@click.pass_context
@_reports_errors
def schema_install(ctx: click.Context, database: str | None) -> None:
    """Create the tables and indexes that are missing."""
    from .storage.install import install

    for each in _databases(_outbox(ctx), database):
        install(each)
        click.echo(f"{each.name}: the table {each.tables.messages.fullname} is installed.")


def _outbox(ctx: click.Context) -> Outbox:
    app: Celery = ctx.find_root().obj.app
    found = attached(app)
    if not isinstance(found, Outbox):
        raise ConfigurationError(
            f"expected an Outbox on the Celery app {app.main!r}, found none. Create "
            "Outbox(app, databases=...) in the module that -A names."
        )
    return found


def _databases(box: Outbox, name: str | None) -> list[Database]:
    if name is None:
        return list(box.databases.values())
    if name not in box.databases:
        raise ConfigurationError(
            f"expected one of the databases {', '.join(map(repr, box.databases))}, got {name!r}."
        )
    return [box.databases[name]]


def _brokers(box: Outbox) -> dict[str, Callable[[], Connection]]:
    for name in box.brokers:
        transport = describe(box.connection(name))
        if transport.is_in_process:
            raise ConfigurationError(
                f"broker {name!r}: expected one that other processes can reach, found "
                f"{transport.kind}://, whose messages would end with this process. "
                "Choose another broker, or relay inside the process that consumes."
            )
    return {name: partial(box.connection, name) for name in box.brokers}


def _set_up_logging(app: Celery) -> None:
    app.log.setup_logging_subsystem(loglevel=logging.INFO)


class _Context:
    """What Celery's own commands keep in ``ctx.obj``, as far as it is needed here."""

    def __init__(self, name: str | None) -> None:
        self._name = name

    @cached_property
    def app(self) -> Celery:
        """The Celery app, found at the first need: help and wrong options need none."""
        name = self._name
        if name is None:
            raise click.UsageError("Expected -A with the name of a module that holds the Celery app.")
        try:
            return find_app(name)
        except ModuleNotFoundError as error:
            raise click.UsageError(f"-A {name}: there is no module named {error.name!r}.") from error
        except AttributeError as error:
            raise click.UsageError(f"-A {name}: {error}.") from error


@click.group(name="celery-outbox", commands=outbox.commands)
@click.option("-A", "--app", "name", envvar="APP", help="The Celery app, as for `celery -A`.")
@click.pass_context
def main(ctx: click.Context, name: str | None) -> None:
    """Store tasks in your database, deliver them to the broker."""
    sys.path.insert(0, "")
    ctx.obj = _Context(name)
