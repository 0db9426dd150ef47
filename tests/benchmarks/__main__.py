"""`python -m tests.benchmarks [name ...]`: start the servers, measure, print."""

import argparse
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from tests import servers
from tests.benchmarks.catalogue import BENCHMARKS
from tests.benchmarks.measuring import FULL, TINY, Scale
from tests.benchmarks.publishing import STUB_SECONDS
from tests.benchmarks.report import show
from tests.benchmarks.stage import Stage
from tests.benchmarks.stub import stub_in_a_process

S = TypeVar("S", bound=servers.Server)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--rounds", type=int, default=FULL.rounds)
    parser.add_argument("--turns", type=int, default=FULL.turns, help="of each round")
    parser.add_argument("--waiting", type=int, default=FULL.waiting, help="rows in PostgreSQL")
    parser.add_argument("--tiny", action="store_true", help="see that all of it runs")
    given = parser.parse_args()
    if unknown := set(given.names) - set(BENCHMARKS):
        parser.error(f"expected names of {', '.join(BENCHMARKS)}, got {', '.join(sorted(unknown))}")
    scale = TINY if given.tiny else Scale(rounds=given.rounds, turns=given.turns, waiting=given.waiting)
    names = given.names or list(BENCHMARKS)
    console = Console()
    with started({need for name in names for need in BENCHMARKS[name].needs}) as stage:
        console.print(_machine(stage))
        for name in names:
            show(console, BENCHMARKS[name].run(stage, scale))


@contextmanager
def started(needs: Set[str]) -> Iterator[Stage]:
    """Redis and the servers needed; what PostgreSQL commits reaches the disk."""
    with ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="outbox-"))
        directory.chmod(0o711)  # PostgreSQL runs as another user
        stack.callback(shutil.rmtree, directory, ignore_errors=True)

        def start(starter: Callable[[], S]) -> S:
            server = starter()
            stack.callback(server.stop)
            return server

        stage = Stage(
            directory=directory,
            redis=start(lambda: servers.start_redis(directory / "redis")),
        )
        if "postgresql" in needs:
            place = directory / "postgresql"
            server = start(lambda: servers.start_postgresql(place, durable=True))
            stage = replace(stage, postgresql=server)
        if "mariadb" in needs:
            server = start(lambda: servers.start_mariadb(directory / "mariadb"))
            stage = replace(stage, mariadb=server)
        if "rabbitmq" in needs:
            stage = replace(
                stage, rabbitmq=start(lambda: servers.start_rabbitmq(directory / "rabbitmq"))
            )
        if "sqs" in needs:
            stub = stack.enter_context(stub_in_a_process(STUB_SECONDS))
            stage = replace(
                stage, sqs=start(lambda: servers.start_sqs(directory / "sqs")), sqs_stub=stub
            )
        yield stage


def _machine(stage: Stage) -> str:
    running = [stage.redis, stage.postgresql, stage.mariadb, stage.rabbitmq, stage.sqs]
    return (
        f"{os.cpu_count()} cores, Python {platform.python_version()}, "
        + ", ".join(f"{server.name} {server.version}" for server in running if server is not None)
        + "\n"
    )


if __name__ == "__main__":
    main()
