"""The harness itself: every server answers, nothing is shared, the wire breaks as told."""

import socket
from collections.abc import Callable, Iterator

import kombu
import pytest
import redis
import sqlalchemy as sa

from tests.proxy import TcpProxy
from tests.servers import DatabaseServer, RabbitServer, RedisServer
from tests.waiting import wait_until

MakeProxy = Callable[[str, int], TcpProxy]


def connect(url: str) -> sa.Connection:
    return sa.create_engine(url, poolclass=sa.NullPool).connect()


@pytest.fixture
def echo(tcp_proxy: MakeProxy, redis_server: RedisServer) -> TcpProxy:
    """A proxy in front of a server that answers PING, which is all that is asked of it here."""
    return tcp_proxy(redis_server.host, redis_server.port)


@pytest.fixture
def client(echo: TcpProxy) -> Iterator[socket.socket]:
    with socket.create_connection((echo.host, echo.port), timeout=5) as connection:
        yield connection


def ping(client: socket.socket) -> bytes:
    client.sendall(b"PING\r\n")
    return client.recv(100)


def is_silent(client: socket.socket) -> bool:
    client.settimeout(0.2)
    try:
        return client.recv(100) == b"never"
    except TimeoutError:
        return True
    finally:
        client.settimeout(5)


def test_a_database_answers_and_stores(database_url: str) -> None:
    with connect(database_url) as connection:
        connection.execute(sa.text("CREATE TABLE seen (id INTEGER PRIMARY KEY)"))
        connection.execute(sa.text("INSERT INTO seen VALUES (7)"))
        connection.commit()
    with connect(database_url) as connection:
        assert connection.scalar(sa.text("SELECT id FROM seen")) == 7


@pytest.mark.parametrize("name", ["postgresql", "mariadb"])
def test_two_databases_are_distinct(name: str, request: pytest.FixtureRequest) -> None:
    server: DatabaseServer = request.getfixturevalue(name)
    first, second = server.create_database(), server.create_database()
    with connect(first) as connection:
        connection.execute(sa.text("CREATE TABLE seen (id INTEGER)"))
        connection.commit()
    with connect(second) as connection:
        assert sa.inspect(connection).get_table_names() == []


def test_postgresql_can_prepare_transactions(postgresql_url: str) -> None:
    with connect(postgresql_url) as connection:
        transaction = connection.begin_twophase()
        connection.execute(sa.text("CREATE TABLE seen (id INTEGER)"))
        transaction.prepare()
        transaction.commit()


def test_mariadb_speaks_utf8mb4_and_logs_rows(mariadb_url: str) -> None:
    with connect(mariadb_url) as connection:
        assert connection.scalar(sa.text("SELECT @@character_set_database")) == "utf8mb4"
        assert connection.scalar(sa.text("SELECT @@binlog_format")) == "ROW"


def test_redis_hands_out_an_empty_database(redis_server: RedisServer) -> None:
    urls = [redis_server.empty_database() for _ in range(15)]
    with redis.Redis.from_url(urls[0]) as connection:
        connection.set("left", "over")
    assert len(set(urls)) == 15
    assert redis_server.empty_database() == urls[0]
    with redis.Redis.from_url(urls[0]) as connection:
        assert connection.dbsize() == 0


def test_rabbitmq_carries_a_message(rabbitmq_url: str) -> None:
    with kombu.Connection(rabbitmq_url) as connection, connection.SimpleQueue("q") as queue:
        queue.put("hello")
        message = queue.get(timeout=5)
        message.ack()
        assert message.payload == "hello"


def test_rabbitmq_never_runs_out_of_virtual_hosts(rabbitmq: RabbitServer) -> None:
    count = len(rabbitmq.vhosts) + 1
    urls = [rabbitmq.empty_vhost() for _ in range(count)]
    assert len(set(urls)) == count
    with kombu.Connection(urls[-1]) as connection:
        connection.connect()


def test_the_proxy_forwards_and_counts(echo: TcpProxy, client: socket.socket) -> None:
    assert ping(client) == b"+PONG\r\n"
    assert echo.accepted == 1
    with redis.Redis.from_url(echo.through("redis://somewhere:1/3")) as connection:
        assert connection.ping()
        assert connection.client_info()["db"] == 3
    assert echo.accepted == 2


def test_a_cut_ends_live_connections_only(echo: TcpProxy, client: socket.socket) -> None:
    assert ping(client) == b"+PONG\r\n"
    echo.cut()
    assert client.recv(100) == b""
    with socket.create_connection((echo.host, echo.port), timeout=5) as again:
        assert ping(again) == b"+PONG\r\n"


def test_a_stall_holds_bytes_until_resumed(echo: TcpProxy, client: socket.socket) -> None:
    echo.stall()
    client.sendall(b"PING\r\n")
    assert is_silent(client)
    echo.resume()
    assert client.recv(100) == b"+PONG\r\n"


def test_a_stalled_connection_can_be_cut(echo: TcpProxy, client: socket.socket) -> None:
    echo.stall()
    client.sendall(b"PING\r\n")
    wait_until(lambda: echo.accepted == 1, message="the connection at the proxy")
    echo.cut()
    assert client.recv(100) == b""


def test_swallowed_replies_are_lost_but_commands_arrive(
    echo: TcpProxy, client: socket.socket, redis_url: str
) -> None:
    number = redis_url.rpartition("/")[2]
    echo.swallow_replies()
    client.sendall(f"SELECT {number}\r\nSET seen yes\r\n".encode())
    with redis.Redis.from_url(redis_url, decode_responses=True) as direct:
        wait_until(lambda: direct.get("seen") == "yes", message="the command at the server")
    assert is_silent(client)
    echo.resume()
    assert ping(client) == b"+PONG\r\n"


def test_refusing_keeps_live_connections_and_the_port(echo: TcpProxy, client: socket.socket) -> None:
    assert ping(client) == b"+PONG\r\n"
    echo.refuse()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((echo.host, echo.port), timeout=5)
    assert ping(client) == b"+PONG\r\n"
    echo.listen()
    with socket.create_connection((echo.host, echo.port), timeout=5) as again:
        assert ping(again) == b"+PONG\r\n"


def test_waiting_ends_at_its_deadline() -> None:
    with pytest.raises(AssertionError, match=r"a miracle: not seen within 0\.1 seconds"):
        wait_until(lambda: False, timeout=0.1, message="a miracle")
