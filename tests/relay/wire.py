"""What lies on a broker, read by a raw client: nothing of the package or of Celery takes part."""

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import amqp
import redis
import sqlalchemy as sa

#: What a queue or list holds, or the members of a set, under its name.
Contents = Mapping[str, Any]


def redis_envelopes(url: str, queue: str = "celery") -> list[dict[str, Any]]:
    """Return the envelopes of a Redis list, the oldest first; they stay there."""
    with redis.Redis.from_url(url) as client:
        return [json.loads(text) for text in reversed(client.lrange(queue, 0, -1))]


@contextmanager
def database_connection(url: str) -> Iterator[sa.Connection]:
    """Connect to the database of Kombu's database transport, and commit at the end."""
    engine = sa.create_engine(url.removeprefix("sqla+"), poolclass=sa.NullPool)
    with engine.begin() as connection:
        yield connection


def database_envelopes(url: str) -> list[tuple[str, dict[str, Any]]]:
    """Return queues and envelopes of the tables of the database transport; they stay there."""
    with database_connection(url) as connection:
        if not sa.inspect(connection).has_table("kombu_message"):
            return []
        query = "SELECT q.name, m.payload FROM kombu_message m JOIN kombu_queue q ON q.id = m.queue_id"
        found = connection.execute(sa.text(f"{query} ORDER BY m.id"))
        return [(queue, json.loads(payload)) for queue, payload in found]


@contextmanager
def amqp_connection(url: str) -> Iterator[amqp.Connection]:
    """Connect to the virtual host of a URL, with nothing of Kombu in between."""
    parts = urlsplit(url)
    connection = amqp.Connection(
        f"{parts.hostname}:{parts.port}", virtual_host=parts.path.removeprefix("/")
    )
    connection.connect()
    try:
        yield connection
    finally:
        connection.close()


def amqp_messages(url: str, queue: str = "celery") -> list[amqp.Message]:
    """Take every message off a queue of RabbitMQ; a queue that is not there has none."""
    with amqp_connection(url) as connection:
        channel, messages = connection.channel(), []
        with suppress(amqp.NotFound):
            while (message := channel.basic_get(queue, no_ack=True)) is not None:
                messages.append(message)
        return messages


def task_ids(url: str, queue: str = "celery") -> list[str]:
    """Return the ids of the tasks on a queue of any broker; on RabbitMQ they are taken off."""
    if url.startswith("redis:"):
        return [each["headers"]["id"] for each in redis_envelopes(url, queue)]
    if url.startswith("sqla+"):
        return [each["headers"]["id"] for name, each in database_envelopes(url) if name == queue]
    return [each.headers["id"] for each in amqp_messages(url, queue)]


def take(url: str, *queues: str, keeps_declared: bool = False) -> Contents:
    """Take everything off a broker: of RabbitMQ, off the queues named.

    Where ``keeps_declared``, Kombu's bindings stay on Redis when its lists are taken off.
    """
    if url.startswith("redis:"):
        return take_redis(url, keeps_declared=keeps_declared)
    if url.startswith("sqla+"):
        return take_database(url)
    return take_amqp(url, queues or ("celery",))


def take_redis(url: str, *, keeps_declared: bool = False) -> Contents:
    """Take everything out of a logical database of Redis, or its lists alone."""
    with redis.Redis.from_url(url) as client:
        contents: dict[str, Any] = {}
        for key in sorted(client.scan_iter()):
            if client.type(key) == b"list":
                texts = client.lrange(key, 0, -1)
                contents[key.decode()] = [_readable(json.loads(text)) for text in reversed(texts)]
                client.delete(key)
            else:
                contents[key.decode()] = client.smembers(key)
        if not keeps_declared:
            client.flushdb()
        return contents


def take_database(url: str) -> Contents:
    """Take every message out of the tables of the database transport."""
    contents: dict[str, Any] = {}
    for queue, envelope in database_envelopes(url):
        contents.setdefault(queue, []).append(_readable(envelope))
    if contents:
        with database_connection(url) as connection:
            connection.execute(sa.text("DELETE FROM kombu_message"))
    return contents


def take_amqp(url: str, queues: tuple[str, ...]) -> Contents:
    """Take every message off queues of RabbitMQ."""
    return {
        queue: [
            {
                "body": message.body,
                "properties": message.properties,
                "headers": message.headers,
                "exchange": message.delivery_info["exchange"],
                "routing_key": message.delivery_info["routing_key"],
            }
            for message in amqp_messages(url, queue)
        ]
        for queue in queues
    }


def _readable(envelope: dict[str, Any]) -> dict[str, Any]:
    # The bytes of the body themselves: base64 is how a virtual transport carries them.
    return {**envelope, "body": body_of(envelope)}


def body_of(envelope: dict[str, Any]) -> bytes:
    """Return the body of a virtual transport's envelope as bytes."""
    body: str = envelope["body"]
    if envelope["properties"]["body_encoding"] == "base64":
        return base64.b64decode(body)
    return body.encode()
