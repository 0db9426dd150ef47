"""What a transport of the user's own may change of a dispatch, and what of it is stored and sent."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kombu import Exchange, Queue

from celery_outbox import Dispatch, Outbox, Transport
from celery_outbox.errors import OptionError
from celery_outbox.message import Envelope
from tests.relay.apps import relay_once, rows, send
from tests.relay.wire import redis_envelopes
from tests.transports.conftest import OpenStored

TOMORROW = datetime.now(UTC) + timedelta(days=1)

Prepare = Callable[[Dispatch], Dispatch]
Open = Callable[[Prepare], Outbox]


@pytest.fixture
def hooked(outbox_for: OpenStored, redis_url: str) -> Open:
    """An Outbox before Redis whose transport prepares dispatches so."""

    def open_(prepare: Prepare) -> Outbox:
        class Hooked(Transport):
            """That one transport."""

            def default_lead(self) -> timedelta:
                return timedelta(minutes=30)

            def prepare(self, dispatch: Dispatch) -> Dispatch:
                return prepare(dispatch)

        return outbox_for(redis_url, transports={"redis": Hooked})

    return open_


def test_destination_payload_headers_and_properties_may_be_others(hooked: Open, redis_url: str) -> None:
    def prepare(dispatch: Dispatch) -> Dispatch:
        exchange = Exchange("vault", "direct")
        envelope = replace(
            dispatch.envelope,
            exchange=exchange,
            routing_key="sealed",
            declare=[Queue("safe", exchange, "sealed")],
            content_type="application/sealed",
            headers={**dispatch.envelope.headers, "seal": "wax"},
            properties={**dispatch.envelope.properties, "priority": 9},
        )
        return replace(dispatch, queue="safe", envelope=envelope, body=dispatch.body[::-1])

    outbox = hooked(prepare)
    sent = send(outbox, 1, 2)
    (row,) = rows(outbox)
    assert (row.task_id, row.queue, row.body[:2]) == (sent, "safe", b"]}")
    relay_once(outbox)
    assert rows(outbox) == []
    (found,) = redis_envelopes(redis_url, "safe\x06\x169")
    assert found["headers"]["seal"] == "wax"
    assert found["properties"]["priority"] == 9
    assert found["content-type"] == "application/sealed"


@pytest.mark.parametrize(
    ("changes", "due", "early"),
    [
        ({"countdown": 600.0}, 600, 600),
        ({"countdown": 600.0, "lead": timedelta(minutes=1)}, 600, 60),
        ({"countdown": 7200.0}, 7200, 1800),
        ({"countdown": None}, None, None),
        ({"countdown": None, "eta": TOMORROW}, 86400, 1800),
    ],
)
def test_the_earliest_time_may_be_another(
    changes: dict[str, Any], due: float | None, early: float | None, hooked: Open
) -> None:
    outbox = hooked(lambda dispatch: replace(dispatch, **changes))
    send(outbox, countdown=5)
    (row,) = rows(outbox)
    if due is None or early is None:
        assert row.deliver_at is None
        return
    if "eta" in changes:
        assert row.deliver_at.replace(tzinfo=UTC) == pytest.approx(TOMORROW, abs=timedelta(seconds=1))
    else:
        assert (row.deliver_at - row.created_at).total_seconds() == pytest.approx(due, abs=1)
    wait = (row.deliver_at - row.scheduled_at).total_seconds()
    assert wait == pytest.approx(early, abs=1)


def test_the_deadline_may_be_another(hooked: Open) -> None:
    outbox = hooked(lambda dispatch: replace(dispatch, expires_in=60.0))
    send(outbox)
    (row,) = rows(outbox)
    assert (row.expires_at - row.created_at).total_seconds() == pytest.approx(60, abs=1)


def test_what_it_refuses_is_an_error_of_the_call_and_is_not_stored(hooked: Open) -> None:
    def refuse(dispatch: Dispatch) -> Dispatch:
        raise OptionError("expected another weekday")

    outbox = hooked(refuse)
    with pytest.raises(OptionError, match="another weekday"):
        send(outbox)
    assert rows(outbox) == []


def test_it_is_told_what_is_known_of_the_dispatch(hooked: Open) -> None:
    told: list[Dispatch] = []

    def note(dispatch: Dispatch) -> Dispatch:
        told.append(dispatch)
        return dispatch

    outbox = hooked(note)
    send(outbox, countdown=30, expires=90, queue="reports")
    outbox.app.send_task("shop.nobody", via_outbox=True)
    known, unknown = told
    assert known.task is outbox.app.tasks["shop.add"]
    assert (known.task_name, known.queue, known.countdown) == ("shop.add", "reports", 30)
    assert known.expires_in == pytest.approx(90, abs=1)
    assert known.lead == timedelta(minutes=30)
    assert known.remaining == timedelta(seconds=30)
    assert (unknown.task, unknown.task_name, unknown.countdown) == (None, "shop.nobody", None)
    assert Envelope.from_text(rows(outbox)[0].message).headers["task"] == "shop.add"
