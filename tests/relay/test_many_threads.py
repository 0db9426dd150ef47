"""Three relay processes of four threads each, on a backlog that producers still add to."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from celery_outbox import Outbox
from tests.relay.apps import rows
from tests.relay.commands import environment
from tests.relay.conftest import OpenOutbox
from tests.relay.test_contention import DEADLOCKS
from tests.relay.test_several_relays import end_all, relays
from tests.relay.wire import task_ids
from tests.storage.rows import add, make_message
from tests.waiting import wait_until

TOTAL = 3000
PRODUCERS = 3
#: What each producer adds, ten in a transaction, when the relays have begun.
EACH = 500


@pytest.mark.parametrize("server", ["postgresql", "mariadb"])
def test_three_relays_of_four_threads_deliver_once_and_without_a_deadlock_while_rows_are_added(
    server: str,
    request: pytest.FixtureRequest,
    redis_url: str,
    open_outbox: OpenOutbox,
    tmp_path: Path,
) -> None:
    url: str = request.getfixturevalue(f"{server}_url")
    outbox = open_outbox(redis_url, url)
    database = outbox.databases["default"]
    stored = [f"before {number}" for number in range(TOTAL - PRODUCERS * EACH)]
    add(database, *map(make_message, stored))
    before, begun = deadlocks(outbox), threading.Event()

    def produce(name: int) -> list[str]:
        ids = [f"producer {name} {number}" for number in range(EACH)]
        begun.wait(30)
        for first in range(0, EACH, 10):
            add(database, *map(make_message, ids[first : first + 10]))
        return ids

    env = environment(broker=redis_url, database=url)
    with ThreadPoolExecutor(PRODUCERS) as pool:
        added = [pool.submit(produce, name) for name in range(PRODUCERS)]
        with relays(3, tmp_path, env, "--concurrency", "4", "--batch", "20") as started:
            begun.set()
            for each in added:
                stored += each.result(timeout=60)
            wait_until(lambda: not rows(outbox), 60, "every delivery", interval=0.1)
            # It looks through what they say, too.
            assert end_all(started) == TOTAL
    assert Counter(task_ids(redis_url)) == Counter(stored)
    assert len(set(stored)) == TOTAL
    assert deadlocks(outbox) == before


def deadlocks(outbox: Outbox) -> object:
    """How many the server has counted."""
    with outbox.databases["default"].begin() as connection:
        query = DEADLOCKS[connection.dialect.name]
        return connection.execute(sa.text(query)).scalar()
