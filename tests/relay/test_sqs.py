"""From the dispatch to the queues of SQS: its limits, delays, groups and names."""

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
import sqlalchemy as sa

from celery_outbox import Outbox
from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.publishers.sqs_stub import Fault, SQSStub
from tests.publishers.sqs_wire import envelope, task_ids
from tests.relay.apps import make_due, relay_all, relay_once, relaying, rows, send
from tests.relay.conftest import OpenOutbox
from tests.waiting import wait_until

FIFO = "orders.fifo"


def sent(stub: SQSStub, queue: str = "celery") -> list[str]:
    """The tasks that a queue has taken, in order."""
    return [envelope(body)["headers"]["id"] for body in stub.bodies(queue)]


def with_options(**options: Any) -> dict[str, Any]:
    return {"config": {"broker_transport_options": options}}


def turn_clock(outbox: Outbox, seconds: float) -> None:
    """Let so much time have passed for every row."""
    database = outbox.databases["default"]
    t = database.tables.messages
    back = sa.literal(-seconds, sa.Float(53))
    with database.begin() as connection:
        for column in (t.c.deliver_at, t.c.scheduled_at):
            connection.execute(sa.update(t).values({column: database.dialect.shifted(column, back)}))


def test_messages_that_are_too_long_together_arrive_in_one_pass(
    sqs_url: str, sqlite_url: str, open_outbox: OpenOutbox
) -> None:
    outbox = open_outbox(sqs_url, sqlite_url)
    ids = [send(outbox, "x" * 200_000, 1) for _ in range(10)]
    relay_once(outbox)
    assert sorted(task_ids(sqs_url)) == sorted(ids)
    assert rows(outbox) == []


def test_a_message_that_is_too_long_by_itself_stays_alone(
    sqs_url: str, sqlite_url: str, open_outbox: OpenOutbox
) -> None:
    # Stored for a broker without base64 around everything, relayed with it.
    storing = open_outbox(sqs_url, sqlite_url, **with_options(sqs_base64_encoding=False))
    small = [send(storing)]
    large = send(storing, "x" * 700_000, 1)
    small.append(send(storing))
    outbox = open_outbox(sqs_url, sqlite_url)
    relay_once(outbox)
    assert sorted(task_ids(sqs_url)) == sorted(small)
    (row,) = rows(outbox)
    assert (row.task_id, row.attempts) == (large, 1)
    assert "size" in row.error
    assert "xxxx" not in row.error


def test_a_delay_of_up_to_fifteen_minutes_is_left_to_sqs(
    sqs_stub: SQSStub, sqlite_url: str, open_outbox: OpenOutbox
) -> None:
    outbox = open_outbox(sqs_stub.url, sqlite_url)
    ids = {seconds: send(outbox, countdown=seconds) for seconds in (3600, 905, 600, 0.4)}
    ids |= {0: send(outbox, countdown=0), None: send(outbox)}
    relay_once(outbox)
    delays = {
        task_id: entry.get("DelaySeconds")
        for task_id, entry in zip(sent(sqs_stub), sqs_stub.queues["celery"], strict=True)
    }
    assert delays.keys() == set(ids.values()) - {ids[3600], ids[905]}
    assert delays[ids[600]] in {599, 600}
    assert delays[ids[0.4]] in {0, 1}
    assert (delays[ids[0]], delays[ids[None]]) == (0, None)
    assert [(row.task_id, row.attempts) for row in rows(outbox)] == [(ids[3600], 0), (ids[905], 0)]
    turn_clock(outbox, 6)
    relay_once(outbox)
    assert sent(sqs_stub)[-1] == ids[905]
    assert 890 <= sqs_stub.queues["celery"][-1]["DelaySeconds"] <= 899
    assert [row.task_id for row in rows(outbox)] == [ids[3600]]


def test_a_message_that_is_offered_too_early_is_put_back_without_an_attempt(
    sqs_stub: SQSStub, sqlite_url: str, open_outbox: OpenOutbox
) -> None:
    outbox = open_outbox(sqs_stub.url, sqlite_url)
    send(outbox, countdown=3600)
    make_due(outbox)
    relay_once(outbox)
    (row,) = rows(outbox)
    assert (row.attempts, row.error, row.scheduled_at) == (0, None, row.deliver_at)
    assert sent(sqs_stub) == []


def test_on_a_fifo_queue_a_delay_is_waited_for_here(
    sqs_stub: SQSStub, sqlite_url: str, open_outbox: OpenOutbox
) -> None:
    outbox = open_outbox(sqs_stub.url, sqlite_url)
    at_once = [send(outbox, queue=FIFO, countdown=0), send(outbox, queue=FIFO)]
    began = time.monotonic()
    later = send(outbox, queue=FIFO, countdown=1)
    with relaying(outbox):
        wait_until(lambda: sent(sqs_stub, FIFO) == at_once)
        wait_until(lambda: sent(sqs_stub, FIFO) == [*at_once, later])
    assert time.monotonic() - began >= 1
    assert not any("DelaySeconds" in entry for entry in sqs_stub.queues[FIFO])
    assert rows(outbox) == []


def test_what_is_published_again_after_a_lost_answer_is_received_once(
    sqs_url: str,
    sqlite_url: str,
    open_outbox: OpenOutbox,
    tcp_proxy: Callable[[str, int], TcpProxy],
) -> None:
    proxy = tcp_proxy(HOST, urlsplit(sqs_url).port or 0)
    options = with_options(**{"client-config": {"read_timeout": 0.5}})
    outbox = open_outbox(proxy.through(sqs_url), sqlite_url, **options)
    ids = [send(outbox, queue=FIFO)]
    with relaying(outbox):
        wait_until(lambda: rows(outbox) == [])
        proxy.swallow_replies()
        ids.append(send(outbox, queue=FIFO))
        wait_until(lambda: rows(outbox)[0].error)
        assert "not known" in rows(outbox)[0].error
    proxy.resume()
    proxy.cut()
    make_due(outbox)
    relay_once(outbox)
    assert rows(outbox) == []
    assert task_ids(sqs_url, FIFO) == ids


