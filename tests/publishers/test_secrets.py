"""What is stored and logged of an error holds neither a password nor a payload, and is not too long."""

import base64
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
import redis
import sqlalchemy as sa

from celery_outbox import Outbox
from celery_outbox.relay.publishers.kombu import text_of
from celery_outbox.signals import outbox_failed
from tests.processes import HOST
from tests.redis_servers import port_of, private_redis
from tests.relay.apps import relay_once, rows, send
from tests.relay.conftest import OpenOutbox, open_outbox

__all__ = ["open_outbox"]

PASSWORD = "hunter2-is-secret"
CARD = "4111-1111-1111-1111"
CARD_ID = uuid.UUID("11111111-2222-3333-4444-555555555555")
PLACES = ["redis", "rabbitmq", "mariadb"]


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What the signal tells of failed deliveries."""
    texts: list[str] = []

    def listen(errors: dict[int, str], **_: Any) -> None:
        texts.extend(errors.values())

    outbox_failed.connect(listen)
    yield texts
    outbox_failed.disconnect(listen)


def everything_said(outbox: Outbox, caplog: pytest.LogCaptureFixture, told: list[str]) -> str:
    """All that the package stores, logs and signals of what went wrong."""
    own = [each.getMessage() for each in caplog.records if each.name.startswith("celery_outbox")]
    return "\n".join([*own, *told, *(row.error or "" for row in rows(outbox))])


# Kombu's tables use what SQLAlchemy 2.1 calls deprecated.
@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
@pytest.mark.parametrize("place", PLACES)
def test_a_wrong_password_is_told_to_nobody(
    place: str,
    open_outbox: OpenOutbox,
    sqlite_url: str,
    server_directory: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    told: list[str],
    request: Any,
) -> None:
    caplog.set_level("DEBUG", "celery_outbox")
    with ExitStack() as stack:
        if place == "redis":
            private = private_redis(
                server_directory / tmp_path.name, "--requirepass", "right", password="right"
            )
            url = f"redis://user@{HOST}:{port_of(stack.enter_context(private))}/0"
        else:
            url = request.getfixturevalue(f"{place}_url")
        parts = urlsplit(url)
        wrong = parts._replace(netloc=f"{parts.username}:{PASSWORD}@{parts.hostname}:{parts.port}")
        outbox = open_outbox(("sqla+" if place == "mariadb" else "") + urlunsplit(wrong), sqlite_url)
        send(outbox)
        relay_once(outbox)
        said = everything_said(outbox, caplog, told)
    assert "denied" in said or "refused" in said or "invalid username-password" in said
    assert PASSWORD not in said
    assert len(rows(outbox)) == 1


@contextmanager
def wrong_kind(url: str, _: Path) -> Iterator[str]:
    with redis.Redis.from_url(url) as client:
        client.set("celery", "no list")
    yield url


@contextmanager
def unknown_command(_: str, directory: Path) -> Iterator[str]:
    with private_redis(directory, "--rename-command", "LPUSH", "") as client:
        yield f"redis://{HOST}:{port_of(client)}/0"


@contextmanager
def as_it_is(url: str, _: Path) -> Iterator[str]:
    yield url


@contextmanager
def broken_table(_: str, directory: Path) -> Iterator[str]:
    directory.mkdir()
    url = f"sqlite:///{directory / 'broker.db'}"
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE kombu_queue (id INTEGER PRIMARY KEY, name TEXT)"))
        connection.execute(sa.text("CREATE TABLE kombu_message (id INTEGER PRIMARY KEY, payload INT)"))
    yield f"sqla+{url}"


REFUSALS: dict[str, tuple[str, Callable[[str, Path], Any]]] = {
    "a Redis key of another kind": ("redis_url", wrong_kind),
    "a Redis command that is not there": ("redis_url", unknown_command),
    "a RabbitMQ header that cannot be written": ("rabbitmq_url", as_it_is),
    "a table that is not Kombu's": ("sqlite_url", broken_table),
}


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_is_said_of_a_refused_message_does_not_repeat_it(
    refusal: str,
    open_outbox: OpenOutbox,
    sqlite_url: str,
    server_directory: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    told: list[str],
    request: Any,
) -> None:
    caplog.set_level("DEBUG", "celery_outbox")
    server, prepare = REFUSALS[refusal]
    with prepare(request.getfixturevalue(server), server_directory / tmp_path.name) as url:
        outbox = open_outbox(url, sqlite_url)
        # Not every transport takes other types than JSON's to begin with.
        card = CARD_ID if server == "rabbitmq_url" else str(CARD_ID)
        send(outbox, CARD, 2, headers={"card": card})
        relay_once(outbox)
        said = everything_said(outbox, caplog, told)
    (row,) = rows(outbox)
    assert row.error in said
    assert len(row.error) > 20
    for secret in (CARD, str(CARD_ID), CARD_ID.hex, base64.b64encode(row.body).decode()[:40]):
        assert secret not in said


TEXTS = {
    "cannot reach redis://:s3cret@host:1/0": "cannot reach redis://:***@host:1/0",
    "amqp://me:s3cr@t/@host//;x": "amqp://me:***@host//;x",
    "cannot reach redis://host:6379/0 or me@host": "cannot reach redis://host:6379/0 or me@host",
    "(no table) [SQL: INSERT] [parameters: ('s3cret')]": "(no table)",
    "violates\nDETAIL:  Failing row contains (s3cret)": "violates",
    "Command # 2 (LPUSH q s3cret) of pipeline caused error: full": "full",
    "ERR unknown command 'LPUSH', with args beginning with: 's3cret'": "ERR unknown command 'LPUSH'",
    "Invalid type for parameter X, value: s3cret, type: <class 'int'>": "Invalid type for parameter X,",
}


@pytest.mark.parametrize("text", TEXTS)
def test_of_an_error_only_that_is_kept_which_repeats_no_secret(text: str) -> None:
    assert text_of(RuntimeError(text)) == f"RuntimeError: {TEXTS[text]}"


def test_a_long_error_is_cut() -> None:
    assert len(text_of(RuntimeError("x" * 100_000))) < 1100
