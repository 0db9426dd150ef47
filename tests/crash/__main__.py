"""`python -m tests.crash`: kill and cut relays on every broker and database, and count."""

import argparse
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from tests import servers
from tests.crash.boundaries import BOUNDARIES, Boundary, crash
from tests.crash.cuts import cut_at_each
from tests.crash.kills import kill_at_random
from tests.crash.places import BROKERS, DATABASES, Count, Stage
from tests.crash.report import Results, Sheet, sheets

S = TypeVar("S", bound=servers.Server)
PARTS = ("boundaries", "kills", "cuts")
#: Below it, the documentation's page is written anew.
HEADING = "## Results\n"


def main() -> int:
    """Run what the command line asks for."""
    given = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(markup=False)
    results, began = Results(), time.monotonic()
    with started(given.broker, given.database) as (stage, running):
        machine = _machine(running)
        console.print(machine, f"seed {given.seed}")
        pool = ThreadPoolExecutor(given.jobs)
        try:
            jobs = {pool.submit(work): name for name, work in _jobs(given, stage, results)}
            for job in as_completed(jobs):
                console.print(f"{time.monotonic() - began:6.0f} s  {jobs[job]}: {job.result()}")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    _in_order(results)
    tables = sheets(results, given.kills)
    for sheet in tables:
        sheet.show(console)
    if given.markdown:
        _write(given.markdown, machine, _command(given), tables)
    for each in (wrong := results.wrong()):
        console.print(f"WRONG {each}")
    return bool(wrong)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--broker", nargs="+", choices=BROKERS, default=BROKERS)
    parser.add_argument("--database", nargs="+", choices=DATABASES, default=DATABASES)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--kills", type=int, default=30, help="at random moments, for each pair")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of these moments")
    parser.add_argument("--jobs", type=int, default=1, help="at the same time")
    parser.add_argument("--markdown", type=Path, help="a page whose results are written anew")
    return parser.parse_args()


def _jobs(
    given: argparse.Namespace, stage: Stage, results: Results
) -> Iterator[tuple[str, Callable[[], Count]]]:
    pairs = [(broker, database) for broker in given.broker for database in given.database]
    if "boundaries" in given.part:
        for broker, database in pairs:
            for each in BOUNDARIES:
                name = f"{broker} {database}, {each.name}"
                yield name, partial(_crash, stage, results, broker, database, each)
    if "kills" in given.part:
        for broker, database in pairs:
            work = partial(_kill, stage, results, broker, database, given.kills, given.seed)
            yield f"{broker} {database}, kills", work
    if "cuts" in given.part:
        # Each wire once: what is at the other end of the relay matters little to it.
        wires = [(broker, given.database[0], "broker") for broker in given.broker]
        wires += [(given.broker[0], each, "database") for each in given.database if each != "sqlite"]
        for broker, database, wire in wires:
            for what in ("requests", "replies"):
                name = f"{broker} {database}, cut {what} of the {wire}"
                yield name, partial(_cut, stage, results, broker, database, wire, what)


def _crash(stage: Stage, results: Results, broker: str, database: str, boundary: Boundary) -> Count:
    with stage.place(broker, database) as place:
        count = _tried(lambda: crash(place, boundary))
    results.cells.setdefault((broker, database), {})[boundary.name] = count
    return count


def _kill(stage: Stage, results: Results, broker: str, database: str, kills: int, seed: int) -> Count:
    with stage.place(broker, database) as place:
        count = _tried(lambda: kill_at_random(place, kills, seed))
    results.kills[broker, database] = count
    return count


def _cut(stage: Stage, results: Results, broker: str, database: str, wire: str, what: str) -> Count:
    with stage.place(broker, database) as place:
        count = _tried(lambda: cut_at_each(place, wire, what))
    results.cuts[broker, database, wire, what] = count
    return count


def _tried(work: Callable[[], Count]) -> Count:
    """What goes wrong in one place does not end the others."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - of any client
        return Count(trouble=f"{type(error).__name__}: {error}")


def _in_order(results: Results) -> None:
    """Sort what several jobs have finished in any order."""
    rank = {name: number for number, name in enumerate([*BROKERS, *DATABASES])}
    every: Sequence[dict[Any, Any]] = (results.cells, results.kills, results.cuts)
    for each in every:
        ordered = sorted(each.items(), key=lambda item: [rank.get(word, 0) for word in item[0]])
        each.clear()
        each.update(ordered)


@contextmanager
def started(
    brokers: Sequence[str], databases: Sequence[str]
) -> Iterator[tuple[Stage, Sequence[servers.Server]]]:
    """Start the servers that are needed; queues have names of their own, so brokers are shared."""
    with ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="outbox-"))
        directory.chmod(0o711)  # PostgreSQL runs as another user
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        running: list[servers.Server] = []

        def start(starter: Callable[[Path], S], name: str) -> S:
            server = starter(directory / name)
            stack.callback(server.stop)
            running.append(server)
            return server

        makers: dict[str, Callable[[], str]] = {
            "sqlite": lambda: f"sqlite:///{directory / uuid.uuid4().hex}.db"
        }
        if "postgresql" in databases or "database" in brokers:
            makers["postgresql"] = start(servers.start_postgresql, "postgresql").create_database
        if "mariadb" in databases:
            makers["mariadb"] = start(servers.start_mariadb, "mariadb").create_database
        queues: dict[str, Callable[[], str]] = {}
        if "redis" in brokers:
            queues["redis"] = partial(str, start(servers.start_redis, "redis").url)
        if "rabbitmq" in brokers:
            queues["rabbitmq"] = partial(str, start(servers.start_rabbitmq, "rabbitmq").url)
        if {"sqs", "fifo"} & set(brokers):
            queues["sqs"] = queues["fifo"] = partial(str, start(servers.start_sqs, "sqs").url)
        if "database" in brokers:
            queues["database"] = lambda: f"sqla+{makers['postgresql']()}"
        yield Stage(directory=directory, databases=makers, brokers=queues), running


def _machine(running: Sequence[servers.Server]) -> str:
    packages = ("celery", "kombu", "SQLAlchemy")
    return ", ".join(
        [
            f"{datetime.now(UTC):%Y-%m-%d}",
            f"{os.cpu_count()} cores",
            f"Python {platform.python_version()}",
            *(f"{server.name} {server.version}" for server in running),
            *(f"{package} {version(package)}" for package in packages),
        ]
    )


def _command(given: argparse.Namespace) -> str:
    """What does the same again."""
    command = f"python -m tests.crash --seed {given.seed} --kills {given.kills} --jobs {given.jobs}"
    for name, every in (("broker", BROKERS), ("database", DATABASES), ("part", PARTS)):
        chosen = getattr(given, name)
        if tuple(chosen) != every:
            command += f" --{name} {' '.join(chosen)}"
    return command


def _write(page: Path, machine: str, command: str, tables: Sequence[Sheet]) -> None:
    text = page.read_text().partition(HEADING)[0]
    parts = [f"{machine}.\n", f"```console\n$ {command}\n```\n", *(each.markdown() for each in tables)]
    page.write_text(f"{text}{HEADING}\n" + "\n".join(parts))


if __name__ == "__main__":
    sys.exit(main())
