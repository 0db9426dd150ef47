"""Private servers for the tests: free ports, throw-away directories, gone afterwards.

This module alone knows how each server is set up and asked. A server counts as started
once a real client has been answered. Run as a module it prints the Debian packages of the
servers that this machine lacks.
"""

import base64
import contextlib
import hashlib
import itertools
import json
import os
import shutil
import signal
import socket
import sys
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import amqp
import redis
import sqlalchemy as sa

from tests.processes import (
    HOST,
    Process,
    ServerError,
    find_program,
    run,
    spawn,
    unprivileged_user,
    unused_port,
)
from tests.waiting import wait_until

# name: (what must be found, the Debian package that brings it)
REQUIREMENTS = {
    "postgresql": (("initdb", "postgres"), "postgresql"),
    "mariadb": (("mariadb-install-db", "mariadbd"), "mariadb-server"),
    "redis": (("redis-server",), "redis-server"),
    "rabbitmq": (("rabbitmq-server", "rabbitmqctl", "epmd"), "rabbitmq-server"),
    "pgbouncer": (("pgbouncer",), "pgbouncer"),
    "sqs": ((), ""),  # a Python package
}
VHOSTS_AT_A_TIME = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running private server; `url` reaches it with every right."""

    name: str
    version: str
    host: str = HOST
    port: int
    url: str
    processes: tuple[Process, ...]

    def stop(self) -> None:
        """End the server's processes, the last started first."""
        for process in reversed(self.processes):
            process.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseServer(Server):
    """PostgreSQL or MariaDB; `url` is a SQLAlchemy URL of its administrative database."""

    def create_database(self) -> str:
        """Make an empty database with a name of its own and return its SQLAlchemy URL."""
        name = f"test_{uuid.uuid4().hex[:12]}"
        _ask_database(self.url, f"CREATE DATABASE {name}")
        url = sa.make_url(self.url).set(database=name)
        return url.render_as_string(hide_password=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisServer(Server):
    """Redis; its logical databases 1 to 15 are handed out in turn."""

    numbers: Iterator[int] = field(default_factory=lambda: itertools.cycle(range(1, 16)))

    def empty_database(self) -> str:
        """Flush the logical database whose turn it is and return its URL."""
        url = f"redis://{self.host}:{self.port}/{next(self.numbers)}"
        with redis.Redis.from_url(url) as client:
            client.flushdb()
        return url


@dataclass(frozen=True, slots=True, kw_only=True)
class RabbitServer(Server):
    """RabbitMQ; virtual hosts are made many at a time, since each rabbitmqctl costs a second."""

    vhosts: list[str]
    control: Callable[[str], None]

    def empty_vhost(self) -> str:
        """Return the URL of a virtual host that no test has had yet."""
        if not self.vhosts:
            self._add_vhosts()
        return f"{self.url.rpartition('/')[0]}/{self.vhosts.pop(0)}"

    def _add_vhosts(self) -> None:
        names = _vhost_names()
        self.control(
            "[begin rabbit_vhost:add(V, <<>>), rabbit_auth_backend_internal:set_permissions("
            '<<"guest">>, V, <<".*">>, <<".*">>, <<".*">>, <<"tests">>) end || V <- ['
            + ", ".join(f'<<"{name}">>' for name in names)
            + "]]."
        )
        self.vhosts.extend(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class SQSServer(Server):
    """moto: SQS, SNS and STS, with checks like those of AWS."""

    def without_queues(self) -> str:
        """Delete everything and return the broker's URL."""
        _ask_moto(self.port, "reset", "POST")
        return self.url


def missing(name: str) -> str | None:
    """Say which program of a server is not on this machine and what brings it, or None."""
    programs, package = REQUIREMENTS[name]
    lacking = [program for program in programs if find_program(program) is None]
    if not lacking:
        return None
    return f"no {' and no '.join(lacking)} on this machine (apt-get install {package})"


def start_postgresql(directory: Path, *, durable: bool = False) -> DatabaseServer:
    """Start PostgreSQL; as root it runs as another user, since it refuses root.

    `durable` makes commits reach the disk, as on a real server; tests have no need of it.
    """
    user = unprivileged_user()
    data, port = directory / "data", unused_port()
    data.mkdir(parents=True)
    if user is not None:
        for folder in (directory, data):
            shutil.chown(folder, user)
    initial = ["--auth=trust", "--username=outbox", "--encoding=UTF8", "--locale=C", "--no-sync"]
    run(["initdb", "-D", str(data), *initial], directory, user=user)
    settings = {
        "port": port,
        "listen_addresses": HOST,
        "unix_socket_directories": directory,
        "max_connections": 200,
        "max_prepared_transactions": 20,
        "fsync": "on" if durable else "off",
    }
    options = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
    # SIGINT is its fast shutdown; killed outright it would leave shared memory behind.
    process = spawn(
        ["postgres", "-D", str(data), *options], directory, user=user, stop_signal=signal.SIGINT
    )
    url = f"postgresql+psycopg://outbox:secret@{HOST}:{port}/postgres"
    version = _wait_for(process, lambda: _ask_database(url, "SHOW server_version"))
    return DatabaseServer(name="PostgreSQL", version=version, port=port, url=url, processes=(process,))


def start_pgbouncer(directory: Path, behind: DatabaseServer) -> Server:
    """Start PgBouncer before PostgreSQL: in transaction mode, two connections for each database."""
    user, port = unprivileged_user(), unused_port()
    directory.mkdir(parents=True)
    settings = directory / "pgbouncer.ini"
    settings.write_text(
        f"[databases]\n* = host={behind.host} port={behind.port} user=outbox\n"
        f"[pgbouncer]\nlisten_addr = {HOST}\nlisten_port = {port}\nunix_socket_dir =\n"
        "auth_type = any\npool_mode = transaction\ndefault_pool_size = 2\n"
    )
    if user is not None:
        shutil.chown(directory, user)
    process = spawn(["pgbouncer", str(settings)], directory, user=user)
    url = sa.make_url(behind.url).set(port=port).render_as_string(hide_password=False)
    version = _wait_for(process, lambda: _ask_database(url, "SHOW server_version"))
    name = f"PgBouncer before {behind.name}"
    return Server(name=name, version=version, port=port, url=url, processes=(process,))


def start_mariadb(directory: Path) -> DatabaseServer:
    """Start MariaDB with row-based binary logs, and with none of the machine's settings."""
    data, port = directory / "data", unused_port()
    directory.mkdir(parents=True)
    first = directory / "first.sql"
    first.write_text(
        "CREATE USER 'outbox'@'%' IDENTIFIED BY 'secret';\nGRANT ALL ON *.* TO 'outbox'@'%';\n"
    )
    common = ["--no-defaults", f"--datadir={data}", "--innodb-log-file-size=32M"]
    if os.geteuid() == 0:
        common.append("--user=root")  # as root it wants to be told
    install = ["--skip-test-db", "--auth-root-authentication-method=normal", "--skip-name-resolve"]
    run(["mariadb-install-db", *common, *install], directory)
    options = [
        f"--port={port}",
        f"--bind-address={HOST}",
        f"--socket={directory / 'socket'}",
        f"--pid-file={directory / 'pid'}",
        f"--init-file={first}",
        "--skip-name-resolve",
        "--max-connections=300",
        "--character-set-server=utf8mb4",
        "--collation-server=utf8mb4_unicode_ci",
        "--server-id=1",
        "--log-bin=binlog",
        "--binlog-format=ROW",
        "--innodb-flush-log-at-trx-commit=0",
        "--sync-binlog=0",
    ]
    process = spawn(["mariadbd", *common, *options], directory)
    url = f"mysql+pymysql://outbox:secret@{HOST}:{port}/mysql?charset=utf8mb4"
    version = _wait_for(process, lambda: _ask_database(url, "SELECT VERSION()"))
    return DatabaseServer(name="MariaDB", version=version, port=port, url=url, processes=(process,))


def start_redis(directory: Path) -> RedisServer:
    """Start Redis with nothing kept on disk."""
    port = unused_port()
    directory.mkdir(parents=True)
    options = ["--port", str(port), "--bind", HOST, "--save", "", "--appendonly", "no"]
    process = spawn(["redis-server", *options, "--dir", str(directory)], directory)
    url = f"redis://{HOST}:{port}/0"
    version = _wait_for(process, lambda: _ask_redis(url))
    return RedisServer(name="Redis", version=version, port=port, url=url, processes=(process,))


def start_sqs(directory: Path) -> SQSServer:
    """Start moto, which keeps everything in memory."""
    port = unused_port()
    directory.mkdir(parents=True)
    program = str(Path(sys.executable).with_name("moto_server"))
    process = spawn([program, "-H", HOST, "-p", str(port)], directory)
    _wait_for(process, lambda: _ask_moto(port, "data.json", "GET"))
    url = f"sqs://key:secret@{HOST}:{port}//"
    return SQSServer(
        name="moto (SQS)", version=version("moto"), port=port, url=url, processes=(process,)
    )


def start_rabbitmq(directory: Path) -> RabbitServer:
    """Start RabbitMQ as a node of its own, with its own port mapper and no plugins."""
    port, mapper_port = unused_port(), unused_port()
    directory.mkdir(parents=True)
    vhosts = _vhost_names()
    env = _rabbit_env(directory, mapper_port)
    _write_rabbit_config(directory, port, vhosts)
    # Left to itself the node would start a mapper that outlives it as a daemon.
    mapper = spawn(["epmd", "-port", str(mapper_port), "-address", HOST], directory, env=env)
    _wait_for(mapper, lambda: _reach(mapper_port))
    node = spawn(["rabbitmq-server"], directory, env=env)
    try:
        # The last virtual host answers: then all of them have been made.
        version = _wait_for(node, lambda: _ask_rabbitmq(port, vhosts[-1]), timeout=60)
    except BaseException:
        mapper.stop()
        raise
    return RabbitServer(
        name="RabbitMQ",
        version=version,
        port=port,
        url=f"amqp://guest:guest@{HOST}:{port}/%2F",
        processes=(mapper, node),
        vhosts=vhosts,
        control=lambda code: run(["rabbitmqctl", "eval", code], directory, env=env),
    )


def _rabbit_env(directory: Path, mapper_port: int) -> dict[str, str]:
    return {
        "HOME": str(directory),  # the Erlang cookie's place
        "ERL_EPMD_PORT": str(mapper_port),
        # Then the script becomes the node; otherwise it stays in between and loses the node
        # to init when it is killed.
        "RUNNING_UNDER_SYSTEMD": "true",
        "RABBITMQ_NODENAME": f"outbox-{uuid.uuid4().hex[:8]}@localhost",
        "RABBITMQ_DIST_PORT": str(unused_port()),
        "RABBITMQ_CONF_ENV_FILE": str(directory / "none"),
        "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
        "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_GENERATED_CONFIG_DIR": str(directory / "generated"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
            "-kernel inet_dist_use_interface {127,0,0,1} +S 2:2 +sbwt none"
        ),
    }


def _write_rabbit_config(directory: Path, port: int, vhosts: list[str]) -> None:
    definitions = directory / "definitions.json"
    definitions.write_text(json.dumps(_rabbit_definitions(["/", *vhosts])))
    (directory / "plugins").write_text("[].\n")
    (directory / "rabbitmq.conf").write_text(
        f"listeners.tcp.default = {HOST}:{port}\n"
        f"load_definitions = {definitions}\n"
        "disk_free_limit.absolute = 50MB\n"
    )


def _rabbit_definitions(vhosts: list[str]) -> dict[str, object]:
    salt = os.urandom(4)
    digest = hashlib.sha256(salt + b"guest").digest()
    every_right = {"user": "guest", "configure": ".*", "write": ".*", "read": ".*"}
    guest = {
        "name": "guest",
        "password_hash": base64.b64encode(salt + digest).decode(),
        "hashing_algorithm": "rabbit_password_hashing_sha256",
        "tags": "administrator",
    }
    return {
        "users": [guest],
        "vhosts": [{"name": name} for name in vhosts],
        "permissions": [{"vhost": name, **every_right} for name in vhosts],
    }


def _vhost_names() -> list[str]:
    return [f"test_{uuid.uuid4().hex[:12]}" for _ in range(VHOSTS_AT_A_TIME)]


def _ask_database(url: str, statement: str) -> str:
    engine = sa.create_engine(url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        result = connection.execute(sa.text(statement))
        return str(result.scalar()) if result.returns_rows else ""


def _ask_redis(url: str) -> str:
    with redis.Redis.from_url(url) as client:
        return str(client.info("server")["redis_version"])


def _ask_rabbitmq(port: int, vhost: str) -> str:
    # Not Kombu's connection: it would sleep two seconds before a second try of its own.
    connection = amqp.Connection(f"{HOST}:{port}", virtual_host=vhost, connect_timeout=5)
    try:
        connection.connect()
        return str(connection.server_properties["version"])
    finally:
        connection.close()


def _ask_moto(port: int, what: str, method: str) -> str:
    request = urllib.request.Request(f"http://{HOST}:{port}/moto-api/{what}", method=method)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.status)


def _reach(port: int) -> str:
    with socket.create_connection((HOST, port), timeout=5):
        return "reached"


def _wait_for(process: Process, ask: Callable[[], str], timeout: float = 30) -> str:
    def answer() -> str | None:
        if process.popen.poll() is not None:
            raise ServerError(f"{process.log.stem} ended early:\n{process.last_words()}")
        # Whatever a client says while its server boots only means: ask again.
        with contextlib.suppress(Exception):
            return ask()
        return None

    try:
        return wait_until(answer, timeout, f"an answer of {process.log.stem}", 0.05) or ""
    except AssertionError as error:
        process.stop()
        raise ServerError(f"{error}; its log ends:\n{process.last_words()}") from error
    except BaseException:
        process.stop()
        raise


if __name__ == "__main__":
    print(*(package for name, (_, package) in REQUIREMENTS.items() if missing(name)))
