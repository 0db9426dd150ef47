"""Signals to a relay process: it ends, pauses and goes on, wherever it is."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from celery_outbox import Outbox
from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.relay.apps import make_due, relay_once, rows, send
from tests.relay.commands import Running, environment, outbox_command, running
from tests.relay.conftest import OpenOutbox
from tests.relay.wire import task_ids
from tests.waiting import wait_until

ENDING = [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT]


@pytest.fixture
def shop(open_outbox: OpenOutbox, redis_url: str, postgresql_url: str) -> Outbox:
    return open_outbox(redis_url, postgresql_url)


@pytest.fixture
def broker(tcp_proxy: Callable[[str, int], TcpProxy], redis_url: str) -> TcpProxy:
    """The wire between the relay and its broker."""
    return tcp_proxy(HOST, urlsplit(redis_url).port or 0)


@pytest.fixture
def database(tcp_proxy: Callable[[str, int], TcpProxy], postgresql_url: str) -> TcpProxy:
    """The wire between the relay and its database."""
    return tcp_proxy(HOST, urlsplit(postgresql_url).port or 0)


@pytest.fixture
def env(broker: TcpProxy, database: TcpProxy, redis_url: str, postgresql_url: str) -> dict[str, str]:
    return environment(
        broker=broker.through(redis_url),
        database=database.through(postgresql_url),
        # What does not end by a signal does not end within a test.
        config={"broker_transport_options": {"socket_timeout": 60}},
    )


def assert_ends_at_once(relay: Running, number: signal.Signals) -> None:
    began = time.monotonic()
    relay.send(number)
    assert relay.wait() == 0, relay.output
    assert time.monotonic() - began < 2
    assert "The relay ends" in relay.output
    assert "Traceback" not in relay.output


def has_fallen_silent(wire: TcpProxy) -> Callable[[], bool]:
    """Ask whether nothing has been sent since the question before."""
    seen = [-1]

    def is_silent() -> bool:
        seen.append(wire.passed[False])
        return seen[-1] == seen[-2]

    return is_silent


def pause(relay: Running, database: TcpProxy) -> None:
    """Pause a relay; it asks its database no more, which it has done every 20 ms."""
    relay.send(signal.SIGUSR2)
    wait_until(has_fallen_silent(database), 15, "the end of the questions", interval=0.5)


@pytest.mark.parametrize("number", ENDING)
def test_a_relay_that_waits_for_work_ends_at_once(
    number: signal.Signals, shop: Outbox, env: dict[str, str], tmp_path: Path
) -> None:
    send(shop)
    with running(outbox_command("relay", "--sleep", "1h"), tmp_path, env) as relay:
        wait_until(lambda: not rows(shop), 30, "the first delivery")
        assert_ends_at_once(relay, number)


@pytest.mark.parametrize("number", ENDING)
def test_a_relay_that_waits_for_its_broker_ends_at_once_and_keeps_the_rows(
    number: signal.Signals, shop: Outbox, broker: TcpProxy, env: dict[str, str], tmp_path: Path
) -> None:
    broker.refuse()
    stored = send(shop)
    with running(outbox_command("relay", "--sleep", "1h"), tmp_path, env) as relay:
        relay.wait_for("The broker 'shop' cannot be used")
        assert_ends_at_once(relay, number)
    assert [(row.task_id, row.attempts, row.claim_token) for row in rows(shop)] == [(stored, 0, None)]


@pytest.mark.parametrize("number", ENDING)
def test_a_relay_that_waits_for_its_database_ends_at_once(
    number: signal.Signals, shop: Outbox, database: TcpProxy, env: dict[str, str], tmp_path: Path
) -> None:
    database.refuse()
    with running(outbox_command("relay", "--sleep", "1h"), tmp_path, env) as relay:
        relay.wait_for("The database 'default' cannot be used")
        assert_ends_at_once(relay, number)


@pytest.mark.parametrize("is_of_the_broker", [False, True])
def test_a_relay_that_waits_for_an_answer_that_does_not_come_ends_soon(
    is_of_the_broker: bool,
    shop: Outbox,
    broker: TcpProxy,
    database: TcpProxy,
    env: dict[str, str],
    tmp_path: Path,
) -> None:
    wire = broker if is_of_the_broker else database
    wire.stall()
    send(shop)
    with running(outbox_command("relay", "--sleep", "0.1s"), tmp_path, env) as relay:
        relay.wait_for("Relaying from")
        wait_until(lambda: wire.live, 30, "the question")
        began = time.monotonic()
        relay.send(signal.SIGTERM)
        assert relay.wait() == 0, relay.output
        assert time.monotonic() - began < 5
        assert "leaves a batch behind" not in relay.output


def test_a_paused_relay_takes_nothing_until_it_is_told_to_go_on(
    shop: Outbox, database: TcpProxy, env: dict[str, str], redis_url: str, tmp_path: Path
) -> None:
    stored = [send(shop)]
    with running(outbox_command("relay", "--sleep", "0.02"), tmp_path, env) as relay:
        wait_until(lambda: not rows(shop), 30, "the first delivery")
        pause(relay, database)
        notified = database.passed[True]
        stored.append(send(shop))
        wait_until(lambda: database.passed[True] > notified, 10, "the commit's notification")
        wait_until(has_fallen_silent(database), interval=0.5)
        assert [(row.task_id, row.attempts) for row in rows(shop)] == [(stored[1], 0)]
        relay.send(signal.SIGCONT)
        wait_until(lambda: not rows(shop), 10, "the delivery after the pause")
        assert task_ids(redis_url) == stored
        assert_ends_at_once(relay, signal.SIGTERM)


def test_a_pause_ends_by_going_on_even_where_nothing_is_asked_for_long(
    shop: Outbox, database: TcpProxy, env: dict[str, str], tmp_path: Path
) -> None:
    with running(outbox_command("relay", "--sleep", "1h"), tmp_path, env) as relay:
        send(shop)
        wait_until(lambda: not rows(shop), 30, "the first delivery")
        pause(relay, database)
        send(shop)
        relay.send(signal.SIGCONT)
        wait_until(lambda: not rows(shop), 10, "the delivery after the pause")


def test_a_batch_that_is_under_way_is_settled_in_a_pause(
    shop: Outbox, broker: TcpProxy, env: dict[str, str], redis_url: str, tmp_path: Path
) -> None:
    send(shop)
    with running(outbox_command("relay", "--sleep", "0.02"), tmp_path, env) as relay:
        wait_until(lambda: not rows(shop), 30, "the first delivery")
        broker.hold_replies()
        send(shop)
        wait_until(lambda: len(task_ids(redis_url)) == 2, 10, "the batch at the broker")
        relay.send(signal.SIGUSR2)
        broker.resume()
        wait_until(lambda: not rows(shop), 10, "the end of the batch")
        assert relay.popen.poll() is None


@pytest.mark.parametrize("number", ENDING)
def test_a_paused_relay_ends_at_once(
    number: signal.Signals,
    shop: Outbox,
    database: TcpProxy,
    env: dict[str, str],
    tmp_path: Path,
) -> None:
    send(shop)
    with running(outbox_command("relay", "--sleep", "0.02"), tmp_path, env) as relay:
        wait_until(lambda: not rows(shop), 30, "the first delivery")
        pause(relay, database)
        kept = send(shop)
        assert_ends_at_once(relay, number)
    assert [(row.task_id, row.attempts, row.claim_token) for row in rows(shop)] == [(kept, 0, None)]


@pytest.mark.parametrize("number", ENDING)
def test_a_relay_with_a_batch_under_way_finishes_it_and_takes_no_other(
    number: signal.Signals,
    shop: Outbox,
    broker: TcpProxy,
    env: dict[str, str],
    redis_url: str,
    tmp_path: Path,
) -> None:
    send(shop)
    with running(outbox_command("relay", "--batch", "5", "--sleep", "1h"), tmp_path, env) as relay:
        wait_until(lambda: not rows(shop), 30, "the first delivery")
        broker.hold_replies()
        task = shop.app.tasks["shop.add"]
        stored = [result.id for result in shop.bulk(task.s(number, 1) for number in range(600))]
        wait_until(lambda: len(task_ids(redis_url)) == 6, 10, "the batch at the broker")
        relay.send(number)
        broker.resume()
        assert relay.wait() == 0, relay.output
    # Some may have followed before the signal was seen; whatever was begun is finished.
    delivered = task_ids(redis_url)[1:]
    assert len(delivered) % 5 == 0
    assert len(delivered) < 600
    assert [*delivered, *(row.task_id for row in rows(shop))] == stored
    assert all(row.claim_token is None and row.attempts == 0 for row in rows(shop))


def test_a_second_signal_ends_a_relay_whose_broker_hangs_and_its_rows_stay(
    shop: Outbox, broker: TcpProxy, env: dict[str, str], redis_url: str, tmp_path: Path
) -> None:
    stored = [send(shop)]
    with running(outbox_command("relay"), tmp_path, env) as relay:
        wait_until(lambda: not rows(shop), 30, "the first delivery")
        broker.stall()
        stored.append(send(shop))
        wait_until(lambda: rows(shop)[0].claim_token, 10, "the claim")
        sent = []

        def has_ended() -> bool:
            # Signals of one kind that come at once are one to the process.
            relay.send(signal.SIGTERM)
            sent.append(relay.popen.poll())
            return sent[-1] is not None

        wait_until(has_ended, 5, "the end", interval=0.3)
        assert len(sent) > 2
        assert relay.wait() == 0
        assert "leaves a batch behind" in relay.output
    (left,) = rows(shop)
    assert left.task_id == stored[1]
    assert left.claim_token
    make_due(shop)
    relay_once(shop)
    assert task_ids(redis_url) == stored
    assert rows(shop) == []
