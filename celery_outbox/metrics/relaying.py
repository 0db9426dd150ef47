"""What ``celery-outbox relay`` shows of itself, and to whom."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from ..relay.observing import Observer, Pulse, Settled
from ..storage.database import Database
from .backlogs import Backlogs
from .endpoint import Endpoint
from .health import Health
from .needed import needs
from .tally import Tally

__all__ = ["Display"]


class Display:
    """Shows a relay to Prometheus, to probes, and to OpenTelemetry.

    Args:
        port: where it listens, on ``host``; None: only OpenTelemetry is told, where it is set up.
        unhealthy_after: how long messages may be ready.

    Raises ConfigurationError when the port cannot be had, or a package is missing.
    """

    def __init__(
        self,
        databases: Sequence[Database],
        brokers: Collection[str],
        *,
        host: str,
        port: int | None,
        unhealthy_after: timedelta | None = None,
    ) -> None:
        self._backlogs = Backlogs(databases, brokers)
        self._tally = Tally([each.name for each in databases], list(brokers))
        self._unhealthy_after = unhealthy_after
        self._endpoint: Endpoint | None = None
        observers: list[Observer] = []
        if port is not None:
            with needs("prometheus-client", "--metrics-port"):
                from . import prometheus  # noqa: F401 - to fail now, if at all
            self._endpoint = Endpoint(host, port)
            observers.append(self._tally)
        observers += _telemetry(self._backlogs)
        #: To be told of each batch; None: nobody wants to know.
        self.observer: Observer | None = _All(observers) if observers else None

    @contextmanager
    def showing(self, pulse: Pulse) -> Iterator[None]:
        """Answer for the relay of this pulse until the end of the block."""
        if self._endpoint is None:
            yield
            return
        from prometheus_client import REGISTRY, make_wsgi_app

        from .prometheus import RelayCollector, count_stored

        # The common one: what the app's own modules count in this process is shown, too.
        count_stored(REGISTRY)
        collector = RelayCollector(self._tally, self._backlogs)
        REGISTRY.register(collector)
        health = Health(pulse, self._backlogs, unhealthy_after=self._unhealthy_after)
        try:
            with self._endpoint.serving(make_wsgi_app(REGISTRY), health):
                yield
        finally:
            REGISTRY.unregister(collector)


class _All(Observer):
    def __init__(self, observers: Sequence[Observer]) -> None:
        self._tell: Sequence[Callable[[Settled], None]] = [each.settled for each in observers]

    def settled(self, batch: Settled) -> None:
        for tell in self._tell:
            tell(batch)


def _telemetry(backlogs: Backlogs) -> Iterator[Observer]:
    """Where OpenTelemetry is installed and somebody has said where its numbers go."""
    try:
        from .telemetry import Telemetry, configured_provider
    except ModuleNotFoundError:
        return
    provider = configured_provider()
    if provider is not None:
        yield Telemetry(provider, backlogs)
