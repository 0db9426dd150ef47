"""A relay that ends by itself: after so many messages, so long, or with so much memory."""

import resource
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from celery_outbox import Outbox
from celery_outbox.commands.relay import relay
from celery_outbox.relay.limits import memory_limit
from celery_outbox.storage.database import Database
from tests.relay.apps import rows, rows_of, send
from tests.relay.commands import ROOT, environment, outbox_command, run, running
from tests.relay.conftest import OpenOutbox
from tests.relay.fakes import Broker, Gate, relay_of
from tests.relay.fakes import running as running_here
from tests.relay.wire import task_ids
from tests.storage.rows import add, make_message
from tests.waiting import wait_until

MB = 2**20
MACHINE = psutil.virtual_memory().total


@pytest.fixture
def shop(open_outbox: OpenOutbox, redis_url: str, postgresql_url: str) -> Outbox:
    return open_outbox(redis_url, postgresql_url)


@pytest.fixture
def env(redis_url: str, postgresql_url: str) -> dict[str, str]:
    return environment(broker=redis_url, database=postgresql_url)


@pytest.mark.parametrize("concurrency", ["1", "4"])
def test_it_takes_as_many_messages_as_it_was_told_to_and_ends(
    concurrency: str, shop: Outbox, env: dict[str, str], redis_url: str
) -> None:
    stored = [send(shop) for _ in range(20)]
    done = run(
        outbox_command("relay", "--max-jobs", "7", "--batch", "5", "--concurrency", concurrency), env
    )
    assert done.returncode == 0, done.stderr
    delivered = task_ids(redis_url)
    assert len(delivered) == len(set(delivered)) == 7
    assert {row.task_id for row in rows(shop)} == set(stored) - set(delivered)
    assert all(row.claim_token is None and row.attempts == 0 for row in rows(shop))


def test_failed_attempts_count_as_taken_too(shop: Outbox, env: dict[str, str]) -> None:
    for _ in range(20):
        send(shop, exchange="without a queue", routing_key="x")
    done = run(outbox_command("relay", "--max-jobs", "7", "--batch", "5", "--sleep", "0.05"), env)
    assert done.returncode == 0, done.stderr
    assert sum(row.attempts for row in rows(shop)) == 7
    assert len(rows(shop)) == 20


def test_it_ends_when_its_time_is_over(
    shop: Outbox, env: dict[str, str], redis_url: str, tmp_path: Path
) -> None:
    stored = send(shop)
    with running(outbox_command("relay", "--max-time", "1s", "--sleep", "1h"), tmp_path, env) as it:
        it.wait_for("Relaying from")
        began = time.monotonic()
        assert it.wait() == 0, it.output
        assert 0.5 < time.monotonic() - began < 5
    assert task_ids(redis_url) == [stored]


def test_it_ends_with_a_code_of_its_own_when_it_uses_too_much_memory(
    shop: Outbox, env: dict[str, str], redis_url: str
) -> None:
    stored = [send(shop) for _ in range(3)]
    done = run(outbox_command("relay", "--memory", "1"), env)
    assert done.returncode == 12, done.stderr
    assert "MB of memory, its limit is 1 MB" in done.stderr
    assert task_ids(redis_url) == stored
    assert rows(shop) == []


@pytest.mark.parametrize("memory", ["60%", "100%", "0", "4096.5"])
def test_a_limit_of_memory_is_megabytes_or_a_share(
    memory: str, shop: Outbox, env: dict[str, str], redis_url: str
) -> None:
    stored = send(shop)
    done = run(outbox_command("relay", "--memory", memory, "--stop-when-empty"), env)
    assert done.returncode == 0, done.stderr
    assert task_ids(redis_url) == [stored]


