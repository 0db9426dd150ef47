"""A relay as the first process of a container: signals reach it, and leases do not go by its pid."""

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from celery_outbox import Outbox
from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.relay.apps import rows, send
from tests.relay.commands import Running, environment, outbox_command, running
from tests.relay.conftest import OpenOutbox
from tests.relay.wire import task_ids
from tests.waiting import wait_until

#: A process namespace of its own; what it starts is number 1 there.
UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc"]
LEASE = 3.0


def can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(
    not can_unshare(), reason="this machine lets us make no process namespace (unshare --pid)"
)


@pytest.fixture
def broker(tcp_proxy: Callable[[str, int], TcpProxy], redis_url: str) -> TcpProxy:
    """The wire between the relay and its broker."""
    return tcp_proxy(HOST, urlsplit(redis_url).port or 0)


@pytest.fixture
def shop(open_outbox: OpenOutbox, redis_url: str, postgresql_url: str) -> Outbox:
    return open_outbox(redis_url, postgresql_url, retry_after=LEASE)


@pytest.fixture
def env(broker: TcpProxy, redis_url: str, postgresql_url: str) -> dict[str, str]:
    return environment(
        broker=broker.through(redis_url),
        database=postgresql_url,
        settings={"retry_after": LEASE},
        config={"broker_transport_options": {"socket_timeout": 60}},
    )


@contextmanager
def first_process(directory: Path, env: dict[str, str]) -> Iterator[tuple[Running, psutil.Process]]:
    """Run a relay as number 1 of a namespace; ``Running`` is the one that waits for it outside."""
    command = [*UNSHARE, *outbox_command("relay", "--sleep", "0.1")]
    with running(command, directory, env) as outside:
        outside.wait_for("Relaying from")
        (inside,) = psutil.Process(outside.popen.pid).children()
        numbers = Path(f"/proc/{inside.pid}/status").read_text().partition("NSpid:")[2].split("\n")[0]
        assert numbers.split() == [str(inside.pid), "1"]
        yield outside, inside


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_relay_that_is_process_one_ends_by_a_signal(
    number: signal.Signals, shop: Outbox, env: dict[str, str], redis_url: str, tmp_path: Path
) -> None:
    with first_process(tmp_path, env) as (outside, inside):
        stored = send(shop)
        wait_until(lambda: not rows(shop), 30, "the delivery")
        began = time.monotonic()
        inside.send_signal(number)
        assert outside.wait() == 0, outside.output
        assert time.monotonic() - began < 2
    assert "The relay ends" in outside.output
    assert task_ids(redis_url) == [stored]


def test_a_relay_that_is_process_one_is_paused_and_goes_on(
    shop: Outbox, env: dict[str, str], tmp_path: Path
) -> None:
    with first_process(tmp_path, env) as (_, inside):
        send(shop)
        wait_until(lambda: not rows(shop), 30, "the first delivery")
        inside.send_signal(signal.SIGUSR2)
        inside.send_signal(signal.SIGCONT)
        send(shop)
        wait_until(lambda: not rows(shop), 10, "the delivery after the pause")


def test_a_relay_with_the_host_and_the_number_of_a_killed_one_waits_for_its_lease(
    shop: Outbox, broker: TcpProxy, env: dict[str, str], redis_url: str, tmp_path: Path
) -> None:
    with first_process(tmp_path, env) as (outside, inside):
        send(shop)
        wait_until(lambda: not rows(shop), 30, "the first delivery")
        broker.hold_replies()
        stored = send(shop)
        wait_until(lambda: stored in task_ids(redis_url), 10, "the publish")
        (held,) = rows(shop)
        claimed_at = time.monotonic()
        inside.kill()
        assert outside.wait() != 0
    broker.resume()
    with first_process(tmp_path, env):
        # Until the lease has ended the row is what the dead one left.
        wait_until(lambda: rows(shop) != [held], 10, "the end of the lease")
        assert time.monotonic() - claimed_at > LEASE - 1
        wait_until(lambda: not rows(shop), 10, "the second delivery")
    assert task_ids(redis_url)[1:] == [stored, stored]
