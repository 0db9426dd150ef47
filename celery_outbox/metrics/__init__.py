"""Numbers for Prometheus and OpenTelemetry, and the health of a relay.

``celery-outbox relay`` shows its own by itself; the functions here are for the processes that store.
The packages that take the numbers are optional: each is imported where it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .needed import needs

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from prometheus_client import CollectorRegistry

__all__ = ["count_stored", "count_stored_by_opentelemetry"]


def count_stored(registry: CollectorRegistry | None = None) -> None:
    """Count what this process stores in ``celery_outbox_stored_total``; again does nothing.

    Counted when it is written, inside the transaction: a rollback may still follow.

    Args:
        registry: None: the one that prometheus-client itself shows.

    Raises ConfigurationError when prometheus-client is not installed.
    """
    with needs("prometheus-client", "count_stored()"):
        from .prometheus import count_stored as count
    count(registry)


def count_stored_by_opentelemetry(meter_provider: MeterProvider | None = None) -> None:
    """Count what this process stores in ``celery_outbox.stored``; call it once.

    Args:
        meter_provider: None: the one that OpenTelemetry's API knows, also when it is set later.

    Raises ConfigurationError when opentelemetry-api is not installed.
    """
    with needs("opentelemetry-api", "count_stored_by_opentelemetry()"):
        from .telemetry import count_stored as count
    count(meter_provider)
