"""Where it happens: an empty database and an empty broker, and the messages that were stored there."""

import shutil
import signal
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import sqlalchemy as sa

from celery_outbox import Outbox
from tests.relay.apps import make_outbox, rows_of
from tests.relay.commands import Running, environment, outbox_command, running
from tests.waiting import wait_until

#: A short lease, in seconds: what a dead relay had is waited for as long.
SETTINGS = {"retry_after": 2}
#: What a relay logs when it begins, and can be told to end.
STARTED = "Relaying from"
#: Seconds after which something hangs, on a machine that has much else to do.
PATIENCE = 600
#: Of each message's argument: whole batches fit into no single read of a socket.
TEXT = "a line of an order, " * 50
#: Groups of a FIFO queue; of each, one message at a time is on its way.
GROUPS = 5

BROKERS = ("redis", "rabbitmq", "sqs", "fifo", "database")
DATABASES = ("postgresql", "mariadb", "sqlite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Makes empty databases and brokers, by their kind."""

    directory: Path
    databases: Mapping[str, Callable[[], str]]
    brokers: Mapping[str, Callable[[], str]]

    @contextmanager
    def place(self, broker: str, database: str) -> Iterator["Place"]:
        """Set one combination up, and let go of it."""
        name = f"crash-{uuid.uuid4().hex[:12]}"
        directory = self.directory / name
        directory.mkdir()
        place = Place.open(
            broker=self.brokers[broker](),
            database=self.databases[database](),
            queue=f"{name}.fifo" if broker == "fifo" else name,
            directory=directory,
        )
        try:
            yield place
        finally:
            place.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One outbox on one database, with one queue of one broker.

    ``stored`` has the number of each task, by its id.
    """

    broker: str
    database: str
    queue: str
    directory: Path
    engine: sa.Engine
    outbox: Outbox
    stored: dict[str, int] = field(default_factory=dict)

    @classmethod
    def open(cls, *, broker: str, database: str, queue: str, directory: Path) -> "Place":
        """Install the tables."""
        engine = sa.create_engine(database)
        # Otherwise each look into an empty queue takes ten seconds.
        options = {"wait_time_seconds": 0} if broker.startswith("sqs:") else {}
        outbox = make_outbox(broker, engine, config={"broker_transport_options": options})
        return cls(
            broker=broker,
            database=database,
            queue=queue,
            directory=directory,
            engine=engine,
            outbox=outbox,
        )

    def close(self) -> None:
        """Let go of every connection."""
        self.outbox.app.close()
        self.engine.dispose()

    def store(self, count: int) -> None:
        """Store messages in one transaction."""
        first = len(self.stored)
        add = self.outbox.app.tasks["shop.add"]
        results = self.outbox.bulk([add.s(first + n, TEXT).set(**self._way(n)) for n in range(count)])
        self.stored.update((str(result.id), first + n) for n, result in enumerate(results))

    def rows(self) -> Sequence[sa.Row[Any]]:
        """What is left of them."""
        return rows_of(self.outbox.databases["default"])

    @contextmanager
    def relaying(
        self,
        *options: str,
        crash: str = "",
        broker: str = "",
        database: str = "",
    ) -> Iterator[Running]:
        """Run a relay process, by other ways to the same servers where they are named.

        With ``crash`` it is one that dies there.
        """
        env = environment(
            broker=broker or self.broker, database=database or self.database, settings=SETTINGS
        )
        project = "tests.crash.doomed" if crash else "tests.relay.shop"
        command = outbox_command("relay", "--sleep", "0.05s", *options, app=project)
        if setpriv := shutil.which("setpriv"):
            # Or it would go on when this process is killed.
            command = [setpriv, "--pdeathsig", "KILL", *command]
        env |= {"CRASH": crash, "PYTHONFAULTHANDLER": "1"}
        with running(command, self.directory, env) as relay:
            yield relay

    def finish(self, relay: Running) -> str:
        """Let a relay deliver what is left, and end it; what was in the way, if anything was."""
        try:
            relay.wait_for(STARTED, PATIENCE)
            wait_until(lambda: not self.rows(), PATIENCE, "the end of every row")
            relay.send(signal.SIGTERM)
            code = relay.wait(PATIENCE)
        except (AssertionError, TimeoutExpired) as error:
            with suppress(TimeoutExpired):
                relay.send(signal.SIGABRT)  # says where each thread is
                relay.wait()
            return f"{error}\n{relay.output}"
        return "" if code == 0 else f"the relay ended with {code}:\n{relay.output}"

    def _way(self, number: int) -> dict[str, Any]:
        if not self.queue.endswith(".fifo"):
            return {"queue": self.queue}
        return {"queue": self.queue, "MessageGroupId": f"group-{number % GROUPS}"}


@dataclass(slots=True, kw_only=True)
class Arrivals:
    """What lies in a queue, read with Kombu: how often each task has arrived."""

    place: Place
    times: Counter[str] = field(default_factory=Counter)
    torn: int = 0

    @contextmanager
    def reading(self) -> Iterator[Callable[[], int]]:
        """Connect, and yield what takes everything off the queue and returns how much that was."""
        app = self.place.outbox.app
        with app.connection_for_read() as connection:
            queue = app.amqp.queues[self.place.queue].bind(connection.default_channel)
            queue.declare()

            def take() -> int:
                count = 0
                while (message := queue.get()) is not None:
                    message.ack()
                    self._note(message)
                    count += 1
                return count

            yield take

    def _note(self, message: Any) -> None:
        task_id = message.headers["id"]
        self.times[task_id] += 1
        if task_id in self.place.stored:
            written = message.decode()[0]
            self.torn += written != [self.place.stored[task_id], TEXT]

    def count(self, allowed: int, trouble: str = "") -> "Count":
        """Compare with what was stored, when all has arrived that ever will.

        ``allowed`` are the duplicates of a broker that does not know them itself.
        """
        with self.reading() as take:
            take()
        stored = self.place.stored
        return Count(
            stored=len(stored),
            lost=len(stored.keys() - self.times.keys()),
            duplicates=sum(times - 1 for times in self.times.values()),
            strange=len(self.times.keys() - stored.keys()) + self.torn,
            left=len(self.place.rows()),
            allowed=0 if self.place.queue.endswith(".fifo") else allowed,
            trouble=trouble,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What became of the messages of a place.

    Attributes:
        lost: never arrived.
        duplicates: arrivals beyond the first of each.
        strange: that nobody stored, or with another content.
        left: rows that are still there.
        allowed: duplicates at most.
        trouble: why nothing can be said; empty: nothing was in the way.
    """

    stored: int = 0
    lost: int = 0
    duplicates: int = 0
    strange: int = 0
    left: int = 0
    allowed: int = 0
    trouble: str = ""

    @property
    def is_right(self) -> bool:
        """Whether all that was promised has been kept."""
        return not (
            self.trouble or self.lost or self.strange or self.left or self.duplicates > self.allowed
        )

    def and_worst_of(self, other: "Count") -> "Count":
        """Both added up; of the duplicates, those of the worse."""
        return Count(
            stored=self.stored + other.stored,
            lost=self.lost + other.lost,
            duplicates=max(self.duplicates, other.duplicates),
            strange=self.strange + other.strange,
            left=self.left + other.left,
            allowed=max(self.allowed, other.allowed),
            trouble=self.trouble or other.trouble,
        )

    def __str__(self) -> str:
        return (
            f"{self.stored} stored, {self.lost} lost, {self.duplicates} duplicates (at most "
            f"{self.allowed}), {self.strange} strange, {self.left} left {self.trouble}"
        ).rstrip()
