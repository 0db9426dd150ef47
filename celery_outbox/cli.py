"""The two names of the commands.

``celery-outbox -A proj …`` and ``celery -A proj outbox …`` are one group; what differs is who finds
the app.
"""

from __future__ import annotations

import sys
from functools import cached_property

import click
from celery import Celery
from celery.app.utils import find_app

from .commands.find import find_
from .commands.forget import forget_
from .commands.list import list_
from .commands.monitor import monitor
from .commands.prune import prune_
from .commands.relay import relay
from .commands.reschedule import reschedule_
from .commands.restart import restart
from .commands.retry import retry_
from .commands.schema import schema

__all__ = ["main", "outbox"]

_COMMANDS = [relay, restart, list_, monitor, find_, retry_, reschedule_, forget_, prune_, schema]


_EPILOG = """\b
Exit codes:
  0   done
  1   something that was asked for was not found, was refused, or failed
  2   wrong usage; nothing was done
  12  relay: its memory limit was reached
"""


@click.group(name="outbox", commands=_COMMANDS, epilog=_EPILOG)
def outbox() -> None:
    """Store tasks in your database, deliver them to the broker."""


class _Context:
    """What Celery's own commands keep in ``ctx.obj``, as far as it is needed here."""

    def __init__(self, name: str | None) -> None:
        self._name = name

    @cached_property
    def app(self) -> Celery:
        """The Celery app, found at the first need: help and wrong options need none."""
        name = self._name
        if not (name or "").strip(" .:"):
            raise click.UsageError("Expected -A with the name of a module that holds the Celery app.")
        try:
            return find_app(name)
        except ModuleNotFoundError as error:
            raise click.UsageError(f"-A {name}: there is no module named {error.name!r}.") from error
        except AttributeError as error:
            raise click.UsageError(f"-A {name}: {error}.") from error


@click.group(name="celery-outbox", commands=outbox.commands, epilog=_EPILOG)
@click.option("-A", "--app", "name", envvar="APP", help="The Celery app, as for `celery -A`.")
@click.pass_context
def main(ctx: click.Context, name: str | None) -> None:
    """Store tasks in your database, deliver them to the broker."""
    sys.path.insert(0, "")
    ctx.obj = _Context(name)
