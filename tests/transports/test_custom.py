"""Transports of the user's own: the example, and publishers that do not keep their contract."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from celery import Celery
from kombu import Connection

from celery_outbox import ClaimedMessage, Outbox, Outcome, Publisher, Transport
from celery_outbox.errors import ConfigurationError
from tests.pages import ROOT
from tests.relay.apps import make_due, relay_once, rows, send
from tests.transports.conftest import OpenStored

EXAMPLE = ROOT / "examples" / "custom_transport.py"


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("custom_transport", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def spool(example: ModuleType, outbox_for: OpenStored, tmp_path: Path) -> Outbox:
    """An Outbox whose broker is the example's."""
    options = {"data_folder_in": f"{tmp_path}/spool", "data_folder_out": f"{tmp_path}/spool"}
    config = {"broker_transport_options": options}
    return outbox_for("filesystem://", config=config, transports={"filesystem": example.Spool})


def received(outbox: Outbox, queue: str = "celery") -> list[Any]:
    """What a stock consumer finds in a queue."""
    with outbox.brokers.connection("shop") as connection:
        channel = connection.channel()
        found = []
        while (message := channel.basic_get(queue, no_ack=True)) is not None:
            found.append(message)
        return sorted(found, key=lambda message: str(message.headers["id"]))


def test_the_example_delivers_what_a_stock_consumer_reads(spool: Outbox) -> None:
    ids = [send(spool, number, 2) for number in range(5)]
    relay_once(spool)
    assert rows(spool) == []
    found = received(spool)
    assert [each.headers["id"] for each in found] == sorted(ids)
    assert sorted(each.decode()[0] for each in found) == [[number, 2] for number in range(5)]


def test_the_example_sees_the_task_object_of_a_dispatch(spool: Outbox) -> None:
    @spool.app.task(name="shop.local", region="north", shared=False)
    def local() -> None:
        """A task with a region."""

    there = local.apply_async(via_outbox=True).id
    by_name = spool.app.send_task("shop.local", via_outbox=True).id
    unknown = spool.app.send_task("shop.unknown", via_outbox=True).id
    assert [row.queue for row in rows(spool)] == ["north", "north", "celery"]
    relay_once(spool)
    assert [each.headers["id"] for each in received(spool, "north")] == sorted([there, by_name])
    assert [each.headers["id"] for each in received(spool)] == [unknown]


def test_a_file_that_cannot_be_written_holds_no_other(spool: Outbox) -> None:
    sent = [send(spool), send(spool, queue="no/such/folder"), send(spool)]
    relay_once(spool)
    (row,) = rows(spool)
    assert row.task_id == sent[1]
    assert "FileNotFoundError" in row.error
    assert {each.headers["id"] for each in received(spool)} == {sent[0], sent[2]}


def test_the_example_leaves_nothing_behind(spool: Outbox, tmp_path: Path) -> None:
    send(spool)
    relay_once(spool)
    assert [each.suffix for each in (tmp_path / "spool").iterdir()] == [".msg"]


Answer = Callable[[Sequence[ClaimedMessage]], Any]


