"""A broker with alternates: the next one's turn comes as in Celery, with the same options."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_outbox.relay.publishers import Publisher
from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.publishers.batches import connected, message, publish
from tests.redis_servers import count_commands, port_of, private_redis
from tests.relay.apps import relaying, rows, send
from tests.relay.conftest import OpenOutbox, open_outbox
from tests.relay.wire import task_ids
from tests.waiting import wait_until

__all__ = ["open_outbox"]

MakeProxy = Callable[[str, int], TcpProxy]
#: The option of a broker that limits how long an answer is waited for.
LIMITS = {"redis": "socket_timeout", "rabbitmq": "read_timeout"}


@pytest.fixture(params=LIMITS)
def server(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def places(server: str, request: pytest.FixtureRequest) -> Sequence[str]:
    """The URLs of two empty places of one server."""
    make = {"redis": "empty_database", "rabbitmq": "empty_vhost"}[server]
    running: Any = request.getfixturevalue({"redis": "redis_server"}.get(server, server))
    return [getattr(running, make)() for _ in range(2)]


@pytest.fixture
def proxies(places: Sequence[str], tcp_proxy: MakeProxy) -> Sequence[TcpProxy]:
    """A proxy before each of the places."""
    return [tcp_proxy(HOST, int(url.rpartition("/")[0].rpartition(":")[2])) for url in places]


@pytest.fixture
def alternates(places: Sequence[str], proxies: Sequence[TcpProxy]) -> Sequence[str]:
    return [proxy.through(url) for proxy, url in zip(proxies, places, strict=True)]


def assert_delivers(publisher: Publisher, url: str) -> None:
    messages = [message() for _ in range(3)]
    assert publish(publisher, messages).accepted == {each.id for each in messages}
    assert task_ids(url)[-3:] == [each.task_id for each in messages]


def test_the_first_alternate_that_can_be_reached_is_used(
    alternates: Sequence[str], places: Sequence[str], proxies: Sequence[TcpProxy]
) -> None:
    proxies[0].refuse()
    publisher = connected(";".join(alternates))
    assert_delivers(publisher, places[1])
    assert task_ids(places[0]) == []
    publisher.close()


@pytest.mark.parametrize("form", ["URL", "list"])
def test_when_one_dies_the_next_takes_over_and_back_again(
    form: str, alternates: Sequence[str], places: Sequence[str], proxies: Sequence[TcpProxy]
) -> None:
    publisher = connected(";".join(alternates)) if form == "URL" else connected(list(alternates))
    for alive in (0, 1, 0):
        dead = 1 - alive
        proxies[alive].listen()
        proxies[dead].refuse()
        proxies[dead].cut()
        wait_until(lambda dead=dead: proxies[dead].live == 0, message="the end of the connections")
        outcome = publish(publisher, [message()])
        if not outcome.accepted:
            assert outcome.is_connection_lost
            publisher.connect()
        assert_delivers(publisher, places[alive])
    publisher.close()


def test_the_options_hold_for_the_alternate_too(
    server: str, alternates: Sequence[str], places: Sequence[str], proxies: Sequence[TcpProxy]
) -> None:
    proxies[0].refuse()
    publisher = connected(";".join(alternates), transport_options={LIMITS[server]: 0.5})
    assert_delivers(publisher, places[1])
    proxies[1].stall()
    began = time.monotonic()
    outcome = publish(publisher, [message()])
    assert time.monotonic() - began < 5
    assert outcome.accepted == set()
    assert outcome.is_connection_lost
    publisher.close()
    proxies[1].cut()


def test_a_relay_goes_on_with_the_alternate_without_a_restart(
    open_outbox: OpenOutbox,
    sqlite_url: str,
    alternates: Sequence[str],
    places: Sequence[str],
    proxies: Sequence[TcpProxy],
) -> None:
    retry = {"base_delay": 0.05, "max_delay": 0.1}
    outbox = open_outbox(";".join(alternates), sqlite_url, retry=retry)
    with relaying(outbox):
        before = send(outbox)
        wait_until(lambda: not rows(outbox), message="the first delivery")
        proxies[0].refuse()
        proxies[0].cut()
        after = [send(outbox) for _ in range(5)]
        wait_until(lambda: not rows(outbox), message="the other deliveries")
    first, second = (set(task_ids(url)) for url in places)
    assert before in first
    assert set(after) <= second


def test_the_fast_way_is_taken_on_the_alternate_too(redis_url: str, tcp_proxy: MakeProxy) -> None:
    proxy = tcp_proxy(HOST, 1)
    proxy.refuse()
    with redis.Redis.from_url(redis_url) as client:
        publisher = connected(f"{proxy.through(redis_url)};{redis_url}")
        before = count_commands(client, "lpush")
        publish(publisher, [message() for _ in range(30)])
        assert client.llen("celery") == 30
        assert count_commands(client, "lpush") == before + 1
    publisher.close()


def test_a_server_that_is_reached_but_takes_nothing_yields_to_the_next(
    redis_url: str, server_directory: Path, tmp_path: Path
) -> None:
    with private_redis(server_directory / tmp_path.name, "--replicaof", f"{HOST} 1") as replica:
        publisher = connected(f"redis://{HOST}:{port_of(replica)}/0;{redis_url}")
        messages = [message(), message("other")]
        outcome = publish(publisher, messages)
        assert outcome.unsent == {each.id for each in messages}
        assert outcome.is_connection_lost
        publisher.connect()
        assert_delivers(publisher, redis_url)
        publisher.close()
