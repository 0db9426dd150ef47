"""The fixtures that every test may ask for: servers, fresh databases, a breakable wire.

A server starts when the first test asks for it and lives until the session ends. Where its
programs are missing, a test is skipped on a developer's machine and fails in CI.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import sqlalchemy as sa
from celery import _state as celery_state

from tests import servers
from tests.proxy import TcpProxy
from tests.publishers.sqs_stub import SQSStub

S = TypeVar("S", bound=servers.Server)
STARTED = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STARTED] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if started := config.stash[STARTED]:
        terminalreporter.write_line(f"servers: {', '.join(started)}")


@pytest.fixture(scope="session")
def server_directory() -> Iterator[Path]:
    """Where the servers keep their data: short, for socket paths, and open to another user."""
    directory = Path(tempfile.mkdtemp(prefix="outbox-"))
    directory.chmod(0o711)
    yield directory
    # RabbitMQ's last child may still be writing while it dies.
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def postgresql(server_directory: Path, pytestconfig: pytest.Config) -> Iterator[servers.DatabaseServer]:
    with _running("postgresql", servers.start_postgresql, server_directory, pytestconfig) as it:
        yield it


@pytest.fixture(scope="session")
def mariadb(server_directory: Path, pytestconfig: pytest.Config) -> Iterator[servers.DatabaseServer]:
    with _running("mariadb", servers.start_mariadb, server_directory, pytestconfig) as it:
        yield it


@pytest.fixture(scope="session")
def redis_server(server_directory: Path, pytestconfig: pytest.Config) -> Iterator[servers.RedisServer]:
    with _running("redis", servers.start_redis, server_directory, pytestconfig) as it:
        yield it


@pytest.fixture(scope="session")
def rabbitmq(server_directory: Path, pytestconfig: pytest.Config) -> Iterator[servers.RabbitServer]:
    with _running("rabbitmq", servers.start_rabbitmq, server_directory, pytestconfig) as it:
        yield it


@pytest.fixture(scope="session")
def sqs_server(server_directory: Path, pytestconfig: pytest.Config) -> Iterator[servers.SQSServer]:
    with _running("sqs", servers.start_sqs, server_directory, pytestconfig) as it:
        yield it


@pytest.fixture(scope="session")
def pgbouncer(
    server_directory: Path, postgresql: servers.DatabaseServer, pytestconfig: pytest.Config
) -> Iterator[servers.Server]:
    start = partial(servers.start_pgbouncer, behind=postgresql)
    with _running("pgbouncer", start, server_directory, pytestconfig) as it:
        yield it


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of a database file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'test.db'}"


@pytest.fixture
def postgresql_url(postgresql: servers.DatabaseServer) -> str:
    """The URL of an empty PostgreSQL database."""
    return postgresql.create_database()


@pytest.fixture
def pgbouncer_url(pgbouncer: servers.Server, postgresql: servers.DatabaseServer) -> str:
    """The URL of an empty PostgreSQL database behind PgBouncer."""
    url = sa.make_url(postgresql.create_database()).set(port=pgbouncer.port)
    return url.render_as_string(hide_password=False)


@pytest.fixture
def mariadb_url(mariadb: servers.DatabaseServer) -> str:
    """The URL of an empty MariaDB database."""
    return mariadb.create_database()


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def database_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty database, on each of the three in turn."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def redis_url(redis_server: servers.RedisServer) -> str:
    """The URL of an empty logical database of Redis."""
    return redis_server.empty_database()


@pytest.fixture
def rabbitmq_url(rabbitmq: servers.RabbitServer) -> str:
    """The URL of an empty virtual host of RabbitMQ."""
    return rabbitmq.empty_vhost()


@pytest.fixture
def sqs_url(sqs_server: servers.SQSServer) -> str:
    """The URL of a broker that speaks SQS and has no queue yet."""
    return sqs_server.without_queues()


@pytest.fixture
def sqs_stub() -> Iterator[SQSStub]:
    """A server that speaks SQS, and goes wrong when it is told to."""
    stub = SQSStub()
    yield stub
    stub.close()


@pytest.fixture
def tcp_proxy() -> Iterator[Callable[[str, int], TcpProxy]]:
    """Make proxies in front of (host, port); all are closed when the test ends."""
    with contextlib.ExitStack() as stack:

        def make(host: str, port: int) -> TcpProxy:
            proxy = TcpProxy(host, port)
            stack.callback(proxy.close)
            return proxy

        yield make


@contextlib.contextmanager
def _running(
    name: str, start: Callable[[Path], S], directory: Path, config: pytest.Config
) -> Iterator[S]:
    if reason := servers.missing(name):
        give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        give_up(f"{name}: {reason}")
    began = time.monotonic()
    server = start(directory / name)
    seconds = time.monotonic() - began
    config.stash[STARTED].append(f"{server.name} {server.version} ({seconds:.1f} s)")
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(autouse=True)
def tasks_of_this_test_alone() -> Iterator[None]:
    """Let no later app meet this test's tasks: Celery gives every task to all apps of the process."""
    before = set(celery_state._on_app_finalizers)
    yield
    celery_state._on_app_finalizers.intersection_update(before)
