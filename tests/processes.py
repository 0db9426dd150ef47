"""Programs of other packages: where they lie, as whom they run, and that they end with us.

Every process started here leads a group of its own, which ends when its test run stops it,
exits, or (on Linux) is killed.
"""

import atexit
import contextlib
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

HOST = "127.0.0.1"


class ServerError(Exception):
    """A server is there but did not start, or a command of its package failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A running program, the leader of its process group, and where its output goes."""

    popen: subprocess.Popen[bytes]
    log: Path
    stop_signal: signal.Signals
    owner: int = field(default_factory=os.getpid)

    def stop(self) -> None:
        """End the whole group: as the program prefers, then for certain."""
        if os.getpid() != self.owner:
            return  # a fork of the test run must not take the servers down when it exits
        atexit.unregister(self.stop)
        if self.popen.poll() is None:
            self._kill(self.stop_signal)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(timeout=10)
        self._kill(signal.SIGKILL)
        self.popen.wait()

    def last_words(self) -> str:
        """Return the end of what the program has printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])

    def _kill(self, signum: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signum)


def spawn(
    command: list[str],
    directory: Path,
    *,
    user: str | None = None,
    env: dict[str, str] | None = None,
    stop_signal: signal.Signals = signal.SIGKILL,
) -> Process:
    """Start a program in the directory, with its output in a log file there."""
    log = directory / f"{Path(command[0]).name}.log"
    with log.open("wb") as output:
        popen = subprocess.Popen(
            [*_as_user(user), *_dying_with_us(stop_signal), *_resolved(command)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=_environment(directory, env),
            start_new_session=True,
        )
    process = Process(popen=popen, log=log, stop_signal=stop_signal)
    atexit.register(process.stop)
    return process


def run(
    command: list[str],
    directory: Path,
    *,
    user: str | None = None,
    env: dict[str, str] | None = None,
) -> None:
    """Run a program to its end; its output becomes the error when it fails."""
    done = subprocess.run(
        [*_as_user(user), *_resolved(command)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=directory,
        env=_environment(directory, env),
        timeout=60,
        check=False,
    )
    if done.returncode:
        raise ServerError(f"{command[0]} failed:\n{done.stdout}{done.stderr}")


def find_program(name: str) -> str | None:
    """Return the program's path, looking also where Debian hides servers from PATH."""
    versions = Path("/usr/lib/postgresql").glob("[0-9]*")
    newest_first = sorted(versions, key=lambda path: float(path.name), reverse=True)
    places = [
        "/usr/lib/rabbitmq/bin",  # before PATH: what lies there insists on being root or rabbitmq
        os.environ.get("PATH", os.defpath),
        "/usr/sbin",
        "/usr/local/sbin",
        *(str(version / "bin") for version in newest_first),
    ]
    return shutil.which(name, path=os.pathsep.join(places))


def unprivileged_user() -> str | None:
    """Name the user for a program that refuses root, or None when we are not root."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in known)


def unused_port() -> int:
    """Return a port of loopback that nobody listens on.

    It lies below the range that Linux takes clients' ports from (32768 up): no outgoing
    connection can take it before its server does, nor while a proxy refuses connections.
    """
    while True:
        port = random.randint(15000, 32000)
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            return port


def _resolved(command: list[str]) -> list[str]:
    program = find_program(command[0])
    if program is None:
        raise ServerError(f"{command[0]} is not on this machine")
    return [program, *command[1:]]


def _as_user(user: str | None) -> list[str]:
    if user is None:
        return []
    group = str(pwd.getpwnam(user).pw_gid)
    return ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups"]


def _dying_with_us(stop_signal: signal.Signals) -> list[str]:
    # A killed test run cannot clean up; Linux then sends this signal to its servers.
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", stop_signal.name] if setpriv else []


def _environment(directory: Path, extra: dict[str, str] | None) -> dict[str, str]:
    # What the machine says of its own servers must not reach ours.
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PG", "RABBITMQ_", "ERL_", "MYSQL_", "MARIADB_"))
    }
    return {**kept, "LC_ALL": "C.UTF-8", "HOME": str(directory), **(extra or {})}
