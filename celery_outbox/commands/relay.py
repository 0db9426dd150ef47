"""``relay``: publish what was committed."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import click
from celery import Celery

from ..app import Outbox
from ..errors import ConfigurationError
from ..publishing import Publisher
from ..relay.loop import Relay, RelayOptions
from .choosing import Duration, choose_databases, find_outbox, reports_errors

__all__ = ["relay"]

logger = logging.getLogger(__name__)


@click.command()
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
    type=Duration(),
    default="1",
    show_default=True,
    help="Wait when there is nothing to do, and after a failure.",
)
@click.option("--once", is_flag=True, help="Take one batch from each database and end.")
@click.option("--stop-when-empty", is_flag=True, help="End when no message is ready.")
@click.pass_context
@reports_errors
def relay(
    ctx: click.Context,
    database: str | None,
    batch: int,
    sleep: timedelta,
    once: bool,
    stop_when_empty: bool,
) -> None:
    """Publish committed messages, of one DATABASE or of all in turn."""
    box = find_outbox(ctx)
    _set_up_logging(box.app)
    worker = Relay(
        choose_databases(box, database),
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


def _brokers(box: Outbox) -> dict[str, Callable[[], Publisher]]:
    """The brokers that this process can relay to. Raises ConfigurationError for one in memory."""
    for name in box.brokers.names:
        transport = box.brokers.transport(name)
        if transport.is_in_process:
            raise ConfigurationError(
                f"broker {name!r}: expected one that other processes can reach, found "
                f"{transport.kind}://, whose messages would end with this process. "
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
