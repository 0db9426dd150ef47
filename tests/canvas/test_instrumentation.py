"""OpenTelemetry and Sentry see the publish of a stored task; their headers are stored with it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import group
from celery.contrib.testing.worker import start_worker
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.canvas.stall import Message, OpenStall, Stall
from tests.relay.apps import relay_once
from tests.waiting import wait_until


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    """OpenTelemetry's instrumentation of Celery, and where its spans go."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentor = CeleryInstrumentor()
    instrumentor.instrument(tracer_provider=provider)
    yield exporter
    instrumentor.uninstrument()
    provider.shutdown()


def test_opentelemetry_sees_one_publish_and_its_header_is_stored(
    stall: Stall, exporter: InMemorySpanExporter
) -> None:
    with stall.transaction():
        stall.add.apply_async((1, 2), via_outbox=True)
    (span,) = exporter.get_finished_spans()
    (message,) = stall.stored()
    assert (span.name, span.attributes["messaging.message.id"]) == (
        "apply_async/stall.add",
        message.id,
    )
    assert traced_by(message) == context_of(span)


def test_opentelemetry_sees_one_publish_for_each_member_of_a_group(
    stall: Stall, exporter: InMemorySpanExporter
) -> None:
    with stall.transaction():
        group(stall.adds(3)).apply_async(via_outbox=True)
    assert [traced_by(each) for each in stall.stored()] == [
        context_of(span) for span in exporter.get_finished_spans()
    ]


def test_a_worker_goes_on_with_the_trace_of_the_dispatch(
    open_stall: OpenStall, redis_url: str, exporter: InMemorySpanExporter
) -> None:
    stall = open_stall(config={"broker_url": redis_url})
    with stall.transaction():
        stall.add.apply_async((1, 2), via_outbox=True)
        group(stall.adds(2)).apply_async(via_outbox=True)
    relay_once(stall.outbox)
    with start_worker(stall.app, perform_ping_check=False, shutdown_timeout=30):
        wait_until(lambda: len(exporter.get_finished_spans()) == 6, 30, "the runs")
    published, run = (
        [span for span in exporter.get_finished_spans() if span.name == f"{what}/stall.add"]
        for what in ("apply_async", "run")
    )
    assert sorted(context_of(span) for span in published) == sorted(
        (span.parent.trace_id, span.parent.span_id) for span in run if span.parent is not None
    )


def traced_by(message: Message) -> tuple[int, int]:
    """The trace and the span that a worker goes on with."""
    _, trace_id, span_id, _ = message.headers["traceparent"].split("-")
    return int(trace_id, 16), int(span_id, 16)


def context_of(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    return context.trace_id, context.span_id


#: Sentry patches Celery's classes for good: it is tried in a process of its own.
SENTRY = """
import json, sys
import sentry_sdk
import sqlalchemy as sa
from celery import Celery
from sentry_sdk.integrations.celery import CeleryIntegration
from celery_outbox import Outbox
from tests.canvas.stall import Stall, add_tasks
from tests.relay.apps import relay_once
from tests.waiting import wait_until

def init():
    sentry_sdk.init(
        dsn="http://key@127.0.0.1:1/1",
        transport=lambda *_: None,
        before_send_transaction=lambda event, _: transactions.append(event),
        integrations=[CeleryIntegration()],
        default_integrations=False,
        traces_sample_rate=1.0,
    )

transactions = []
if sys.argv[2] == "first":
    init()
engine = sa.create_engine(sys.argv[1])
app = Celery("stall", broker=sys.argv[3], set_as_current=False)
outbox = Outbox(app, databases={"default": engine})
outbox.install()
add_tasks(app)
if sys.argv[2] == "last":
    init()
stall = Stall(app=app, outbox=outbox, engines={"default": engine})
plain = Celery("plain", broker="memory://", set_as_current=False)
add_tasks(plain)
with sentry_sdk.start_transaction(name="plain"):
    plain.tasks["stall.add"].apply_async((1, 2))
    plain.send_task("stall.add", (3, 4))
with sentry_sdk.start_transaction(name="checkout") as transaction:
    with stall.transaction():
        stall.add.apply_async((1, 2), via_outbox=True)
        app.send_task("stall.add", (3, 4), via_outbox=True)
spans = [
    [(span["op"], span["description"], span["span_id"]) for span in event["spans"]]
    for event in transactions
]
stored = stall.stored()
relay_once(outbox)
# A worker's own modules come after Sentry, as in a worker.
from celery.contrib.testing.worker import start_worker
with start_worker(app, perform_ping_check=False, shutdown_timeout=30):
    wait_until(lambda: len(transactions) == 4, 30, "the runs")
print(json.dumps({
    "trace": transaction.trace_id,
    "plain": spans[0],
    "stored": spans[1],
    "headers": [dict(message.headers) for message in stored],
    "runs": [event["contexts"]["trace"] for event in transactions[2:]],
}))
"""


@pytest.mark.parametrize("order", ["first", "last"])
def test_sentry_sees_what_it_sees_of_plain_celery_and_a_worker_goes_on_with_its_trace(
    order: str, redis_url: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SENTRY, f"sqlite:///{tmp_path / 'stall.db'}", order, redis_url],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    # Sentry also follows each message through Kombu, which a stored one has yet to meet.
    plain = [span[:2] for span in seen["plain"] if span[0] != "queue.publish"]
    assert [span[:2] for span in seen["stored"]] == plain
    traces = [each["sentry-trace"].split("-") for each in seen["headers"]]
    assert {trace for trace, *_ in traces} == {seen["trace"]}
    assert {span for _, span, *_ in traces} <= {span for *_, span in seen["stored"]}
    assert all("baggage" in each for each in seen["headers"])
    assert {run["trace_id"] for run in seen["runs"]} == {seen["trace"]}
    assert sorted(run["parent_span_id"] for run in seen["runs"]) == sorted(
        span for _, span, *_ in traces
    )