class Answering(Publisher):
    """Sends nothing, and says what it is told to say."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._is_connected = False

    @property
    def is_connected(self) -> bool:
        return self._is_connected

    def connect(self) -> None:
        self._is_connected = True

    def publish(
        self, messages: Sequence[ClaimedMessage], *, deadline: float, read_at: float
    ) -> Outcome:
        outcome: Outcome = self._answer(messages)
        return outcome

    def close(self) -> None:
        self._is_connected = False


def answering(answer: Answer) -> type[Transport]:
    class Wrong(Transport):
        """A transport with a publisher that answers so."""

        def publisher(self, connection: Connection) -> Publisher:
            return Answering(answer)

    return Wrong


def ids_of(messages: Sequence[ClaimedMessage]) -> list[int]:
    return [each.id for each in messages]


WRONG: dict[str, tuple[Answer, set[int]]] = {
    "an id of another batch": (lambda batch: Outcome(accepted={*ids_of(batch), 999}), set()),
    "an id in two places": (
        lambda batch: Outcome(accepted=set(ids_of(batch)), errors={batch[0].id: "no"}),
        {0},
    ),
    "an id twice in one place": (
        lambda batch: Outcome(accepted=[*ids_of(batch), batch[0].id]),  # type: ignore[arg-type]
        {0},
    ),
    "nothing said of one": (lambda batch: Outcome(accepted=set(ids_of(batch)[1:])), {0}),
    "one deferred that has no delay": (
        lambda batch: Outcome(accepted=set(ids_of(batch)[1:]), deferred={batch[0].id}),
        {0},
    ),
    "nothing": (lambda batch: None, {0, 1, 2}),
    "something else": (lambda batch: ids_of(batch), {0, 1, 2}),
}


@pytest.mark.parametrize("name", WRONG)
def test_of_a_wrong_answer_only_what_is_accepted_beyond_doubt_is_deleted(
    name: str, outbox_for: OpenStored
) -> None:
    answer, kept = WRONG[name]
    outbox = outbox_for("redis://127.0.0.1:1/0", transports={"redis": answering(answer)})
    sent = [send(outbox) for _ in range(3)]
    relay_once(outbox)
    left = rows(outbox)
    assert [row.task_id for row in left] == [sent[number] for number in sorted(kept)]
    assert all(row.error and row.attempts == 1 and row.claim_token is None for row in left)


def test_a_publisher_that_raises_fails_its_batch_only(outbox_for: OpenStored) -> None:
    calls: list[int] = []

    def answer(batch: Sequence[ClaimedMessage]) -> Outcome:
        calls.append(len(batch))
        if len(calls) == 1:
            raise RuntimeError("out of order")
        return Outcome(accepted=set(ids_of(batch)))

    outbox = outbox_for("redis://127.0.0.1:1/0", transports={"redis": answering(answer)})
    for _ in range(4):
        send(outbox)
    relay_once(outbox, batch=2)
    assert [row.error for row in rows(outbox)] == ["RuntimeError: out of order"] * 2 + [None] * 2
    relay_once(outbox, batch=2)
    assert len(rows(outbox)) == 2
    make_due(outbox)
    relay_once(outbox, batch=2)
    assert (rows(outbox), calls) == ([], [2, 2, 2])


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_wish_to_stop_passes_through_and_loses_nothing(
    stop: type[BaseException], outbox_for: OpenStored
) -> None:
    def answer(batch: Sequence[ClaimedMessage]) -> Outcome:
        raise stop

    outbox = outbox_for("redis://127.0.0.1:1/0", transports={"redis": answering(answer)})
    sent = send(outbox)
    with pytest.raises(stop):
        relay_once(outbox)
    assert [row.task_id for row in rows(outbox)] == [sent]


@pytest.mark.parametrize(
    "named", ["no.such.module:Thing", "celery_outbox:Outbox", "celery_outbox", int, "kombu:Nothing"]
)
def test_a_class_that_is_no_transport_is_refused(named: Any, outbox_for: OpenStored) -> None:
    outbox = outbox_for("redis://127.0.0.1:1/0", transports={"redis": named})
    with pytest.raises(ConfigurationError, match=r"outbox_transports\['redis'\]: expected a class"):
        send(outbox)


def test_a_class_may_be_named_by_its_path(outbox_for: OpenStored, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    outbox = outbox_for("filesystem://", transports={"filesystem": "custom_transport:Spool"})
    assert type(outbox.brokers.transport("shop")).__name__ == "Spool"


def test_the_settings_may_come_from_celerys_configuration(sqlite_url: str) -> None:
    app = Celery("shop", broker="redis://127.0.0.1:1/0", set_as_current=False)
    outbox = Outbox(app, databases={"default": sqlite_url})
    app.conf.outbox_transports = {"redis": answering(lambda batch: Outcome())}
    assert type(outbox.brokers.transport("shop")).__name__ == "Wrong"
