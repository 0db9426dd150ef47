"""A relay process told to stop in the middle of a slow batch, or while what failed waits its turn."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.publishers.sqs_stub import SQSStub
from tests.publishers.sqs_wire import envelope
from tests.relay.apps import rows, send
from tests.relay.commands import environment, outbox_command, running
from tests.relay.conftest import OpenOutbox
from tests.waiting import wait_until

BATCH = 20
QUEUE = "orders.fifo"


@pytest.fixture
def slow_broker() -> Iterator[SQSStub]:
    """Takes 300 ms for each message: of one group of a FIFO queue one at a time is under way."""
    stub = SQSStub(seconds=0.3)
    stub.queues[QUEUE] = []
    yield stub
    stub.close()


def test_a_slow_batch_is_finished_after_a_signal_in_its_middle_and_no_other_is_begun(
    slow_broker: SQSStub, open_outbox: OpenOutbox, postgresql_url: str, tmp_path: Path
) -> None:
    outbox = open_outbox(slow_broker.url, postgresql_url)
    task = outbox.app.tasks["shop.add"]
    calls = [task.s(number, 1).set(queue=QUEUE) for number in range(2 * BATCH)]
    stored = [result.id for result in outbox.bulk(calls)]
    env = environment(broker=slow_broker.url, database=postgresql_url)
    with running(outbox_command("relay", "--batch", str(BATCH)), tmp_path, env) as relay:
        wait_until(lambda: len(slow_broker.queues[QUEUE]) >= 5, 30, "the fifth message")
        began = time.monotonic()
        relay.send(signal.SIGTERM)
        assert relay.wait() == 0, relay.output
        assert time.monotonic() - began < 10
        assert len(slow_broker.queues[QUEUE]) < BATCH + 5
        assert " WARNING/" not in relay.output
    arrived = [envelope(body)["headers"]["id"] for body in slow_broker.bodies(QUEUE)]
    assert arrived == stored[:BATCH]
    assert [(row.task_id, row.attempts, row.claim_token) for row in rows(outbox)] == [
        (task_id, 0, None) for task_id in stored[BATCH:]
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_relay_whose_messages_wait_for_their_next_attempt_ends_at_once(
    number: signal.Signals,
    open_outbox: OpenOutbox,
    postgresql_url: str,
    redis_url: str,
    tmp_path: Path,
) -> None:
    outbox = open_outbox(redis_url, postgresql_url)
    stored = send(outbox, exchange="without a queue", routing_key="x")
    retry = {"base_delay": 3600, "max_delay": 3600}
    env = environment(broker=redis_url, database=postgresql_url, settings={"retry": retry})
    with running(outbox_command("relay", "--sleep", "1h"), tmp_path, env) as relay:
        relay.wait_for("Delivery of 1 message(s) failed")
        began = time.monotonic()
        relay.send(number)
        assert relay.wait() == 0, relay.output
        assert time.monotonic() - began < 2
    (row,) = rows(outbox)
    assert (row.task_id, row.attempts, row.claim_token) == (stored, 1, None)
    assert row.error
