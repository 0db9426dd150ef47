"""Redis behind TLS, a socket or a sentinel: in pipelines as well."""

import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.processes import HOST, run
from tests.publishers.batches import connected, message, publish
from tests.redis_servers import count_commands, port_of, private_redis, sentinel
from tests.relay.apps import relaying, rows, send
from tests.relay.conftest import OpenOutbox, open_outbox
from tests.waiting import wait_until

__all__ = ["open_outbox"]


@pytest.fixture
def master(server_directory: Path, tmp_path: Path) -> Iterator[redis.Redis]:
    at_once = ["--repl-diskless-sync-delay", "0"]
    with private_redis(server_directory / tmp_path.name / "master", *at_once) as client:
        yield client


@pytest.fixture
def replica(master: redis.Redis, server_directory: Path, tmp_path: Path) -> Iterator[redis.Redis]:
    of_master = ["--replicaof", f"{HOST} {port_of(master)}"]
    with private_redis(server_directory / tmp_path.name / "replica", *of_master) as client:
        wait_until(lambda: client.info("replication")["master_link_status"] == "up", 20, "the replica")
        yield client


@pytest.fixture
def watcher(
    master: redis.Redis, replica: redis.Redis, server_directory: Path, tmp_path: Path
) -> Iterator[redis.Redis]:
    with sentinel(server_directory / tmp_path.name / "sentinel", master) as client:
        yield client


def assert_pipelined(client: redis.Redis, url: str, **options: Any) -> None:
    publisher = connected(url, **options)
    before = count_commands(client, "lpush")
    messages = [message() for _ in range(30)]
    assert publish(publisher, messages).accepted == {each.id for each in messages}
    publisher.close()
    assert client.llen("celery") == 30
    assert count_commands(client, "lpush") == before + 1


@pytest.mark.parametrize("way", ["URL", "options"])
def test_tls_is_spoken_and_certificates_are_checked(
    way: str, server_directory: Path, tmp_path: Path
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = f"req -x509 -newkey rsa:2048 -nodes -days 2 -keyout {key} -out {certificate} -subj /CN=test"
    run(["openssl", *words.split(), "-addext", f"subjectAltName=IP:{HOST}"], tmp_path)
    options = f"--port 0 --tls-port {{port}} --tls-cert-file {certificate} --tls-key-file {key}"
    with private_redis(
        server_directory / tmp_path.name,
        *options.split(),
        *("--tls-auth-clients", "no"),
        ssl=True,
        ssl_ca_certs=str(certificate),
    ) as client:
        url = f"rediss://{HOST}:{port_of(client)}/0"
        if way == "URL":
            assert_pipelined(client, f"{url}?ssl_cert_reqs=CERT_REQUIRED&ssl_ca_certs={certificate}")
        else:
            checked = {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": str(certificate)}
            assert_pipelined(client, url, ssl=checked)
        with pytest.raises(Exception, match="certificate verify failed"):
            connected(url, ssl={"ssl_cert_reqs": ssl.CERT_REQUIRED})


def test_a_socket_of_the_machine_is_used(server_directory: Path, tmp_path: Path) -> None:
    directory = server_directory / tmp_path.name
    socket = server_directory / "redis.sock"
    with private_redis(directory, "--unixsocket", str(socket)) as client:
        assert_pipelined(client, f"redis+socket://{socket}")


def test_a_sentinel_tells_the_master(master: redis.Redis, watcher: redis.Redis) -> None:
    url = f"sentinel://{HOST}:{port_of(watcher)}/0"
    assert_pipelined(master, url, transport_options={"master_name": "shop"})


def test_after_a_failover_the_new_master_gets_what_is_stored(
    master: redis.Redis,
    replica: redis.Redis,
    watcher: redis.Redis,
    open_outbox: OpenOutbox,
    sqlite_url: str,
) -> None:
    config = {"broker_transport_options": {"master_name": "shop", "socket_timeout": 2}}
    url = f"sentinel://{HOST}:{port_of(watcher)}/0"
    outbox = open_outbox(url, sqlite_url, config=config, retry={"base_delay": 0.1, "max_delay": 0.2})
    with relaying(outbox):
        before = send(outbox)
        wait_until(lambda: not rows(outbox), 15, "the first delivery")
        assert master.wait(1, 5000) == 1
        watcher.sentinel_failover("shop")  # type: ignore[no-untyped-call]  # redis has not typed it
        wait_until(lambda: replica.info("replication")["role"] == "master", 20, "the failover")
        master.replicaof(HOST, str(port_of(replica)))  # as the sentinel does, some seconds later
        after = [send(outbox) for _ in range(5)]
        wait_until(lambda: not rows(outbox), 20, "the other deliveries")
    found = [json.loads(text)["headers"]["id"] for text in reversed(replica.lrange("celery", 0, -1))]
    assert found[0] == before
    assert set(found) == {before, *after}
