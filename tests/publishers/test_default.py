"""The publisher for everything else that Kombu speaks: one message after the other."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection, Exchange

from celery_outbox.publishing import Publisher
from tests.publishers.batches import connected, message, publish
from tests.relay.apps import make_due, relay_once, rows, send
from tests.relay.conftest import OpenOutbox, open_outbox

__all__ = ["open_outbox"]

URL = "filesystem://"


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    """The transport options of Kombu's queues in files."""
    (tmp_path / "spool").mkdir()
    places = ("data_folder_in", "data_folder_out", "control_folder")
    return dict.fromkeys(places, f"{tmp_path}/spool")


@pytest.fixture
def publisher(folders: dict[str, str]) -> Iterator[Publisher]:
    publisher = connected(URL, transport_options=folders)
    yield publisher
    publisher.close()


@pytest.fixture
def ids(folders: dict[str, str]) -> Callable[[str], list[str]]:
    """Take what a queue holds, and tell the ids of the tasks."""

    def take(queue: str = "celery") -> list[str]:
        found: list[Any] = []
        with Connection(URL, transport_options=folders) as connection:
            channel = connection.channel()
            while (each := channel.basic_get(queue, no_ack=True)) is not None:
                found.append(each.headers["id"])
        return found

    return take


def test_a_batch_arrives(publisher: Publisher, ids: Callable[..., list[str]]) -> None:
    messages = [message() for _ in range(20)]
    assert publish(publisher, messages).accepted == {each.id for each in messages}
    assert sorted(ids()) == sorted(each.task_id for each in messages)


def test_what_fails_stays_alone_with_its_reason(
    publisher: Publisher, ids: Callable[..., list[str]]
) -> None:
    nowhere = Exchange("nowhere", "direct")
    messages = [
        message(),
        message("no/such/folder"),
        message(),
        message(exchange=nowhere, routing_key="x", declare=[nowhere]),
        message(),
    ]
    outcome = publish(publisher, messages)
    assert outcome.errors.keys() == {messages[1].id, messages[3].id}
    assert "no/such/folder" in outcome.errors[messages[1].id]
    assert "expected a queue bound" in outcome.errors[messages[3].id]
    assert sorted(ids()) == sorted(messages[number].task_id for number in (0, 2, 4))


def test_nothing_is_sent_after_the_lease(publisher: Publisher, ids: Callable[..., list[str]]) -> None:
    messages = [message(), message()]
    assert publish(publisher, messages, seconds=-1).unsent == {each.id for each in messages}
    assert ids() == []


def test_a_delayed_message_is_held_until_it_is_due(
    folders: dict[str, str], ids: Callable[..., list[str]], open_outbox: OpenOutbox, sqlite_url: str
) -> None:
    outbox = open_outbox(URL, sqlite_url, config={"broker_transport_options": folders})
    later, now = send(outbox, countdown=3600), send(outbox)
    relay_once(outbox)
    assert ids() == [now]
    (row,) = rows(outbox)
    assert (row.task_id, row.attempts, row.scheduled_at) == (later, 0, row.deliver_at)
    make_due(outbox)
    relay_once(outbox)
    assert ids() == [later]
