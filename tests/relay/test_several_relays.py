"""Several relay processes at one table: whoever is quicker, each message arrives once."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from celery_outbox import Outbox
from tests.publishers.sqs_stub import SQSStub
from tests.publishers.sqs_wire import envelope
from tests.relay.apps import rows, send
from tests.relay.commands import Running, environment, outbox_command, running
from tests.relay.conftest import OpenOutbox
from tests.relay.wire import redis_envelopes, task_ids
from tests.storage.rows import hours_from_now, make_message
from tests.waiting import wait_until

#: What the rows of a kind differ in from fresh ones.
Kinds = Mapping[str, Mapping[str, Any]]

DELIVERED = re.compile(r"it has delivered (\d+) message")


@contextmanager
def relays(
    count: int, directory: Path, env: dict[str, str], *options: str
) -> Iterator[Sequence[Running]]:
    """Run relay processes that have all begun."""
    command = outbox_command("relay", "--sleep", "0.05", *options)
    with ExitStack() as stack:
        started = [stack.enter_context(running(command, directory, env)) for _ in range(count)]
        for each in started:
            each.wait_for("Relaying from")
        yield started


def end_all(started: Sequence[Running]) -> int:
    """End relays; how many messages they say they have delivered."""
    for each in started:
        each.popen.terminate()
    assert [each.wait() for each in started] == [0] * len(started)
    for each in started:
        said = [line for line in each.output.splitlines() if " INFO/" not in line]
        assert [line for line in said if "Relaying" not in line] == []
    return sum(int(DELIVERED.findall(each.output)[-1]) for each in started)


def store(outbox: Outbox, count: int, kinds: Kinds) -> list[str]:
    """Store ``count`` rows of each kind in one transaction; their task ids."""
    database = outbox.databases["default"]
    t, stored = database.tables.messages, list[str]()
    with database.begin() as connection:
        for kind, values in kinds.items():
            ids = [f"{kind} {number}" for number in range(count)]
            database.store.add(connection, [make_message(each) for each in ids])
            if values:
                chosen = sa.update(t).where(t.c.task_id.startswith(kind))
                connection.execute(chosen.values(dict(values)))
            stored += ids
    return stored


def failed() -> Mapping[str, Any]:
    """A row whose attempts have failed, due again for long, so that it comes first."""
    return {"attempts": 3, "error": "gone", "scheduled_at": hours_from_now(-1)}


@pytest.mark.parametrize(("count", "concurrency"), [(2, "1"), (4, "4")])
def test_fresh_tried_and_delayed_rows_leave_once_whoever_takes_them(
    count: int,
    concurrency: str,
    database_url: str,
    redis_url: str,
    open_outbox: OpenOutbox,
    tmp_path: Path,
) -> None:
    outbox = open_outbox(redis_url, database_url)
    env = environment(broker=redis_url, database=database_url)
    arguments = "--batch", "10", "--concurrency", concurrency
    with relays(count, tmp_path, env, *arguments) as started:
        now = hours_from_now(0)
        kinds = {
            "fresh": {},
            "failed": failed(),
            "delayed": {"deliver_at": now, "scheduled_at": now},
        }
        stored = store(outbox, 200, kinds)
        # Each of these is a commit, and wakes all of them, on PostgreSQL at the same moment.
        stored += [send(outbox) for _ in range(50)]
        wait_until(lambda: not rows(outbox), 60, "every delivery", interval=0.1)
        assert end_all(started) == len(stored)
    assert Counter(task_ids(redis_url)) == Counter(stored)


@pytest.mark.parametrize("count", [2, 4])
def test_rows_that_are_put_back_for_sqs_leave_once_and_cost_no_attempt(
    count: int,
    database_url: str,
    sqs_stub: SQSStub,
    open_outbox: OpenOutbox,
    tmp_path: Path,
) -> None:
    outbox = open_outbox(sqs_stub.url, database_url)
    env = environment(broker=sqs_stub.url, database=database_url)
    with relays(count, tmp_path, env, "--batch", "10") as started:
        due = hours_from_now(-1)
        kinds = {
            "fresh": {},
            "failed": failed(),
            "held by SQS": {"deliver_at": hours_from_now(0.2), "scheduled_at": due},
            # What lies beyond SQS's 900 seconds comes in front of all, and must go back.
            "too early": {"deliver_at": hours_from_now(2), "scheduled_at": hours_from_now(-2)},
        }
        stored = store(outbox, 40, kinds)
        expected = [each for each in stored if not each.startswith("too early")]
        wait_until(lambda: len(rows(outbox)) == 40, 60, "the deliveries", interval=0.1)
        wait_until(lambda: all(is_put_back(row) for row in rows(outbox)), 10, "the deferrals")
        assert end_all(started) == len(expected)
    arrived = [envelope(body)["headers"]["id"] for body in sqs_stub.bodies()]
    assert Counter(arrived) == Counter(expected)
    assert {row.task_id for row in rows(outbox)} == set(stored) - set(expected)


def is_put_back(row: Any) -> bool:
    return (row.attempts, row.error, row.claim_token, row.scheduled_at) == (
        0,
        None,
        None,
        row.deliver_at,
    )


def test_a_commit_that_comes_late_is_delivered_whatever_was_delivered_meanwhile(
    postgresql_or_mariadb: str, redis_url: str, open_outbox: OpenOutbox, tmp_path: Path
) -> None:
    outbox = open_outbox(redis_url, postgresql_or_mariadb)
    database = outbox.databases["default"]
    env = environment(broker=redis_url, database=postgresql_or_mariadb)
    with relays(2, tmp_path, env) as started, database.begin() as late:
        database.store.add(late, [make_message("late")])
        early = store(outbox, 50, {"early": {}})
        wait_until(lambda: len(redis_envelopes(redis_url)) == 50, 20, "what has committed")
        with pytest.raises(ZeroDivisionError), database.begin() as never:
            database.store.add(never, [make_message(f"never {number}") for number in range(10)])
            raise ZeroDivisionError
        late.commit()
        wait_until(lambda: not rows(outbox), 2, "the late one")
        assert end_all(started) == 51
    assert sorted(task_ids(redis_url)) == sorted([*early, "late"])


@pytest.fixture(params=["postgresql", "mariadb"])
def postgresql_or_mariadb(request: pytest.FixtureRequest) -> str:
    get: Callable[[str], str] = request.getfixturevalue
    return get(f"{request.param}_url")
