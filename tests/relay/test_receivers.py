"""Who listens to a relay: told once of each batch, changes nothing by raising; the log tells all."""

import json
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from celery_outbox import Outbox
from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.relay.apps import make_due, relay_once, rows, send
from tests.relay.commands import ROOT, environment, outbox_command, run, running
from tests.relay.conftest import OpenOutbox
from tests.relay.wire import task_ids
from tests.storage.rows import change
from tests.waiting import wait_until

PROJECT = "tests.relay.receiving"


@pytest.fixture
def told(tmp_path: Path) -> Callable[[], list[Any]]:
    file = tmp_path / "told"
    file.touch()
    return lambda: [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def outbox(open_outbox: OpenOutbox, redis_url: str, postgresql_url: str) -> Outbox:
    return open_outbox(redis_url, postgresql_url)


@pytest.fixture
def env(redis_url: str, postgresql_url: str, tmp_path: Path) -> dict[str, str]:
    return environment(broker=redis_url, database=postgresql_url) | {
        "SHOP_TOLD": str(tmp_path / "told")
    }


def test_receivers_that_raise_in_a_relay_process_are_logged_and_change_nothing(
    outbox: Outbox, env: dict[str, str], redis_url: str, told: Callable[[], list[Any]]
) -> None:
    good, bad = [send(outbox) for _ in range(3)], send(outbox)
    change(outbox.databases["default"], bad, message="corrupt")
    done = run(outbox_command("relay", "--once", app=PROJECT), env)
    assert done.returncode == 0, done.stderr
    assert task_ids(redis_url) == good
    (row,) = rows(outbox)
    assert (row.task_id, row.attempts, row.claim_token) == (bad, 1, None)
    assert told() == [
        ["failed", "shop", "default", [row.id]],
        ["published", "shop", "default", sorted(good)],
    ]
    assert "this receiver is out of order" in done.stderr
    assert "this one, too" in done.stderr


def test_nobody_is_told_of_a_batch_whose_relay_was_killed_before_it_was_settled(
    outbox: Outbox,
    env: dict[str, str],
    tcp_proxy: Callable[[str, int], TcpProxy],
    redis_url: str,
    told: Callable[[], list[Any]],
    tmp_path: Path,
) -> None:
    wire = tcp_proxy(HOST, urlsplit(redis_url).port or 0)
    env["SHOP_BROKER"] = wire.through(redis_url)
    first = send(outbox)
    with running(outbox_command("relay", app=PROJECT), tmp_path, env) as relay:
        wait_until(lambda: not rows(outbox), 30, "the first delivery")
        wire.swallow_replies()
        second = send(outbox)
        wait_until(lambda: task_ids(redis_url) == [first, second], 10, "the publish")
        relay.send(signal.SIGKILL)
        relay.wait()
    assert told() == [["published", "shop", "default", [first]]]
    wire.resume()
    make_due(outbox)
    assert run(outbox_command("relay", "--once", app=PROJECT), env).returncode == 0
    # The message has left twice, and is told of once.
    assert task_ids(redis_url) == [first, second, second]
    assert told()[1:] == [["published", "shop", "default", [second]]]


def test_a_failure_is_logged_with_where_and_what_it_was(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    send(outbox)
    bad = [send(outbox, exchange="nowhere", routing_key="x") for _ in range(2)]
    relay_once(outbox)
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert record.name.startswith("celery_outbox.")
    said = record.getMessage()
    assert "Delivery of 2 message(s) failed" in said
    assert "database 'default', broker 'shop'" in said
    assert all(f"shop.add[{each}]" in said for each in bad)
    names = "database", "broker", "row_ids", "task_ids", "task_names"
    assert [getattr(record, name) for name in names] == [
        "default",
        "shop",
        [row.id for row in rows(outbox)],
        bad,
        ["shop.add"],
    ]
    assert record.queues  # type: ignore[attr-defined]


SETS_UP_LOGGING = """
import logging
from celery.signals import setup_logging
from tests.relay.shop import app as app

@setup_logging.connect
def mine(**_):
    logging.basicConfig(format="mine: %(name)s %(message)s", level=logging.INFO)
"""


def test_an_application_that_sets_up_logging_itself_is_let_to_as_celery_does(
    outbox: Outbox, env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "sets_up.py").write_text(SETS_UP_LOGGING)
    env["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    done = run(outbox_command("relay", "--once", app="sets_up"), env)
    assert done.returncode == 0, done.stderr
    assert "mine: celery_outbox.relay.loop Relaying from default to shop" in done.stderr
    assert "INFO/MainProcess" not in done.stderr