def test_a_group_keeps_the_order_of_its_transactions(
    sqs_stub: SQSStub, sqlite_url: str, open_outbox: OpenOutbox
) -> None:
    outbox = open_outbox(sqs_stub.url, sqlite_url)
    ids = [send(outbox, queue=FIFO, MessageGroupId="tenant-7") for _ in range(10)]
    others = [send(outbox, queue=FIFO), send(outbox, MessageGroupId="tenant-7")]
    with relaying(outbox, batch=4):
        wait_until(lambda: rows(outbox) == [])
    groups = [entry["MessageGroupId"] for entry in sqs_stub.queues[FIFO]]
    in_group = [
        id_ for id_, group in zip(sent(sqs_stub, FIFO), groups, strict=True) if group != "default"
    ]
    assert in_group == ids
    assert set(groups) == {"tenant-7", "default"}
    assert sent(sqs_stub) == others[1:]
    assert sqs_stub.queues["celery"][0]["MessageGroupId"] == "tenant-7"


def test_a_deduplication_id_is_that_of_the_caller_or_of_the_row(
    sqs_stub: SQSStub, sqlite_url: str, open_outbox: OpenOutbox
) -> None:
    outbox = open_outbox(sqs_stub.url, sqlite_url)
    send(outbox, queue=FIFO, MessageDeduplicationId="mine")
    for _ in range(2):
        send(outbox, queue=FIFO, task_id="same")
    relay_once(outbox)
    names = [entry["MessageDeduplicationId"] for entry in sqs_stub.queues[FIFO]]
    assert names[0] == "mine"
    assert len(set(names)) == 3
    assert all(0 < len(name) <= 128 for name in names)


def test_predefined_queues_take_their_tasks_and_no_other_is_made(
    sqs_stub: SQSStub, sqlite_url: str, open_outbox: OpenOutbox
) -> None:
    sqs_stub.queues.update({"jobs.fifo": [], "standard": []})
    predefined = {
        "jobs.fifo": {"url": sqs_stub.queue_url("jobs.fifo")},
        "std": {"url": sqs_stub.queue_url("standard")},
    }
    outbox = open_outbox(sqs_stub.url, sqlite_url, **with_options(predefined_queues=predefined))
    lost = send(outbox, queue="other")
    ids = [send(outbox, queue="jobs.fifo"), send(outbox, queue="std")]
    relay_once(outbox)
    assert [*sent(sqs_stub, "jobs.fifo"), *sent(sqs_stub, "standard")] == ids
    (row,) = rows(outbox)
    assert row.task_id == lost
    assert "'other' must be defined in 'predefined_queues'" in row.error
    assert {name for name, _ in sqs_stub.requests} == {"GetQueueAttributes", "SendMessageBatch"}


def test_a_predefined_queue_with_the_url_of_another_kind_stops_its_broker_alone(
    sqs_stub: SQSStub, sqlite_url: str, open_outbox: OpenOutbox, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = {"predefined_queues": {"celery": {"url": sqs_stub.queue_url("jobs.fifo")}}}
    brokers = {"wrong": {"url": sqs_stub.url, "transport_options": wrong}}
    outbox = open_outbox(sqs_stub.url, sqlite_url, brokers=brokers)
    kept = send(outbox, outbox_broker="wrong")
    ids = [send(outbox)]
    relay_once(outbox)
    assert sent(sqs_stub) == ids
    assert [(row.task_id, row.attempts) for row in rows(outbox)] == [(kept, 0)]
    assert "must have a name ending with .fifo" in caplog.text


def test_expired_credentials_and_throttling_cost_no_message(
    sqs_stub: SQSStub, sqlite_url: str, open_outbox: OpenOutbox
) -> None:
    outbox = open_outbox(sqs_stub.url, sqlite_url, retry={"base_delay": 0.05})
    ids = [send(outbox) for _ in range(30)]
    sqs_stub.faults += [
        Fault(code="ExpiredTokenException", status=403, times=3),
        Fault(code="ThrottlingException", times=3),
        Fault(code="ServiceUnavailable", status=503, times=3),
        Fault(cut="before doing", times=2),
    ]
    with relaying(outbox):
        wait_until(lambda: rows(outbox) == [])
    assert sorted(sent(sqs_stub)) == sorted(ids)


def test_an_unreachable_sqs_costs_no_attempt(
    sqs_stub: SQSStub,
    sqlite_url: str,
    open_outbox: OpenOutbox,
    tcp_proxy: Callable[[str, int], TcpProxy],
) -> None:
    proxy = tcp_proxy(HOST, sqs_stub.port)
    proxy.refuse()
    sqs_stub.queues["celery"] = []
    # With predefined queues nothing is asked when a connection is made.
    predefined = {"celery": {"url": sqs_stub.queue_url("celery")}}
    options = with_options(predefined_queues=predefined)
    outbox = open_outbox(proxy.through(sqs_stub.url), sqlite_url, **options)
    ids = [send(outbox) for _ in range(3)]
    for _ in range(2):
        relay_once(outbox)
    assert [(row.attempts, row.error) for row in rows(outbox)] == [(0, None)] * 3
    proxy.listen()
    wait_until(lambda: relay_all(outbox))
    assert sorted(sent(sqs_stub)) == sorted(ids)
