"""The relay's project, whose module counts and tells what it stores, as the pages say."""

import os
from pathlib import Path

from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader

from celery_outbox.metrics import count_stored
from tests.relay.shop import add, app, outbox

__all__ = ["app", "outbox"]

count_stored()
if told := os.environ.get("SHOP_TELEMETRY"):
    # Written at its end, too.
    exporter = ConsoleMetricExporter(out=Path(told).open("a", buffering=1))  # noqa: SIM115
    metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(exporter)]))
if os.environ.get("SHOP_STORES"):
    add.apply_async((1, 2), via_outbox=True)
