"""The courses: many messages through one relay process, on whole wires and on wires that break."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import redis
import sqlalchemy as sa

from celery_outbox import Outbox
from celery_outbox.storage.database import Database
from tests.benchmarks.filling import Pattern, fill
from tests.endurance.watching import MB, Watch
from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.relay.apps import make_outbox, rows
from tests.relay.commands import environment, outbox_command, running
from tests.storage.rows import make_message

#: Arguments of about a kilobyte.
ARGUMENTS = {"note": "A thousand characters. " * 43}
#: A wire breaks whenever so many messages have passed.
CUT_EVERY = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """An empty PostgreSQL database, an empty Redis, and a directory for logs."""

    postgresql_url: str
    redis_url: str
    directory: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """What a course came to.

    Attributes:
        watch: what was seen of the relay.
        stored: messages that there were.
        left: rows that are still in the table.
        cuts: how often a wire was cut.
        most_connections: to the server behind that wire, at once, after a cut.
        seconds: from the start of the relay to the last message.
    """

    watch: Watch
    stored: int
    left: int
    seconds: float
    cuts: int = 0
    most_connections: int = 0

    def lines(self) -> Sequence[str]:
        """The figures, to be printed."""
        watch, first, last = self.watch, self.watch.warm[0], self.watch.warm[-1]
        came = f"{self.stored:,} messages in {self.seconds:.0f} s, {self.left} left"
        held = (
            f"resident set: {first.rss / MB:.1f} MB after {first.delivered:,} messages, "
            f"{last.rss / MB:.1f} MB at the end, {watch.growth:.1f} MB more at most"
        )
        numbers = "descriptors {} to {}, threads {} to {}".format(
            *watch.range_of("descriptors"), *watch.range_of("threads")
        )
        if self.cuts:
            came += f"; {self.cuts} cuts, {watch.delivered - len(watch.arrived):,} arrived again"
            numbers += f", connections {self.most_connections} at most"
        return [came, held, numbers]


def whole(ground: Ground, count: int) -> Finish:
    """From PostgreSQL to Redis, with nothing in the way."""
    with _outbox(ground) as outbox:
        fill(outbox.databases["default"], _pattern(outbox), ready=count)
        with _watching(ground, outbox, warm_up=count // 10) as watch:
            began = time.monotonic()
            watch.until(lambda: watch.delivered >= count and not _left(outbox), 30 + count / 1000)
            return Finish(
                watch=watch, stored=count, left=_left(outbox), seconds=time.monotonic() - began
            )


def cut(ground: Ground, count: int, what: str) -> Finish:
    """The wire to the broker, or to the database, breaks after each two hundred messages."""
    url = ground.redis_url if what == "broker" else ground.postgresql_url
    with _outbox(ground) as outbox, closing(TcpProxy(HOST, urlsplit(url).port or 0)) as wire:
        _store(outbox.databases["default"], count)
        cuts, live = [0], list[int]()

        def cut_again(delivered: int) -> None:
            if delivered // CUT_EVERY > cuts[0]:
                live.append(wire.live)
                cuts[0] = delivered // CUT_EVERY
                wire.cut()

        with _watching(ground, outbox, warm_up=count // 10, **{what: wire.through(url)}) as watch:
            watch.on_arrival = cut_again
            began = time.monotonic()
            watch.until(lambda: len(watch.arrived) == count and not _left(outbox), 60 + count / 100)
            return Finish(
                watch=watch,
                stored=count,
                left=_left(outbox),
                seconds=time.monotonic() - began,
                cuts=len(live),
                most_connections=max(live),
            )


@contextmanager
def _outbox(ground: Ground) -> Iterator[Outbox]:
    engine = sa.create_engine(ground.postgresql_url)
    outbox = make_outbox(ground.redis_url, engine)
    yield outbox
    outbox.app.close()
    engine.dispose()


@contextmanager
def _watching(ground: Ground, outbox: Outbox, *, warm_up: int, **urls: str) -> Iterator[Watch]:
    """Start a relay, and make a watch over it."""
    env = environment(
        **{"broker": ground.redis_url, "database": ground.postgresql_url} | urls,
        # What was in hand when a wire broke is tried again soon.
        settings={"retry_after": 2, "retry": {"base_delay": 0.05, "max_delay": 0.1}},
    )
    command = outbox_command("relay", "--sleep", "0.05", "--memory", "0")
    with (
        redis.Redis.from_url(ground.redis_url, socket_timeout=60) as client,
        running(command, ground.directory, env) as relay,
    ):
        yield Watch(pid=relay.popen.pid, client=client, warm_up=warm_up)
        assert relay.popen.poll() is None, relay.output


def _pattern(outbox: Outbox) -> Pattern:
    """A message as Celery makes it, of about a kilobyte; it is not left in the table."""
    outbox.app.send_task("shop.add", (1, 2), ARGUMENTS, via_outbox=True)
    database = outbox.databases["default"]
    (row,) = rows(outbox)
    with database.begin() as connection:
        connection.execute(sa.delete(database.tables.messages))
    return Pattern(broker=row.broker, message=row.message, body=row.body)


def _store(database: Database, count: int) -> None:
    """Messages with an id each, small ones."""
    with database.begin() as connection:
        database.store.add(connection, [make_message(f"task {number}") for number in range(count)])


def _left(outbox: Outbox) -> int:
    database = outbox.databases["default"]
    return sum(database.read(database.store.count).values())
