"""Two relay processes at one batch: one stops for two leases, the other has it when it comes back."""

import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

from celery_outbox import Outbox
from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.relay.apps import rows, send
from tests.relay.commands import environment, outbox_command, running
from tests.relay.conftest import OpenOutbox
from tests.relay.wire import task_ids
from tests.waiting import wait_until

LEASE = 1.5


def tokens(outbox: Outbox) -> set[str | None]:
    return {row.claim_token for row in rows(outbox)}


def test_a_relay_stopped_for_two_leases_touches_nothing_of_the_process_that_took_over(
    database_url: str,
    redis_url: str,
    open_outbox: OpenOutbox,
    tcp_proxy: Callable[[str, int], TcpProxy],
    tmp_path: Path,
) -> None:
    if database_url.startswith("sqlite"):
        with closing(sqlite3.connect(urlsplit(database_url).path[1:])) as connection:
            # Otherwise one that is stopped while it reads would lock out all who write.
            connection.execute("PRAGMA journal_mode=WAL")
    outbox, port = open_outbox(redis_url, database_url), urlsplit(redis_url).port or 0
    wires = [tcp_proxy(HOST, port), tcp_proxy(HOST, port)]
    envs = [
        environment(
            broker=wire.through(redis_url),
            database=database_url,
            settings={"retry_after": lease},
            config={"broker_transport_options": {"socket_timeout": 100}},
        )
        for wire, lease in zip(wires, (LEASE, 300), strict=True)
    ]
    task, command = outbox.app.tasks["shop.add"], outbox_command("relay", "--sleep", "0.2")
    with (
        running(command, tmp_path, envs[0]) as first,
        running(command, tmp_path, envs[1]) as second,
    ):
        database, warm = outbox.databases["default"], []
        # Nor may one be stopped while it writes its own row.
        wait_until(lambda: len(database.read(database.state.relays)) == 2, 30, "both relays")
        for one, other in ((first, second), (second, first)):
            one.wait_for("Relaying from")
            other.send(signal.SIGSTOP)
            warm.append(send(outbox))
            wait_until(lambda: not rows(outbox), 30, "its first delivery")
            other.send(signal.SIGCONT)
        second.send(signal.SIGSTOP)
        for wire in wires:
            wire.hold_replies()
        stored = [str(each.id) for each in outbox.bulk([task.s(1, 2) for _ in range(4)])]
        wait_until(lambda: len(task_ids(redis_url)) == 6, 10, "the batch at the broker")
        first.send(signal.SIGSTOP)
        stopped_at, (held,) = time.monotonic(), tokens(outbox)
        second.send(signal.SIGCONT)
        wait_until(lambda: len(task_ids(redis_url)) == 10, 20, "the takeover")
        wait_until(lambda: time.monotonic() > stopped_at + 2 * LEASE, 10, "two leases")
        owned = rows(outbox)
        assert held not in tokens(outbox)
        first.send(signal.SIGCONT)
        wires[0].resume()
        first.wait_for("The lease of a batch ended before it was settled: 4 of 4 messages")
        assert rows(outbox) == owned
        wires[1].resume()
        wait_until(lambda: not rows(outbox), 10, "the settlement of the second")
        second.send(signal.SIGSTOP)
        last = send(outbox)  # the first goes on as if nothing had been
        wait_until(lambda: not rows(outbox), 10, "a delivery by the first")
    assert Counter(task_ids(redis_url)) == Counter([*warm, last, *stored, *stored])
