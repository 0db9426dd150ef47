"""What turns a relay's health red, and green again: relays in the test's own process, made to hang."""

import threading
import time
from datetime import timedelta

import pytest

from celery_outbox.metrics import health
from celery_outbox.metrics.backlogs import Backlogs
from celery_outbox.metrics.health import Health
from celery_outbox.relay.observing import Pulse
from celery_outbox.storage.database import Database
from tests.relay.conftest import MakeDatabase
from tests.relay.fakes import Broker, FakePublisher, Gate, running
from tests.storage.rows import add, make_message
from tests.waiting import wait_until


class Patient(FakePublisher):
    """A publisher that may have to wait for long."""

    def longest(self, count: int) -> float:
        return 3600.0


@pytest.fixture
def database(make_database: MakeDatabase) -> Database:
    return make_database()


def health_of(pulse: Pulse, *databases: Database) -> Health:
    return Health(pulse, Backlogs(databases, ["shop"]))


def test_a_batch_under_way_for_longer_than_its_lease_is_red_until_it_ends(database: Database) -> None:
    broker, gate = Broker(), Gate()
    broker.answer = gate.accept
    add(database, make_message())
    with running([database], {"shop": broker}, lease=timedelta(seconds=1)) as it:
        probe = health_of(it.relay.pulse)
        wait_until(lambda: gate.waiting)
        assert probe.live().is_good
        wait_until(lambda: not probe.live().is_good)
        (reason,) = probe.live().reasons
        assert reason.startswith("a batch should have been settled")
        gate.open()
        wait_until(lambda: probe.live().is_good)


def test_a_batch_has_as_long_as_its_publisher_may_have_to_wait_beyond_its_lease(
    database: Database,
) -> None:
    broker, gate, lease = Broker(), Gate(), 0.5
    broker.answer = gate.accept
    add(database, make_message())
    with running([database], {"shop": lambda: Patient(broker)}, lease=timedelta(seconds=lease)) as it:
        wait_until(lambda: gate.waiting)
        began = time.monotonic()
        wait_until(lambda: time.monotonic() > began + lease + 0.2)
        assert health_of(it.relay.pulse).live().is_good
        gate.open()


def test_a_main_loop_that_stands_still_is_red_until_it_moves(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "WATCH_SECONDS", 3.0)
    broker, gate = Broker(), Gate()
    add(database, make_message())
    with running([database], {"shop": broker}) as it:
        probe = health_of(it.relay.pulse)
        wait_until(lambda: broker.taken)
        assert probe.live().is_good
        broker.keep_alive = gate.pass_
        wait_until(lambda: not probe.live().is_good, 15)
        (reason,) = probe.live().reasons
        assert reason.startswith("the main loop has not moved for")
        gate.open()
        wait_until(lambda: probe.live().is_good)


def test_a_thread_that_has_ended_is_red_unless_the_relay_ends_by_itself() -> None:
    thread = threading.Thread(target=int, name="celery_outbox relay 1")
    thread.start()
    thread.join()
    probe = health_of(Pulse(threads=[thread]))
    assert probe.live().reasons == ("threads have ended: celery_outbox relay 1",)
    assert health_of(Pulse(threads=[thread], is_finite=True)).live().is_good


def test_the_threads_of_a_relay_are_watched_until_it_stops(database: Database) -> None:
    with running([database], {"shop": Broker()}) as it:
        wait_until(lambda: it.relay.pulse.threads)
        assert all(each.is_alive() for each in it.relay.pulse.threads)
    assert not any(each.is_alive() for each in it.relay.pulse.threads)
    assert health_of(it.relay.pulse).live().is_good
    assert health_of(it.relay.pulse).ready().reasons == ("the relay is stopping",)


def test_one_database_that_can_be_used_is_enough_to_be_ready(make_database: MakeDatabase) -> None:
    good, bad = make_database(), make_database()
    with bad.begin() as connection:
        bad.tables.messages.drop(connection)
    broker = Broker()
    add(good, make_message())
    with running([good, bad], {"shop": broker}) as it:
        wait_until(lambda: broker.taken)
        assert health_of(it.relay.pulse, good, bad).ready().is_good
    alone = Broker()
    with running([bad], {"shop": alone}) as it:
        wait_until(lambda: it.relay.pulse.watched_at)
        assert health_of(it.relay.pulse, bad).ready().reasons == ("no database can be used",)
