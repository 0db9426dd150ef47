"""The same numbers through OpenTelemetry's metrics API."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from celery_outbox.metrics.backlogs import Backlogs
from celery_outbox.metrics.catalogue import METRICS, WAIT_BOUNDS
from celery_outbox.metrics.telemetry import Telemetry
from celery_outbox.storage.database import Database
from tests.metrics.telemetry import points
from tests.metrics.test_batches import answer, relay_once
from tests.relay.apps import rows, send
from tests.relay.commands import environment, outbox_command, run
from tests.relay.conftest import MakeDatabase, OpenOutbox
from tests.relay.fakes import Broker
from tests.storage.rows import add, make_message


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def provider(reader: InMemoryMetricReader) -> Iterator[MeterProvider]:
    made = MeterProvider([reader])
    yield made
    made.shutdown()


def test_opentelemetry_is_told_what_a_relay_does_and_what_waits(
    make_database: MakeDatabase, reader: InMemoryMetricReader, provider: MeterProvider
) -> None:
    database, broker = make_database(), Broker()
    broker.answer = answer
    add(database, *[make_message(each) for each in ("accepted-1", "accepted-2", "errors-1")])
    relay_once([database], broker, Telemetry(provider, Backlogs([database], ["shop"])))
    found, labels = points(reader), {"database": database.name, "broker": "shop"}

    def value(name: str, **more: str) -> Any:
        return next(point for given, point in found[f"celery_outbox.{name}"] if given == labels | more)

    assert value("published").value == 2
    assert value("failed").value == 1
    assert value("deferred").value == 0
    assert value("lease_lost").value == 0
    assert value("batch").count == 1
    assert value("wait").count == 2
    assert value("wait").explicit_bounds == WAIT_BOUNDS
    assert value("backlog", state="retrying").value == 1
    assert value("backlog", state="ready").value == 0
    assert value("oldest_age").value > 0
    ((given, up),) = found["celery_outbox.database_up"]
    assert (given, up.value) == ({"database": database.name}, 1)


def test_a_database_that_is_away_is_told_to_be_and_has_no_backlog(
    make_database: MakeDatabase, reader: InMemoryMetricReader, provider: MeterProvider
) -> None:
    database: Database = make_database()
    with database.begin() as connection:
        database.tables.messages.drop(connection)
    Telemetry(provider, Backlogs([database], ["shop"]))
    found = points(reader)
    ((_, up),) = found["celery_outbox.database_up"]
    assert up.value == 0
    assert not found.get("celery_outbox.backlog")
    assert not found.get("celery_outbox.oldest_age")


def test_a_relay_tells_the_provider_that_its_app_has_set(
    open_outbox: OpenOutbox, redis_url: str, sqlite_url: str, tmp_path: Path
) -> None:
    outbox, told = open_outbox(redis_url, sqlite_url), tmp_path / "told.json"
    for _ in range(3):
        send(outbox)
    env = environment(broker=redis_url, database=sqlite_url) | {"SHOP_TELEMETRY": str(told)}
    done = run(outbox_command("relay", "--stop-when-empty", app="tests.metrics.shop"), env)
    assert done.returncode == 0, done.stderr
    assert rows(outbox) == []
    decoder, text = json.JSONDecoder(), told.read_text()
    data, _ = decoder.raw_decode(text)
    metrics = data["resource_metrics"][0]["scope_metrics"][0]["metrics"]
    units = {each["name"]: each["unit"] for each in metrics}
    assert units == {each.opentelemetry: each.ucum for each in METRICS if each.name != "stored"}
    (published,) = [each for each in metrics if each["name"] == "celery_outbox.published"]
    (point,) = published["data"]["data_points"]
    assert (point["attributes"], point["value"]) == ({"database": "default", "broker": "shop"}, 3)


def test_a_relay_whose_app_has_set_no_provider_works_as_ever(
    open_outbox: OpenOutbox, redis_url: str, sqlite_url: str
) -> None:
    outbox = open_outbox(redis_url, sqlite_url)
    send(outbox)
    env = environment(broker=redis_url, database=sqlite_url)
    done = run(outbox_command("relay", "--stop-when-empty", app="tests.metrics.shop"), env)
    assert (done.returncode, rows(outbox)) == (0, [])
