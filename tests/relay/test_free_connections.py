"""What a relay holds while a broker lets it wait, and which broker its threads talk to."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
import sqlalchemy as sa
from celery import _state, shared_task

from celery_outbox import Outbox
from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.relay.apps import relaying, rows, send
from tests.relay.commands import environment, outbox_command, run
from tests.relay.conftest import OpenOutbox
from tests.relay.wire import task_ids
from tests.storage.rows import add, make_message
from tests.waiting import wait_until


@pytest.mark.parametrize("concurrency", [1, 4])
def test_no_database_connection_is_held_while_a_broker_lets_wait(
    concurrency: int,
    open_outbox: OpenOutbox,
    tcp_proxy: Callable[[str, int], TcpProxy],
    postgresql_url: str,
    redis_url: str,
) -> None:
    wire = tcp_proxy(HOST, urlsplit(redis_url).port or 0)
    outbox = open_outbox(wire.through(redis_url), postgresql_url)
    database, engine = outbox.databases["default"], outbox.settings.databases["default"]
    assert isinstance(engine, sa.Engine)
    assert isinstance(engine.pool, sa.QueuePool)
    with relaying(outbox, concurrency=concurrency, batch=5):
        send(outbox)
        wait_until(lambda: not rows(outbox), 20, "the first delivery")
        wire.hold_replies()
        add(database, *(make_message(f"{number}") for number in range(5 * (concurrency + 2))))
        # Only one thread is connected already; the others wait for the greeting.
        wait_until(lambda: len(task_ids(redis_url)) == 6, 20, "a batch at the broker")
        taken = 5 * (concurrency + 1)  # one is claimed ahead
        wait_until(lambda: held(outbox) == taken, 20, "the other batches")
        wait_until(lambda: engine.pool.checkedout() == 0, 10, "that every connection is free")
        assert held(outbox) == taken
        wire.resume()
        wait_until(lambda: not rows(outbox), 20, "every delivery")


def held(outbox: Outbox) -> int:
    """How many messages a relay has in hand."""
    return sum(row.claim_token is not None for row in rows(outbox))


def test_shared_tasks_of_many_threads_leave_for_the_broker_of_their_app_by_many_threads(
    open_outbox: OpenOutbox, sqlite_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @shared_task(name="shop.shared")
    def shared(number: int) -> int:
        return number

    outbox = open_outbox(redis_url, sqlite_url)
    # Where threads find an app: they have no current one.
    monkeypatch.setattr(_state, "default_app", outbox.app)
    with ThreadPoolExecutor(20) as pool:
        results = pool.map(lambda number: shared.apply_async((number,), via_outbox=True), range(20))
        stored = {result.id for result in results}
    env = environment(broker=redis_url, database=sqlite_url)
    done = run(outbox_command("relay", "--concurrency", "4", "--batch", "2", "--stop-when-empty"), env)
    assert (done.returncode, "cannot be used" in done.stderr) == (0, False), done.stderr
    assert (set(task_ids(redis_url)), len(stored), rows(outbox)) == (stored, 20, [])
