"""What a relay process moves from PostgreSQL to Redis, against a loop of plain calls, and a peer.

Everything is on: a database whose commits reach the disk, NOTIFY, the heartbeat, the defaults of the
command. The peer, the newest django-celery-outbox, is installed into a virtual environment of its own
and relays on the same servers in the same run, with its defaults.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import redis
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.benchmarks.measuring import Ratio, Report, Scale
from tests.benchmarks.stage import QUEUE, Shop, Stage
from tests.benchmarks.storing import ARGUMENTS, USUAL
from tests.pages import ROOT
from tests.waiting import wait_until

PEER = Path(__file__).with_name("peer")
#: What is delivered before the watch starts: processes take a second to begin.
UNTIMED = 0.1
IDLE_SECONDS = 10.0
#: With fewer messages than that nothing of a peer could be said.
SMALLEST = 10_000

Command = Sequence[str]
Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """A shop, and a Redis database whose queue fills."""

    shop: Shop
    client: redis.Redis
    count: int

    def fill(self) -> None:
        """Store the messages; nobody relays them yet."""
        args, kwargs = ARGUMENTS[USUAL]
        left = self.count
        while left > 0:
            with Session(self.shop.engine) as session, session.begin():
                session.execute(sa.text("SELECT 1"))
                for _ in range(min(left, 1000)):
                    self.shop.stored.apply_async(args, kwargs, via_outbox=True)
            left -= 1000
        self.client.delete(QUEUE)


def relay(stage: Stage, scale: Scale) -> Report:
    """One process, two processes, a plain loop and a peer."""
    assert stage.postgresql is not None
    shop = Shop.open(stage, "postgresql")
    contest = Contest(shop=shop, client=shop.redis(), count=scale.relaying)
    command, environment = _our_relay(shop)
    ours, plain, two, peer = list[float](), list[float](), list[float](), list[float]()
    with _peer(stage, scale) as peer_fill_and_relay:
        for _ in range(scale.rounds):
            plain.append(_plain(contest))
            for processes, seconds in ((1, ours), (2, two)):
                contest.fill()
                seconds.append(
                    _relayed(contest.client, contest.count, [command] * processes, environment)
                )
            if peer_fill_and_relay is not None:
                peer.append(peer_fill_and_relay())
    idle = _idle_share(command, environment)
    shop.close()
    ratios = [
        Ratio(name="against plain calls", ours=ours, theirs=plain, times_faster=10),
        Ratio(name="two processes, against one", ours=two, theirs=ours, times_faster=1.2),
    ]
    if peer:
        ratios.append(
            Ratio(name="against django-celery-outbox", ours=ours, theirs=peer, times_faster=12)
        )
    return Report(
        title="A relay process from PostgreSQL to Redis, for each message",
        ratios=ratios,
        notes=[
            f"messages of each round: {contest.count:,}, of the peer and the loop a tenth",
            f"an idle relay uses {idle:.2%} of a core (target 1 %)",
            *([] if peer else ["the peer could not be installed"]),
        ],
    )


def _plain(contest: Contest) -> float:
    """Seconds for each plain call."""
    args, kwargs = ARGUMENTS[USUAL]
    count = max(1, contest.count // 10)
    began = time.perf_counter()
    for _ in range(count):
        contest.shop.plain.apply_async(args, kwargs)
    return (time.perf_counter() - began) / count


def _our_relay(shop: Shop) -> tuple[Command, Environment]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "SHOP_BROKER": shop.stored.app.conf.broker_url,
        "SHOP_DATABASE": shop.engine.url.render_as_string(hide_password=False),
    }
    program = str(Path(sys.executable).with_name("celery-outbox"))
    return [program, "-A", "tests.relay.shop", "relay", "--memory", "0"], environment


def _relayed(
    client: redis.Redis, count: int, commands: Sequence[Command], environment: Environment
) -> float:
    """Seconds for each message, from the first tenth on until all are there."""
    with ExitStack() as stack:
        for command in commands:
            stack.enter_context(_running(command, environment))
        first = wait_until(lambda: _reached(client, count * UNTIMED), 120, interval=0.005)
        last = wait_until(lambda: _reached(client, count), 600, interval=0.005)
    (at_first, begun), (at_last, ended) = first, last
    return (ended - begun) / (at_last - at_first)


def _reached(client: redis.Redis, count: float) -> tuple[int, float] | None:
    there, now = client.llen(QUEUE), time.perf_counter()
    return (there, now) if there >= count else None


@contextmanager
def _running(command: Command, environment: Environment) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def _idle_share(command: Command, environment: Environment) -> float:
    """The share of a core that a relay takes that has nothing to do."""
    with _running(command, environment) as running:
        process = psutil.Process(running.pid)
        # After what it does once, at the beginning.
        wait_until(lambda: process.num_threads() > 3 and process.cpu_percent(interval=1) < 10, 30)
        return process.cpu_percent(interval=IDLE_SECONDS) / 100


@contextmanager
def _peer(stage: Stage, scale: Scale) -> Iterator[Callable[[], float] | None]:
    """Something that fills the peer's table and lets it relay; None where it cannot be installed."""
    directory = stage.directory / "peer"
    python = directory / "bin" / "python"
    packages = ["django-celery-outbox", "psycopg[binary]", "kombu[redis]"]
    steps = [
        [sys.executable, "-m", "venv", str(directory)],
        [str(python), "-m", "pip", "install", "-q", *packages],
    ]
    if scale.relaying < SMALLEST or any(
        subprocess.run(step, check=False, capture_output=True).returncode for step in steps
    ):
        yield None
        return
    url, broker = sa.make_url(stage.database_url("postgresql")), stage.redis.empty_database()
    database = {
        "NAME": url.database,
        "USER": url.username,
        "PASSWORD": url.password,
        "HOST": url.host,
        "PORT": url.port,
    }
    environment = {
        **os.environ,
        "PYTHONPATH": str(PEER),
        "DJANGO_SETTINGS_MODULE": "peer_settings",
        "PEER_DATABASE": json.dumps(database),
        "PEER_BROKER": broker,
        "PEER_ARGUMENTS": json.dumps(ARGUMENTS[USUAL]),
    }
    django = [str(python), "-m", "django"]
    subprocess.run([*django, "migrate"], env=environment, check=True, capture_output=True)
    client, count = redis.Redis.from_url(broker), scale.relaying // 10

    def fill_and_relay() -> float:
        client.delete(QUEUE)
        subprocess.run(
            [str(python), str(PEER / "peer_app.py"), str(count)], env=environment, check=True
        )
        return _relayed(client, count, [[*django, "celery_outbox_relay"]], environment)

    yield fill_and_relay
    client.close()
