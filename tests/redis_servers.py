"""More of Redis than one plain server: replicas, a sentinel, TLS, a socket, a password."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import redis

from tests.processes import HOST, spawn, unused_port
from tests.waiting import wait_until


@contextmanager
def private_redis(directory: Path, *options: str, **client_options: Any) -> Iterator[redis.Redis]:
    """Run a server of its own with more options, and yield a client of it.

    `{port}` in an option stands for the port, which the client's `connection_pool` knows.
    """
    port = unused_port()
    directory.mkdir(parents=True)
    usual = ["--port", "{port}", "--bind", HOST, "--save", "", "--dir", str(directory)]
    command = ["redis-server", *usual, *options]
    process = spawn([option.format(port=port) for option in command], directory)
    client = redis.Redis(host=HOST, port=port, **client_options)

    def answers() -> bool:
        with suppress(redis.ConnectionError):
            return bool(client.ping())
        return False

    try:
        with client:
            wait_until(answers, 10, "an answer of Redis")
            yield client
    finally:
        process.stop()


@contextmanager
def sentinel(directory: Path, master: redis.Redis) -> Iterator[redis.Redis]:
    """Run a sentinel that watches a master under the name of `shop`, once it knows its replica."""
    directory.mkdir(parents=True)
    settings = directory / "sentinel.conf"
    settings.write_text(
        f"sentinel monitor shop {HOST} {port_of(master)} 1\n"
        "sentinel down-after-milliseconds shop 1000\nsentinel failover-timeout shop 5000\n"
    )
    port = unused_port()
    options = ["--sentinel", "--port", str(port), "--bind", HOST]
    process = spawn(["redis-server", str(settings), *options], directory)

    def knows_replica() -> bool:
        with suppress(redis.ConnectionError):
            return any(each["flags"] == "slave" for each in client.sentinel_slaves("shop"))
        return False

    try:
        with redis.Redis(host=HOST, port=port) as client:
            wait_until(knows_replica, 20, "the sentinel's knowledge of the replica", 0.1)
            yield client
    finally:
        process.stop()


def port_of(client: redis.Redis) -> int:
    """Return the port of a client's server."""
    return int(client.connection_pool.connection_kwargs["port"])


def count_commands(client: redis.Redis, name: str) -> int:
    """Return how often a server was sent a command."""
    return int(client.info("commandstats").get(f"cmdstat_{name}", {"calls": 0})["calls"])
