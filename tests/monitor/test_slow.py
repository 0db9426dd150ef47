"""``monitor`` of messages that stay although a relay runs, and that no delivery has failed for."""

from typing import Any

import pytest

from celery_outbox.storage.database import Database
from tests.monitor.conftest import Call
from tests.monitor.test_command import run_relay
from tests.storage.rows import add, change, hours_from_now, make_message

SAID = "SLOW: messages for the broker 'shop' have been due for 2 h"


def test_messages_that_a_running_relay_leaves_are_told_of(monitor: Call, shop: Database) -> None:
    add(shop, make_message())
    change(shop, created_at=hours_from_now(-2.01), scheduled_at=hours_from_now(-2.01))
    assert "SLOW" not in monitor("shop").stdout, "no relay runs, which is said instead"
    run_relay(shop)
    done = monitor("shop")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[1].startswith(SAID)
    assert "see its log" in done.stdout


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"error": "Refused", "attempts": 1, "created_at": hours_from_now(-2.01)},
        {"deliver_at": hours_from_now(1), "scheduled_at": hours_from_now(1)},
    ],
    ids=["fresh", "failing", "delayed"],
)
def test_messages_that_are_fresh_failing_or_delayed_are_not_slow(
    row: dict[str, Any], monitor: Call, shop: Database
) -> None:
    add(shop, make_message())
    if row:
        change(shop, **row)
    run_relay(shop)
    assert "SLOW" not in monitor("shop").stdout
