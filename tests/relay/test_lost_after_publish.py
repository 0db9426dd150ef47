"""A database that goes away between publish and settlement, seen by its network and its peers."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from celery_outbox import Outbox
from tests.pages import ROOT
from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.relay.apps import rows_of, send
from tests.relay.commands import environment, outbox_command, running
from tests.relay.test_run_modes import shop_of
from tests.relay.wire import task_ids
from tests.servers import RedisServer
from tests.waiting import wait_until

#: Nobody listens for notifications: those who do knock in their own measure.
PROJECT = """
import os
from celery import Celery
from celery_outbox import Outbox

app = Celery("shop", broker=os.environ["SHOP_BROKER"])
outbox = Outbox(
    app,
    databases={"one": os.environ["SHOP_ONE"], "two": os.environ["SHOP_TWO"]},
    brokers={"reports": os.environ["SHOP_REPORTS"]},
    notify=False,
)
"""
SLEEP = 0.5
#: How long the outage is, seconds: as long as the promise says where CI=true.
OUTAGE = 15.0 if os.environ.get("CI") == "true" else 4.0
#: A rest is a quarter shorter at most; who looks for a restart knocks every two seconds, too.
MOST = OUTAGE / (0.75 * SLEEP) + OUTAGE / 2 + 2


def test_a_database_lost_after_the_publish_is_asked_once_per_sleep_while_the_other_one_flows(
    redis_server: RedisServer,
    postgresql_url: str,
    tcp_proxy: Callable[[str, int], TcpProxy],
    tmp_path: Path,
) -> None:
    broker, reports = redis_server.empty_database(), redis_server.empty_database()
    wire = tcp_proxy(HOST, urlsplit(postgresql_url).port or 0)
    knocks = tcp_proxy(HOST, wire.port)  # accepts also while nobody is behind it, and counts
    answers = tcp_proxy(HOST, urlsplit(broker).port or 0)
    (tmp_path / "two_of_each.py").write_text(PROJECT)
    env = environment(broker=broker, database="") | {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
        "SHOP_ONE": postgresql_url,
        "SHOP_TWO": f"sqlite:///{tmp_path / 'two.db'}",
        "SHOP_REPORTS": reports,
    }
    behind = {"SHOP_ONE": knocks.through(postgresql_url), "SHOP_BROKER": answers.through(broker)}
    command = outbox_command("relay", "--sleep", str(SLEEP), app="two_of_each")
    with shop_of(env) as shop, running(command, tmp_path, env | behind) as relay:
        stored = [send(shop, outbox_database="one")]
        wait_until(lambda: not left(shop, "one"), 30, "the first delivery")
        answers.hold_replies()
        stored.append(send(shop, outbox_database="one"))
        wait_until(lambda: task_ids(broker) == stored, 10, "the second at the broker")
        wire.refuse()
        wire.cut()
        answers.resume()
        relay.wait_for("The database 'one' cannot be used")
        assert left(shop, "one") == stored[1:]
        before, ends = knocks.accepted, time.monotonic() + OUTAGE

        def is_over() -> bool:
            stored.append(send(shop, outbox_database="two"))
            wait_until(lambda: not left(shop, "two"), 4 * SLEEP, "a delivery from the other one")
            return time.monotonic() >= ends

        wait_until(is_over, OUTAGE + 10, "the outage")
        knocked = knocks.accepted - before
        assert OUTAGE / SLEEP / 3 <= knocked <= MOST
        wire.listen()
        wait_until(lambda: not left(shop, "one"), 15, "the settlement")
        relay.send(signal.SIGTERM)
        assert relay.wait() == 0, relay.output
        assert relay.output.count("The database 'one' cannot be used") == 1
    assert task_ids(broker) == stored


def left(shop: Outbox, database: str) -> list[str]:
    return [row.task_id for row in rows_of(shop.databases[database])]
