"""Real workers: one for each pool and module, shared by its tests."""

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kombu.pools
import pytest
import sqlalchemy as sa
from celery import Celery

from celery_outbox import Outbox
from tests.relay.apps import relay_once
from tests.relay.commands import Running, program, running
from tests.servers import DatabaseServer, RedisServer

BARE = ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=INFO"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Works:
    """A running worker, and the outbox of the process that sends to it."""

    worker: Running
    outbox: Outbox
    runs_file: Path
    pool: str

    @property
    def app(self) -> Celery:
        """The sender's app."""
        return self.outbox.app

    def send(self, name: str, *args: Any, **options: Any) -> Any:
        """Dispatch a task by name, as its options choose."""
        return self.app.send_task(f"shop.{name}", args, **options)

    def runs(self, what: str) -> list[str]:
        """The lines that tasks have left behind which begin with ``what``."""
        if not self.runs_file.exists():
            return []
        return [line for line in self.runs_file.read_text().splitlines() if line.startswith(what)]

    def relay(self) -> None:
        """Deliver what is ready."""
        relay_once(self.outbox)

    def catch_up(self) -> None:
        """Wait until the worker has done everything that was sent before."""
        marker = uuid.uuid4().hex
        assert self.send("note", marker).get(timeout=20) == marker


def start_worker(
    module: str,
    pool: str,
    *,
    broker: str,
    results: str,
    database: str,
    directory: Path,
    env: dict[str, str] | None = None,
) -> Iterator[Works]:
    """Start a worker of the project in ``module`` and an outbox for its tasks."""
    runs_file = directory / "runs"
    environment = {
        **os.environ,
        "SHOP_BROKER": broker,
        "SHOP_RESULTS": results,
        "SHOP_DATABASE": database,
        "SHOP_RUNS": str(runs_file),
        **(env or {}),
    }
    command = [program("celery"), "-A", module, "worker", "-P", pool, "-c", "2", *BARE]
    engine = sa.create_engine(database)
    app = Celery("shop", broker=broker, backend=results, set_as_current=False)
    outbox = Outbox(app, databases={"default": engine})
    outbox.install()
    with running(command, directory, environment) as worker:
        worker.wait_for("ready.", timeout=60)
        yield Works(worker=worker, outbox=outbox, runs_file=runs_file, pool=pool)
    app.close()
    engine.dispose()
    kombu.pools.reset()


@pytest.fixture(scope="module")
def database_of_module(postgresql: DatabaseServer) -> str:
    """A database for every worker of a module."""
    return postgresql.create_database()


@pytest.fixture(
    scope="module",
    params=[
        ("prefork", "sync"),
        ("prefork", "async"),
        ("solo", "async"),
        ("threads", "sync"),
        ("gevent", "sync"),
    ],
    ids="-".join,
)
def works(
    request: pytest.FixtureRequest,
    redis_server: RedisServer,
    database_of_module: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Works]:
    """A worker of each pool in turn, its outbox on an Engine or an AsyncEngine.

    The one of the solo pool keeps results in the database.
    """
    pool, engine = request.param
    results = redis_server.empty_database()
    yield from start_worker(
        "tests.end_to_end.shop",
        pool,
        broker=redis_server.empty_database(),
        results=f"db+{database_of_module}" if pool == "solo" else results,
        database=database_of_module,
        directory=tmp_path_factory.mktemp(pool),
        env={"SHOP_ENGINE": engine},
    )


@pytest.fixture(scope="module")
def stock_works(
    redis_server: RedisServer, database_of_module: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Works]:
    """A worker that has never heard of the outbox."""
    directory = tmp_path_factory.mktemp("stock")
    # The celery command loads every package that brings commands: this one is not installed there.
    (directory / "celery_outbox.py").write_text("raise ImportError('not installed')\n")
    yield from start_worker(
        "tests.end_to_end.stock",
        "solo",
        broker=redis_server.empty_database(),
        results=redis_server.empty_database(),
        database=database_of_module,
        directory=directory,
        env={"PYTHONPATH": str(directory)},
    )
