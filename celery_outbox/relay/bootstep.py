"""The relay inside a Celery worker, for small installations: ``celery worker --outbox-relay``.

A step of the worker's blueprint. It begins after the pool, so that no thread of the relay is there
when the pool forks its first children, and it ends before it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import click
from celery import Celery, bootsteps

from ..brokers import Brokers
from ..config import Settings
from ..publishing import Publisher
from ..storage.database import Database
from .heartbeat import without_signals

if TYPE_CHECKING:
    # Producers import this module, too, and do not need the relay: it is imported where it begins.
    from .loop import Relay

__all__ = ["RelaySource", "attach_bootstep"]

logger = logging.getLogger(__name__)

#: How long a cold shutdown waits; what is under way is delivered again when its lease is over.
PATIENCE_SECONDS = 3.0

_OPTION = click.Option(
    ["--outbox-relay"],
    is_flag=True,
    default=False,
    help="Also relay the messages of the app's outbox, in a thread of the worker's main process.",
)


class RelaySource(Protocol):
    """What the step asks of an Outbox."""

    @property
    def settings(self) -> Settings:
        """Its settings."""

    @property
    def databases(self) -> Mapping[str, Database]:
        """Its databases."""

    @property
    def brokers(self) -> Brokers:
        """The brokers that its app knows."""

    def publisher(self, broker: str) -> Publisher:
        """A publisher, not yet connected, for a broker by its name."""


def attach_bootstep(app: Celery, outbox: RelaySource) -> None:
    """Give the workers of ``app`` the option to relay; again does nothing."""

    class Step(_RelayStep):
        source = outbox
        name = "outbox-relay"  # of two steps with one name, a worker takes one

    app.steps["worker"].add(Step)
    app.user_options["worker"].add(_OPTION)


class _RelayStep(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    source: RelaySource
    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, outbox_relay: bool = False, **options: Any) -> None:
        self.enabled = outbox_relay
        super().__init__(worker, **options)

    def create(self, worker: Any) -> _RelayThread:
        return _RelayThread(partial(_relay_of, self.source))

    def close(self, worker: Any) -> None:
        # Comes first of all that a shutdown does: the relay drains while the consumer ends.
        if self.obj is not None:
            self.obj.close()


class _RelayThread:
    """A relay in a thread beside the worker's consumer; after a restart of the relays, another one."""

    def __init__(self, make: Callable[[], Relay]) -> None:
        self._make = make
        self._relay = make()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="celery_outbox relay", daemon=True)

    def start(self) -> None:
        with without_signals():
            self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        self._relay.stop()

    def stop(self) -> None:
        from .loop import STOP_SECONDS

        self._thread.join(timeout=STOP_SECONDS + PATIENCE_SECONDS)

    def terminate(self) -> None:
        self.close()
        self._thread.join(timeout=PATIENCE_SECONDS)

    def _run(self) -> None:
        from celery.worker import state

        try:
            self._relay.run()
            while self._relay.is_restarted and not self._is_closed:
                self._relay = self._make()
                if not self._is_closed:  # asked for in between, the one before was told
                    self._relay.run()
        except BaseException as error:
            logger.critical("The relay in the worker failed: the worker ends", exc_info=error)
            # A worker that no longer relays would look well; its supervisor starts another.
            state.should_stop = 1


def _relay_of(outbox: RelaySource) -> Relay:
    from .loop import Relay, RelayOptions

    settings = outbox.settings
    return Relay(
        list(outbox.databases.values()),
        {name: partial(outbox.publisher, name) for name in outbox.brokers.names},
        RelayOptions(lease=settings.retry_after, retry=settings.retry, keep=settings.keep),
        name=settings.name,
    )
