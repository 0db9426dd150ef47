"""What every command asks first: which Outbox, databases, messages; and how each reports an error."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, wraps
from typing import Any, TypeVar

import click
from celery import Celery

from ..admin import EVERYTHING, Filter
from ..app import Outbox
from ..capture.doors import attached
from ..config import parse_duration
from ..errors import ConfigurationError, OutboxError
from ..relay.limits import memory_limit
from ..storage.database import Database

__all__ = [
    "Duration",
    "Memory",
    "Name",
    "choose_databases",
    "chooses_messages",
    "find_outbox",
    "for_databases",
    "reports_errors",
    "wants_all",
]

F = TypeVar("F", bound=Callable[..., Any])

#: What a full disk, or a terminal that is gone, answers. A closed pipe is click's affair.
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.4
    """A time, as ``90``, ``90s``, ``15m``, ``12h`` or ``7d``; more than none unless zero is allowed."""

    name = "duration"

    def __init__(self, *, allows_zero: bool = False) -> None:
        self._allows_zero = allows_zero

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta:
        """Turn text into a timedelta."""
        try:
            duration = parse_duration(_number(value), "duration")
        except ConfigurationError as error:
            self.fail(str(error), param, ctx)
        if duration <= timedelta(0) and not self._allows_zero:
            self.fail("expected more than zero.", param, ctx)
        return duration


class Memory(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.4
    """Megabytes, as ``128``, or a share of what the process may use, as ``60%``; zero: no limit."""

    name = "memory"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | None:
        """Turn text into bytes, zero into None."""
        found = re.fullmatch(r"(\d{1,12}(?:\.\d+)?)(%?)", str(value).strip())
        if found is None or (found[2] and float(found[1]) > 100):
            self.fail(
                f"expected megabytes such as 128, or 60% of the limit, got {value!r}.", param, ctx
            )
        return memory_limit(float(found[1]), is_share=bool(found[2])) or None


class Name(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.4
    """An id or a name: neither nothing, as of a shell's unset variable, nor what is no UTF-8."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuse what nothing can be called."""
        if not value:
            self.fail("expected a name or an id, got an empty one.", param, ctx)
        # Python keeps bytes that it cannot decode as lone surrogates, which no database takes.
        if any("\ud800" <= each <= "\udfff" for each in value):
            self.fail(f"expected UTF-8, got {value!r}.", param, ctx)
        return str(value)


class TaskName(Name):
    """The name of a task, or its beginning with a ``*`` behind it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuse a ``*`` that is anywhere else."""
        name = super().convert(value, param, ctx)
        if "*" in name.removesuffix("*"):
            self.fail(f"expected a * at the end alone, such as shop.*, got {value!r}.", param, ctx)
        return name


def _number(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def reports_errors(command: F) -> F:
    """Turn the errors that an operator can cause into one line and exit code 1."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        # What a terminal without UTF-8 cannot show shall not keep it from showing the rest.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        try:
            return command(*args, **kwargs)
        except OutboxError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            _forget_output()
            raise click.ClickException(f"the output cannot be written: {error.strerror}.") from error

    return run  # type: ignore[return-value]  # the same signature


def _forget_output() -> None:
    """Let nothing fail once more at the end of the process, when Python writes what is left."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def for_databases(command: F) -> F:
    """Let a command be told one database, as an argument or as an option."""

    @click.argument("argument", metavar="[DATABASE]", required=False)
    @click.option("--database", metavar="NAME", help="Only this database.")
    @wraps(command)
    def run(argument: str | None, database: str | None, *args: Any, **kwargs: Any) -> Any:
        if None not in {argument, database} and argument != database:
            raise click.UsageError(f"Expected one database, got {argument!r} and {database!r}.")
        return command(*args, database=argument if database is None else database, **kwargs)

    return run  # type: ignore[return-value]  # a command as before


def chooses_messages(states: Sequence[str]) -> Callable[[F], F]:
    """Let a command be told which messages are meant; it gets the Filter as ``chosen``.

    ``states`` are those that the command can do anything with; without a choice it gets all states.
    """

    def decorate(command: F) -> F:
        several = partial(click.option, multiple=True, metavar="NAME", type=Name())

        @click.option(
            "--state",
            "states",
            type=click.Choice(list(states)),
            multiple=True,
            help="Only messages in this state. This and the next three may be given several times.",
        )
        @several(
            "--task",
            "tasks",
            type=TaskName(),
            help="Only of this task; shop.* stands for every name that begins so.",
        )
        @several("--broker", "brokers", help="Only for this broker.")
        @several("--queue", "queues", help="Only for this queue.")
        @wraps(command)
        def run(*args: Any, **kwargs: Any) -> Any:
            names = ("states", "tasks", "brokers", "queues")
            given = {name: tuple(dict.fromkeys(kwargs.pop(name))) for name in names}
            return command(*args, chosen=Filter(**{k: v for k, v in given.items() if v}), **kwargs)

        return run  # type: ignore[return-value]  # a command as before

    return decorate


def wants_all(ids: Sequence[str], chosen: Filter) -> bool:
    """Whether "all" stands in place of ids; only then may messages be chosen by something else."""
    if "all" in ids and len(ids) > 1:
        raise click.UsageError('Expected either ids or "all", got both.')
    if "all" not in ids and chosen != EVERYTHING:
        raise click.UsageError(
            'Expected --state, --task, --broker and --queue with "all" alone, got them with ids.'
        )
    return "all" in ids


def find_outbox(ctx: click.Context) -> Outbox:
    """The Outbox of the app that -A names. Raises ConfigurationError when it has none."""
    app: Celery = ctx.find_root().obj.app
    found = attached(app)
    if not isinstance(found, Outbox):
        raise ConfigurationError(
            f"expected an Outbox on the Celery app {app.main!r}, found none. Create "
            "Outbox(app, databases=...) in the module that -A names."
        )
    return found


def choose_databases(box: Outbox, name: str | None) -> list[Database]:
    """One database by its name, or all. Raises ConfigurationError for an unknown name."""
    if name is None:
        return list(box.databases.values())
    if name not in box.databases:
        raise ConfigurationError(
            f"expected one of the databases {', '.join(map(repr, box.databases))}, got {name!r}."
        )
    return [box.databases[name]]
