"""What lies on a broker, read by a raw client: nothing of the package or of Celery takes part."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import amqp
import redis
import sqlalchemy as sa


def redis_envelopes(url: str, queue: str = "celery") -> list[dict[str, Any]]:
    """Return the envelopes of a Redis list, the oldest first; they stay there."""
    with redis.Redis.from_url(url) as client:
        return [json.loads(text) for text in reversed(client.lrange(queue, 0, -1))]


def database_envelopes(url: str) -> list[dict[str, Any]]:
    """Return the envelopes in the tables of Kombu's database transport; they stay there."""
    engine = sa.create_engine(url.removeprefix("sqla+"))
    try:
        if not sa.inspect(engine).has_table("kombu_message"):
            return []
        with engine.connect() as connection:
            query = sa.text("SELECT payload FROM kombu_message ORDER BY id")
            return [json.loads(payload) for payload in connection.execute(query).scalars()]
    finally:
        engine.dispose()


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
        return [each["headers"]["id"] for each in database_envelopes(url)]
    return [each.headers["id"] for each in amqp_messages(url, queue)]


def body_of(envelope: dict[str, Any]) -> bytes:
    """Return the body of a virtual transport's envelope as bytes."""
    body: str = envelope["body"]
    if envelope["properties"]["body_encoding"] == "base64":
        return base64.b64decode(body)
    return body.encode()
