"""A relay process through outages: what it says of them, and how soon it delivers afterwards."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from celery_outbox import Outbox
from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.relay.apps import rows, send
from tests.relay.commands import Running, environment, outbox_command, running
from tests.relay.conftest import OpenOutbox
from tests.relay.wire import task_ids
from tests.storage.rows import change, hours_from_now
from tests.waiting import wait_until

#: How long an outage is, seconds: as long as the promise says where CI=true.
OUTAGE = 10.0 if os.environ.get("CI") == "true" else 3.0
WHAT = ["database", "broker", "both"]
BEGINS = "The {} cannot be used, trying again"
ENDS = r"The {} can be used again, after (\d+\.\d) seconds and (\d+) failure\(s\)"
NAMES = {"database": "database 'default'", "broker": "broker 'shop'"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A relay process that has delivered once, and the wires to its two servers."""

    outbox: Outbox
    relay: Running
    wires: dict[str, TcpProxy]
    sleep: float
    stored: list[str]

    def send(self) -> None:
        """Store one, and remember it."""
        self.stored.append(send(self.outbox))

    def broken(self, what: str) -> Sequence[str]:
        """Cut the wires of a case; which they are."""
        # The broker first: without a database nobody asks for it.
        names = list(self.wires) if what == "both" else [what]
        for name in names:
            self.wires[name].refuse()
            self.wires[name].cut()
            self.send()
            self.relay.wait_for(BEGINS.format(NAMES[name]))
            # What was in hand has been put back: otherwise it waits for its lease.
            wait_until(lambda: not any(row.claim_token for row in rows(self.outbox)), 10, "the end")
        return names

    def mend(self) -> None:
        for wire in self.wires.values():
            wire.listen()


OpenSite = Callable[[str, str, float], AbstractContextManager[Site]]


@pytest.fixture
def site_of(
    open_outbox: OpenOutbox, tcp_proxy: Callable[[str, int], TcpProxy], tmp_path: Path
) -> OpenSite:
    @contextmanager
    def open_(broker: str, database: str, sleep: float) -> Iterator[Site]:
        urls = {"broker": broker, "database": database}
        wires = {name: tcp_proxy(HOST, urlsplit(url).port or 0) for name, url in urls.items()}
        outbox = open_outbox(broker, database)
        env = environment(**{name: wires[name].through(url) for name, url in urls.items()})
        command = outbox_command("relay", "--sleep", str(sleep))
        with running(command, tmp_path, env) as relay:
            site = Site(outbox=outbox, relay=relay, wires=wires, sleep=sleep, stored=[])
            site.send()
            wait_until(lambda: not rows(outbox), 30, "the first delivery")
            yield site

    return open_


def lines(relay: Running, level: str) -> list[str]:
    """What a relay has logged at a level."""
    logged = relay.output.splitlines()
    return [line.partition("] ")[2] for line in logged if f" {level}/" in line]


def has_passed(seconds: float) -> Callable[[], bool]:
    """Ask whether so long an outage is over."""
    ends = time.monotonic() + seconds
    return lambda: time.monotonic() >= ends


@pytest.mark.parametrize("what", WHAT)
def test_an_outage_is_one_line_when_it_begins_and_one_with_counts_when_it_ends(
    what: str, site_of: OpenSite, redis_url: str, postgresql_url: str
) -> None:
    with site_of(redis_url, postgresql_url, 0.2) as site:
        names = site.broken(what)
        over = has_passed(OUTAGE)

        def is_over() -> bool:
            site.send()  # commits go on, and wake the relay when they can
            return over()

        wait_until(is_over, OUTAGE + 10, "the outage", interval=0.1)
        site.mend()
        wait_until(lambda: not rows(site.outbox), 20, "the deliveries")
        site.relay.send(signal.SIGTERM)
        assert site.relay.wait() == 0
    assert sorted(task_ids(redis_url)) == sorted(site.stored)
    began = sorted(BEGINS.format(NAMES[name]) for name in names)
    assert sorted(line.partition(": ")[0] for line in lines(site.relay, "ERROR")) == began
    others = lines(site.relay, "INFO")
    for name in names:
        (ended,) = [line for line in others if re.fullmatch(ENDS.format(NAMES[name]), line)]
        others.remove(ended)
        found = re.fullmatch(ENDS.format(NAMES[name]), ended)
        assert found is not None
        assert OUTAGE - 1 < float(found[1]) < OUTAGE + 5
        # It has tried once per --sleep, more or less, and no more; a broker only with a database.
        assert 1 <= int(found[2]) <= OUTAGE / (0.75 * site.sleep) + 2
    assert [line.split(" ")[0] for line in others] == ["Relaying", "The"]
    assert others[-1].startswith("The relay ends; it has delivered")
    assert lines(site.relay, "WARNING") == []


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize(
    ("broker_url", "database_url"),
    [("redis", "postgresql"), ("rabbitmq", "mariadb")],
    indirect=True,
)
def test_what_was_not_tried_leaves_within_two_sleeps_of_the_recovery_and_the_tried_at_their_time(
    what: str, site_of: OpenSite, broker_url: str, database_url: str
) -> None:
    with site_of(broker_url, database_url, 1.0) as site:
        database = site.outbox.databases["default"]
        site.broken(what)
        tried = send(site.outbox)
        its_time = hours_from_now(4 / 3600)
        change(database, tried, attempts=2, error="gone", scheduled_at=its_time)
        untried = {send(site.outbox) for _ in range(20)} | set(site.stored)
        site.mend()
        mended = time.monotonic()
        wait_until(lambda: not untried & left(site.outbox), 20, "those not tried")
        assert time.monotonic() - mended < 2 * site.sleep
        assert left(site.outbox) == {tried}
        wait_until(lambda: not rows(site.outbox), 20, "the tried one")
        late = (hours_from_now(0) - its_time).total_seconds()
        assert 0 <= late < 2 * site.sleep
    assert sorted(task_ids(broker_url)) == sorted([*untried, tried])


def left(outbox: Outbox) -> set[str]:
    return {row.task_id for row in rows(outbox)}


@pytest.fixture
def broker_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url
