"""Relays that die, stall or come late: the same id again, and nothing of another owner's touched."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from celery_outbox import Outbox
from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.relay.apps import relay_once, rows, send
from tests.relay.commands import Running, environment, outbox_command, running
from tests.relay.conftest import OpenOutbox
from tests.relay.wire import redis_envelopes, task_ids
from tests.storage.rows import change, claim, hours_from_now
from tests.waiting import wait_until

MakeProxy = Callable[[str, int], TcpProxy]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A relay process that has delivered once, through a proxy, and an outbox beside it."""

    relay: Running
    proxy: TcpProxy
    outbox: Outbox
    redis_url: str
    first: str

    def reserved(self) -> list[Any]:
        """The rows that a relay holds."""
        return [row for row in rows(self.outbox) if row.claim_token is not None]


@pytest.fixture
def stage(
    database_url: str,
    redis_url: str,
    open_outbox: OpenOutbox,
    tcp_proxy: MakeProxy,
    tmp_path: Path,
) -> Iterator[Stage]:
    """Start a relay process with a lease of two seconds and wait for its first delivery."""
    proxy = tcp_proxy(HOST, int(redis_url.rpartition("/")[0].rpartition(":")[2]))
    outbox = open_outbox(redis_url, database_url, retry_after=2)
    env = environment(
        broker=proxy.through(redis_url), database=database_url, settings={"retry_after": 2}
    )
    first = send(outbox)
    with running(outbox_command("relay", "--sleep", "0.05s"), tmp_path, env) as relay:
        wait_until(lambda: not rows(outbox), 30, "the first delivery")
        yield Stage(relay=relay, proxy=proxy, outbox=outbox, redis_url=redis_url, first=first)


def test_a_relay_killed_between_publish_and_settle_delivers_the_same_again(stage: Stage) -> None:
    stage.proxy.swallow_replies()
    stored = send(stage.outbox, countdown=1, headers={"tenant": "a"}, expires=900)
    wait_until(lambda: task_ids(stage.redis_url) == [stage.first, stored], 15, "the publish")
    stage.relay.send(signal.SIGKILL)
    stage.relay.wait()
    assert [row.task_id for row in rows(stage.outbox)] == [stored]
    wait_until(lambda: relay_once(stage.outbox) or not rows(stage.outbox), 10, "the lease's end")
    _, once, again = redis_envelopes(stage.redis_url)
    assert once["headers"] == again["headers"]
    assert once["body"] == again["body"]
    del once["properties"]["delivery_tag"], again["properties"]["delivery_tag"]
    del once["properties"]["expiration"], again["properties"]["expiration"]
    assert once["properties"] == again["properties"]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_nobody_gets_a_message_before_the_lease_of_a_killed_relay_has_ended(stage: Stage) -> None:
    stage.proxy.stall()
    send(stage.outbox)
    (row,) = wait_until(stage.reserved, 15, "the claim")
    stage.relay.send(signal.SIGKILL)
    stage.relay.wait()
    change(stage.outbox.databases["default"], lease_until=hours_from_now(1))
    relay_once(stage.outbox)
    (after,) = rows(stage.outbox)
    assert (after.claim_token, after.attempts) == (row.claim_token, 1)
    assert task_ids(stage.redis_url) == [stage.first]


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_what_a_relay_does_after_its_lease_changes_nothing_of_the_next_owners(
    stage: Stage,
) -> None:
    stage.proxy.stall()
    late, unsent = send(stage.outbox), send(stage.outbox)
    wait_until(stage.reserved, 15, "the claim")
    stage.relay.send(signal.SIGSTOP)
    owner = wait_until(lambda: next_owner(stage.outbox), 10, "the lease's end")
    before = {row.task_id: row for row in rows(stage.outbox)}
    stage.relay.send(signal.SIGCONT)
    stage.proxy.resume()
    stage.relay.wait_for("The lease of a batch ended before it was settled")
    after = {row.task_id: row for row in rows(stage.outbox)}
    assert {after[each].claim_token for each in owner} == {before[each].claim_token for each in owner}
    assert all(after[each] == before[each] for each in owner)
    assert late in {*owner, *task_ids(stage.redis_url)}
    assert set(after) | set(task_ids(stage.redis_url)) >= {late, unsent}


def next_owner(outbox: Outbox) -> list[str]:
    """Claim for a long time what has become free."""
    made = claim(outbox.databases["default"])
    return [message.task_id for message in made.messages]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_relay_publishes_nothing_of_a_batch_whose_lease_has_ended(stage: Stage) -> None:
    stage.relay.send(signal.SIGSTOP)
    stored = [send(stage.outbox) for _ in range(3)]
    stage.proxy.stall()
    stage.relay.send(signal.SIGCONT)
    wait_until(lambda: len(stage.reserved()) == 3, 15, "the claim")
    stage.relay.send(signal.SIGSTOP)
    wait_until(lambda: len(next_owner(stage.outbox)) == 3, 10, "the lease's end")
    stage.relay.send(signal.SIGCONT)
    stage.proxy.resume()
    stage.relay.wait_for("The lease of a batch ended before it was settled")
    assert task_ids(stage.redis_url) == [stage.first, stored[0]]


def test_a_signal_lets_the_batch_be_finished(
    sqlite_url: str,
    redis_url: str,
    open_outbox: OpenOutbox,
    tcp_proxy: MakeProxy,
    tmp_path: Path,
) -> None:
    proxy = tcp_proxy(HOST, int(redis_url.rpartition("/")[0].rpartition(":")[2]))
    outbox = open_outbox(redis_url, sqlite_url)
    first = send(outbox)
    env = environment(broker=proxy.through(redis_url), database=sqlite_url)
    command = outbox_command("relay", "--batch", "5", "--sleep", "0.05s")
    with running(command, tmp_path, env) as relay:
        wait_until(lambda: not rows(outbox), 30, "the first delivery")
        relay.send(signal.SIGSTOP)
        proxy.stall()
        stored = [send(outbox) for _ in range(12)]
        relay.send(signal.SIGCONT)
        wait_until(lambda: [row for row in rows(outbox) if row.claim_token], 15, "the claim")
        relay.send(signal.SIGTERM)
        proxy.resume()
        assert relay.wait(timeout=10) == 0, relay.output
    assert task_ids(redis_url) == [first, *stored[:5]]
    assert [(row.task_id, row.attempts, row.claim_token) for row in rows(outbox)] == [
        (task_id, 0, None) for task_id in stored[5:]
    ]
