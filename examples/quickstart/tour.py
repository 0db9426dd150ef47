"""The narrated run that examples/quickstart.sh starts: python tour.py DIRECTORY

The shop, the relay and the worker are processes of their own. What this program says of the two
databases it has read from their files with sqlite3 alone.
"""

import contextlib
import os
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
PATIENCE_SECONDS = 30
WIDTH = 80

is_coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ


def paint(code: str, text: str) -> str:
    return f"\033[{code}m{text}\033[0m" if is_coloured else text


def say(text: str = "") -> None:
    print(text, flush=True)


class TourError(Exception):
    """Something went otherwise than it should; the tour ends with it."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What is where, right now. None: the broker's file does not exist."""

    orders: list[str]
    outbox: list[str]
    waiting: int | None
    taken: int | None
    receipts: list[tuple[str, str]]


@dataclass(kw_only=True)
class Tour:
    directory: Path
    steps: int = 0
    held: list[str] = field(default_factory=list)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    # What a reader sees

    def step(self, title: str, *text: str) -> None:
        self.steps += 1
        say()
        say(paint("1", f"{self.steps}. {title}"))
        for line in text:
            say(f"   {line}")

    def check(self, is_so: bool, claim: str) -> None:
        """Note a claim that holds. Raises TourError when it does not."""
        if not is_so:
            raise TourError(f"Expected, but not so: {claim}")
        self.held.append(claim)

    def show(self) -> Snapshot:
        """Print what is where, and return it."""
        now = self.look()
        if now.waiting is None:
            broker = "down"
        else:
            broker = f"({now.taken} taken by the worker)" if now.taken else ""
        rows = [
            ("orders", len(now.orders), ", ".join(now.orders)),
            ("outbox", len(now.outbox), ", ".join(f"task {each[:8]}..." for each in now.outbox)),
            ("broker", "-" if now.waiting is None else now.waiting, broker),
            ("receipts", len(now.receipts), ", ".join(text for text, _ in now.receipts)),
        ]
        say()
        for name, count, what in rows:
            say(paint("36", f"     {name:<10}{count:>3}   {what}".rstrip()))
        return now

    # What is where

    def look(self) -> Snapshot:
        shop, broker = self.directory / "shop.db", self.directory / "broker" / "broker.db"
        messages = read(
            broker,
            "SELECT m.visible FROM kombu_message m JOIN kombu_queue q ON q.id = m.queue_id "
            "WHERE q.name = 'celery'",
        )
        is_there = broker.parent.exists()
        return Snapshot(
            orders=[
                f"{item} for {name}" for item, name in read(shop, "SELECT item, customer FROM orders")
            ],
            outbox=[task_id for (task_id,) in read(shop, "SELECT task_id FROM celery_outbox")],
            waiting=sum(1 for (visible,) in messages if visible) if is_there else None,
            taken=sum(1 for (visible,) in messages if not visible) if is_there else None,
            receipts=read(shop, "SELECT text, task_id FROM receipts"),
        )

    # Processes

    def run(self, *command: str) -> int:
        """Run a command to its end, its output shown; return its exit code."""
        show_command(command)
        try:
            done = subprocess.run(
                self.resolved(command),
                cwd=self.directory,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=PATIENCE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise TourError(
                f"{' '.join(command)} did not end in {PATIENCE_SECONDS} seconds."
            ) from error
        for line in done.stdout.splitlines():
            say(f"   {line}")
        return done.returncode

    def start(self, name: str, *command: str) -> None:
        """Start a command in the background, its output in a log file."""
        show_command((*command, "&"))
        with (self.directory / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                self.resolved(command),
                cwd=self.directory,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the tour, which then ends them in order
            )

    def stop(self, name: str) -> int:
        """Ask a process to end as its supervisor would; return its exit code."""
        process = self.processes.pop(name)
        process.terminate()
        try:
            return process.wait(PATIENCE_SECONDS / 2)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def stop_all(self) -> None:
        for name in list(self.processes):
            self.stop(name)

    def wait_for(self, what: str, is_so: Callable[[], bool]) -> None:
        """Wait until it is so. Raises TourError when it takes too long, or a process has ended."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_so():
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise TourError(f"The {name} ended by itself, while waiting for {what}.")
            if time.monotonic() > deadline:
                raise TourError(f"Waited {PATIENCE_SECONDS} seconds in vain for {what}.")
            time.sleep(0.05)

    def log(self, name: str) -> str:
        path = self.directory / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def resolved(self, command: tuple[str, ...]) -> list[str]:
        if command[0] == "python":
            return [sys.executable, *command[1:]]
        # Beside the interpreter: where its virtual environment keeps them.
        program = shutil.which(command[0], path=str(Path(sys.executable).parent))
        if program is None:
            raise TourError(f"{command[0]} is not installed beside {sys.executable}.")
        return [program, *command[1:]]

    def environment(self) -> dict[str, str]:
        paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def read(database: Path, query: str) -> list[tuple]:
    """Read from a SQLite file; nothing when the file or the table is not there."""
    with contextlib.suppress(sqlite3.OperationalError):
        connection = sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)
        with contextlib.closing(connection):
            return connection.execute(query).fetchall()
    return []


def show_command(command: tuple[str, ...]) -> None:
    say()
    say(
        "   "
        + paint("1", "$ " + " ".join(each if each == "&" else shlex.quote(each) for each in command))
    )


def take(tour: Tour) -> None:
    broker = tour.directory / "broker"
    tour.step(
        "The broker is down.",
        "It is a SQLite file in the folder broker/, and that folder does not exist.",
    )

    tour.step(
        "A process takes two orders, each with its task in the same transaction.",
        "Bob's is rolled back. Ada's is committed, and the next moment the process gets",
        "a kill -9. The code is in examples/quickstart/shop/checkout.py.",
    )
    code = tour.run("python", "-m", "shop.checkout")
    say("   killed" if code == -signal.SIGKILL else f"   ended with exit code {code}.")
    now = tour.show()
    stored = now.outbox
    tour.check(code == -signal.SIGKILL, "The process was killed right after its commit.")
    tour.check(
        now.orders == ["tea for Ada"] and len(stored) == 1,
        "The committed order and its task are stored; of the rolled back ones nothing is left.",
    )

    tour.step(
        "The relay is started, though the broker is still down.",
        "It tries, fails, and will go on trying: the message stays in the outbox.",
    )
    tour.start("relay", "celery-outbox", "-A", "shop", "relay")
    refusal = "unable to open database file"
    tour.wait_for("the relay to try", lambda: refusal in tour.log("relay"))
    said = next(line for line in tour.log("relay").splitlines() if refusal in line)
    say(textwrap.fill(said, WIDTH, initial_indent="   ", subsequent_indent="     "))
    now = tour.show()
    tour.check(now.outbox == stored, "With the broker down, the relay lost nothing.")

    tour.step("The broker comes back, and the relay delivers.")
    show_command(("mkdir", "broker"))
    broker.mkdir()
    tour.wait_for("the relay to deliver", lambda: not tour.look().outbox)
    now = tour.show()
    tour.check(
        (now.waiting, now.taken) == (1, 0),
        "When the broker was back, the relay delivered one message and emptied the outbox.",
    )

    tour.step(
        "A Celery worker is started, with no options for the outbox: there are none.",
        "Once the receipt is there, both are told to end and finish what they are doing.",
    )
    tour.start("worker", "celery", "-A", "shop", "worker", "-P", "solo")
    tour.wait_for("the worker's receipt", lambda: bool(tour.look().receipts))
    codes = {name: tour.stop(name) for name in ("worker", "relay")}
    now = tour.show()
    tour.check(
        now.receipts == [("tea for Ada", each) for each in stored],
        "The worker ran the task once, under the id that it was stored with.",
    )
    tour.check(
        not now.outbox and (now.waiting, now.taken) == (0, 1),
        "No message is left that could make it run again.",
    )
    tour.check(codes == {"worker": 0, "relay": 0}, "Relay and worker ended with exit code 0.")


def verdict(tour: Tour, trouble: str | None) -> int:
    say()
    say("-" * WIDTH)
    for claim in tour.held:
        say(f"{paint('32', 'ok')}      {claim}")
    if trouble is None:
        say()
        say(paint("1;32", "VERDICT: stored with its order, delivered after the outage, executed once."))
        say(f"The databases and logs stay in {sys.argv[1]} until the next run.")
        return 0
    say(f"{paint('31', 'FAILED')}  {trouble}")
    for name in ("relay", "worker"):
        if lines := tour.log(name).splitlines()[-15:]:
            say("\n".join(["", f"The last lines of the {name}:", *(f"   {line}" for line in lines)]))
    say()
    say(paint("1;31", "VERDICT: FAILED. It stopped where something was not as it should be."))
    return 1


def main() -> int:
    directory = Path(sys.argv[1]).resolve()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    # A terminal that is closed, or a kill, must not leave processes behind either.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    tour = Tour(directory=directory)
    trouble = None
    say(paint("1", "celery_outbox: from an order to its receipt, with a broker that is down"))
    say()
    say(f"The commands below run in {sys.argv[1]}, with PYTHONPATH=examples/quickstart.")
    say("After each step: the rows of the tables orders, outbox and receipts in shop.db, and")
    say("the messages that wait at the broker. All are read from the files themselves.")
    try:
        take(tour)
    except TourError as error:
        trouble = str(error)
    except KeyboardInterrupt:
        say("\nInterrupted.")
        return 130
    finally:
        tour.stop_all()
    return verdict(tour, trouble)


if __name__ == "__main__":
    sys.exit(main())
