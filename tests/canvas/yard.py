"""A real worker of ``tests.canvas.project``, and the sender's side of the same project."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kombu.pools
import sqlalchemy as sa
from celery import Celery, Signature, Task
from sqlalchemy.orm import Session

from celery_outbox import Outbox
from tests.canvas.project import make_app
from tests.relay.apps import relay_once
from tests.relay.commands import program, running
from tests.waiting import wait_until

BARE = ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=INFO"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Yard:
    """An app with an installed outbox, whose tasks a worker runs."""

    outbox: Outbox
    engine: sa.Engine

    @property
    def app(self) -> Celery:
        return self.outbox.app

    def task(self, name: str) -> Task:
        return self.app.tasks[name]

    @property
    def add(self) -> Task:
        return self.app.tasks["stall.add"]

    @property
    def total(self) -> Task:
        return self.app.tasks["stall.total"]

    def record(self, what: str) -> Signature:
        """A signature that leaves a row behind and passes its value on."""
        return self.app.tasks["project.record"].s(what)

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        with Session(self.engine) as session, session.begin():
            yield session

    @property
    def waiting(self) -> list[str]:
        """The names of the tasks that are stored."""
        with self.engine.connect() as connection:
            rows = connection.execute(sa.text("SELECT task_name FROM celery_outbox ORDER BY id"))
            return list(rows.scalars())

    def runs(self, what: str) -> int:
        """How often ``record`` has run for ``what``."""
        with self.engine.connect() as connection:
            query = sa.text("SELECT count(*) FROM runs WHERE what = :what")
            return int(connection.execute(query, {"what": what}).scalar_one())

    def relay(self) -> None:
        """Deliver what is ready."""
        relay_once(self.outbox)

    def deliver_until(self, predicate: Callable[[], Any], message: str) -> Any:
        """Deliver whatever comes until ``predicate`` is true."""

        def look() -> Any:
            self.relay()
            return predicate()

        return wait_until(look, 30, message, 0.05)


@contextmanager
def open_yard(broker: str, backend: str, database: str, directory: Path) -> Iterator[Yard]:
    """Start a worker and make an outbox whose tasks it runs."""
    env = {
        **os.environ,
        "CANVAS_BROKER": broker,
        "CANVAS_BACKEND": backend,
        "CANVAS_DATABASE": database,
    }
    command = [
        program("celery"),
        "-A",
        "tests.canvas.project",
        "worker",
        "-P",
        "threads",
        "-c",
        "2",
        *BARE,
    ]
    engine = sa.create_engine(database)
    app = make_app(broker, backend)
    outbox = Outbox(app, databases={"default": engine})
    outbox.install()
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE runs (what VARCHAR(50))"))
    with running(command, directory, env) as worker:
        worker.wait_for("ready.", timeout=60)
        yield Yard(outbox=outbox, engine=engine)
    if backend.startswith("redis:"):
        app.backend.client.connection_pool.disconnect()
    app.close()
    engine.dispose()
    kombu.pools.reset()