WRONG = {
    "no batch": ("--batch", "0", "1<=x<=1000"),
    "a batch too large": ("--batch", "1001", "1<=x<=1000"),
    "no wait": ("--sleep", "0", "expected more than zero"),
    "a wait before now": ("--sleep", "-1", "a number of seconds or text such as 90, 90s, 15m"),
    "no threads": ("--concurrency", "0", "1<=x<=100"),
    "too many threads": ("--concurrency", "101", "1<=x<=100"),
    "less than no messages": ("--max-jobs", "-1", "x>=0"),
    "less than no time": ("--max-time", "-1", "a number of seconds or text such as 90, 90s, 15m"),
    "more memory than there is": ("--memory", "120%", "expected megabytes such as 128, or 60%"),
    "no number": ("--memory", "x", "expected megabytes such as 128, or 60%"),
    "less than no memory": ("--memory", "-5", "expected megabytes such as 128, or 60%"),
    "a number without end": ("--memory", "9" * 400, "expected megabytes such as 128, or 60%"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value_is_refused_with_what_would_be_right(case: str) -> None:
    option, value, expected = WRONG[case]
    done = CliRunner().invoke(relay, [option, value])
    assert done.exit_code == 2
    assert f"Invalid value for '{option}'" in done.stderr
    assert expected in " ".join(done.stderr.split())


def test_more_threads_than_the_pool_has_connections_are_refused(
    shop: Outbox, env: dict[str, str]
) -> None:
    done = run(outbox_command("relay", "--concurrency", "16"), env)
    assert done.returncode == 1
    assert "expected a connection for each of 16 threads, found a pool of 15" in done.stderr


def group(root: Path, path: str, limit: str) -> None:
    """Make a file as Linux shows it."""
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{limit}\n")


def test_megabytes_are_what_they_are() -> None:
    assert memory_limit(128, is_share=False) == 128 * MB
    assert memory_limit(0.5, is_share=False) == MB // 2


def test_without_any_group_a_share_is_one_of_the_machine(tmp_path: Path) -> None:
    assert memory_limit(50, is_share=True, root=tmp_path) == MACHINE // 2


@pytest.mark.parametrize(
    ("told", "files"),
    {
        "a container": ("0::/", {"memory.max": 64}),
        "a container that sees its host's path": ("0::/docker/abc", {"memory.max": 64}),
        "a service": ("0::/system.slice/relay.service", {"system.slice/relay.service/memory.max": 64}),
        "a slice around it": (
            "0::/shop.slice/relay.service",
            {"shop.slice/memory.max": 64, "shop.slice/relay.service/memory.max": 80},
        ),
        "version 1": (
            "5:cpu,cpuacct:/other\n4:memory:/docker/abc\n0::/",
            {"memory/docker/abc/memory.limit_in_bytes": 64},
        ),
        "version 1 in a container": (
            "4:hugetlb,memory:/docker/abc",
            {"memory/memory.limit_in_bytes": 64},
        ),
    }.values(),
    ids=lambda value: None,
)
def test_a_share_is_one_of_the_smallest_group(told: str, files: dict[str, int], tmp_path: Path) -> None:
    group(tmp_path, "proc/self/cgroup", told)
    for file, limit in files.items():
        group(tmp_path, f"sys/fs/cgroup/{file}", str(limit * MB))
    assert memory_limit(25, is_share=True, root=tmp_path) == 16 * MB


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"], ids=["version 2", "version 1"])
def test_a_group_without_a_limit_limits_nothing(limit: str, tmp_path: Path) -> None:
    group(tmp_path, "proc/self/cgroup", "4:memory:/\n0::/")
    group(tmp_path, "sys/fs/cgroup/memory.max", limit)
    group(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", limit)
    assert memory_limit(100, is_share=True, root=tmp_path) == MACHINE


def test_a_share_is_one_of_the_limit_of_the_process_itself() -> None:
    script = (
        "from celery_outbox.relay.limits import memory_limit; print(memory_limit(10, is_share=True))"
    )
    own = 2000 * MB
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (own, own)),
    )
    assert int(done.stdout) == own // 10


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("count", [1, 25, 60])
def test_no_more_messages_are_taken_than_were_asked_for(
    concurrency: int, count: int, database: Database
) -> None:
    broker = Broker()
    add(database, *(make_message(f"{number}", broker="a") for number in range(100)))
    relay_of([database], {"a": broker}, batch=10, concurrency=concurrency, max_jobs=count).run()
    assert len(broker.taken) == count
    assert len(rows_of(database)) == 100 - count


def test_what_was_claimed_ahead_is_published_though_nothing_more_may_be_taken(
    database: Database,
) -> None:
    broker, gate = Broker(), Gate()
    broker.answer = gate.accept
    add(database, *(make_message(f"{number}", broker="a") for number in range(100)))
    with running_here([database], {"a": broker}, batch=10, max_jobs=20) as one:
        wait_until(lambda: sum(bool(row.claim_token) for row in rows_of(database)) == 20)
        pulse = one.relay.pulse
        before = pulse.watched_at
        wait_until(lambda: pulse.watched_at != before, message="another round of the main loop")
        gate.open()
        one.wait()
    assert len(broker.taken) == 20
