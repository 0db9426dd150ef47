"""``relay``: publish what was committed."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import click
from celery import Celery

from ..app import Outbox
from ..errors import ConfigurationError
from ..metrics.relaying import Display
from ..publishing import Publisher
from ..relay.loop import Relay, RelayOptions
from .choosing import Duration, Memory, choose_databases, find_outbox, reports_errors

__all__ = ["relay"]

logger = logging.getLogger(__name__)

#: The exit code for a supervisor that shall know why.
OUT_OF_MEMORY = 12


@click.command(short_help="Publish committed messages.")
@click.argument("database", required=False)
@click.option(
    "--batch",
    type=click.IntRange(1, 1000),
    default=100,
    show_default=True,
    help="Messages taken at once.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    help="Batches published at once, each over a connection of its own.",
)
@click.option(
    "--sleep",
    type=Duration(),
    default="1",
    show_default=True,
    help="Wait when there is nothing to do, and after a failure.",
)
@click.option(
    "--max-jobs",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="End when so many messages were taken, failed ones too; 0: no limit.",
)
@click.option(
    "--max-time",
    type=Duration(allows_zero=True),
    default="0",
    show_default=True,
    help="End after so long; 0: no limit.",
)
@click.option(
    "--memory",
    type=Memory(),
    default="128",
    show_default=True,
    help="End with exit code 12 when the process uses so many MB, or with % so much of what it may "
    "use at most; 0: no limit.",
)
@click.option("--once", is_flag=True, help="Take one batch from each database and end.")
@click.option("--stop-when-empty", is_flag=True, help="End when no message is ready.")
@click.option(
    "--metrics-port",
    type=click.IntRange(1, 65535),
    help="Serve /metrics for Prometheus, /healthz and /readyz for probes.",
)
@click.option(
    "--metrics-host",
    default="0.0.0.0",  # noqa: S104 - whoever scrapes a container comes from outside
    show_default=True,
    help="The address to serve them on.",
)
@click.option(
    "--unhealthy-after",
    type=Duration(),
    help="/healthz is red when a message has been ready for longer.",
)
@click.pass_context
@reports_errors
def relay(
    ctx: click.Context,
    /,
    database: str | None,
    max_time: timedelta,
    memory: int | None,
    metrics_port: int | None,
    metrics_host: str,
    unhealthy_after: timedelta | None,
    **options: Any,
) -> None:
    """Publish committed messages, of one DATABASE or of all in turn.

    SIGTERM, SIGINT and SIGQUIT let it finish its batches and end, a second one lets it end at once.
    SIGUSR2 pauses it, SIGCONT lets it go on.

    \b
    Examples:
      celery-outbox -A shop relay
      celery-outbox -A shop relay billing --concurrency 4 --memory 60%
      celery-outbox -A shop relay --metrics-port 9808 --unhealthy-after 15m
      celery-outbox -A shop relay --stop-when-empty

    Exit code 0 when it ran its course, also when deliveries failed: the messages stay. Exit code 1 when
    it could not work at all, 12 when it used too much memory.
    """
    if unhealthy_after is not None and metrics_port is None:
        raise click.UsageError("--unhealthy-after needs --metrics-port.")
    box = find_outbox(ctx)
    _set_up_logging(box.app)
    settings = box.settings
    databases, brokers = choose_databases(box, database), _brokers(box)
    display = Display(
        databases, list(brokers), host=metrics_host, port=metrics_port, unhealthy_after=unhealthy_after
    )
    worker = Relay(
        databases,
        brokers,
        RelayOptions(
            lease=settings.retry_after,
            retry=settings.retry,
            keep=settings.keep,
            max_time=max_time or None,
            max_memory=memory,
            **options,
        ),
        name=settings.name,
        observer=display.observer,
    )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, lambda *_: worker.stop())
    signal.signal(signal.SIGUSR2, lambda *_: worker.pause())
    signal.signal(signal.SIGCONT, lambda *_: worker.resume())
    with display.showing(worker.pulse):
        has_worked = worker.run()
        if worker.is_abandoned:
            _leave_at_once()
    if worker.is_out_of_memory:
        ctx.exit(OUT_OF_MEMORY)
    if not has_worked:
        ctx.exit(1)


def _leave_at_once() -> NoReturn:
    """End without waiting for threads that may hang."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _brokers(box: Outbox) -> dict[str, Callable[[], Publisher]]:
    """The brokers that this process can relay to. Raises ConfigurationError for one in memory."""
    for name in box.brokers.names:
        transport = box.brokers.transport(name)
        if transport.is_in_process:
            raise ConfigurationError(
                f"broker {name!r}: expected one that other processes can reach, found one "
                f"({transport.kind}) whose messages would end with this process. "
                "Choose another broker, or relay inside the process that consumes."
            )
        if not transport.is_persistent:
            logger.warning(
                "Broker %r (%s) keeps its messages in memory only: what it has taken counts as "
                "delivered, and is lost when it restarts",
                name,
                transport.kind,
            )
    return {name: partial(box.publisher, name) for name in box.brokers.names}


def _set_up_logging(app: Celery) -> None:
    app.log.setup_logging_subsystem(loglevel=logging.INFO)
