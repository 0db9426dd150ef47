"""What a process stores, counted in it."""

from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from celery_outbox.metrics import count_stored, count_stored_by_opentelemetry
from tests.metrics.scraping import showing
from tests.metrics.telemetry import points
from tests.relay.apps import send
from tests.relay.commands import environment
from tests.relay.conftest import OpenOutbox

NOBODY = "redis://localhost:1/0"


@pytest.mark.parametrize("times", [1, 2])
def test_what_a_process_stores_is_counted_once_however_often_it_is_asked_for(
    times: int, open_outbox: OpenOutbox, sqlite_url: str
) -> None:
    registry = CollectorRegistry()
    for _ in range(times):
        count_stored(registry)
    outbox = open_outbox(NOBODY, sqlite_url)
    send(outbox)
    outbox.bulk([outbox.app.signature("shop.add", (1, number)) for number in range(3)])
    assert registry.get_sample_value("celery_outbox_stored_total", {"database": "default"}) == 4


def test_what_is_never_written_is_not_counted(open_outbox: OpenOutbox, sqlite_url: str) -> None:
    registry = CollectorRegistry()
    count_stored(registry)
    outbox = open_outbox(NOBODY, sqlite_url)
    engine = create_engine(sqlite_url)
    with Session(engine) as session:
        session.execute(text("SELECT 1"))
        send(outbox)
        session.rollback()
    engine.dispose()
    assert registry.get_sample_value("celery_outbox_stored_total", {"database": "default"}) is None


def test_what_a_process_stores_is_told_to_opentelemetry(
    open_outbox: OpenOutbox, sqlite_url: str
) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    count_stored_by_opentelemetry(provider)
    outbox = open_outbox(NOBODY, sqlite_url)
    for _ in range(3):
        send(outbox)
    ((labels, point),) = points(reader)["celery_outbox.stored"]
    assert (labels, point.value) == ({"database": "default"}, 3)
    provider.shutdown()


def test_a_relay_shows_what_its_own_process_stores_though_the_app_counts_it_too(
    open_outbox: OpenOutbox, redis_url: str, sqlite_url: str, tmp_path: Path
) -> None:
    open_outbox(redis_url, sqlite_url)
    env = environment(broker=redis_url, database=sqlite_url) | {"SHOP_STORES": "1"}
    with showing(tmp_path, env, app="tests.metrics.shop") as relay:
        assert relay.number("celery_outbox_stored_total{default}") == 1
        assert "process_resident_memory_bytes{}" in relay.numbers()
