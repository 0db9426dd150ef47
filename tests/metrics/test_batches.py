"""What an observer of a relay is told of each batch, and what is counted of it."""

from collections.abc import Sequence
from datetime import timedelta

import pytest
from prometheus_client import CollectorRegistry

from celery_outbox import Outcome
from celery_outbox.metrics.backlogs import Backlogs
from celery_outbox.metrics.prometheus import RelayCollector
from celery_outbox.metrics.tally import Tally
from celery_outbox.policy import RetryPolicy
from celery_outbox.relay.loop import Relay, RelayOptions
from celery_outbox.relay.observing import Observer, Settled
from celery_outbox.storage.database import Database
from tests.relay.conftest import MakeDatabase
from tests.relay.fakes import Broker, Messages
from tests.storage.rows import add, change, hours_from_now, make_message

NAMES = {"accepted": "published", "deferred": "deferred", "errors": "failed"}


class Notes(Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.batches: list[Settled] = []

    def settled(self, batch: Settled) -> None:
        self.batches.append(batch)


@pytest.fixture
def database(make_database: MakeDatabase) -> Database:
    return make_database()


def relay_once(databases: Sequence[Database], broker: Broker, observer: Observer) -> None:
    options = RelayOptions(lease=timedelta(minutes=5), retry=RetryPolicy(), once=True)
    Relay(databases, {"shop": broker}, options, observer=observer).run()


def answer(messages: Messages) -> Outcome:
    """Does of each message what its task id says."""

    def ids(what: str) -> set[int]:
        return {each.id for each in messages if each.task_id.startswith(what)}

    return Outcome(
        accepted=ids("accepted"),
        deferred=ids("deferred"),
        errors=dict.fromkeys(ids("errors"), "refused"),
        unsent=ids("unsent"),
    )


def test_an_observer_is_told_what_became_of_each_message_of_a_batch(database: Database) -> None:
    broker, notes = Broker(), Notes()
    broker.answer = answer
    counts = {"accepted": 4, "deferred": 3, "errors": 2, "unsent": 1}
    for what, count in counts.items():
        delay = 0.0 if what == "deferred" else None
        add(database, *[make_message(f"{what}-{number}", countdown=delay) for number in range(count)])
    relay_once([database], broker, notes)
    (batch,) = notes.batches
    assert (batch.database, batch.broker) == (database.name, "shop")
    assert {what: getattr(batch, name) for what, name in NAMES.items()} == {
        what: counts[what] for what in NAMES
    }
    assert batch.lease_lost == 0
    assert len(batch.waits) == 4
    assert 0 < batch.seconds < 60


def test_an_observer_is_told_how_long_each_message_waited_by_its_intended_time(
    database: Database,
) -> None:
    notes = Notes()
    for task_id, created, deliver in (("old", -2, None), ("delayed", -3, -1), ("new", 0, None)):
        add(database, make_message(task_id))
        intended = None if deliver is None else hours_from_now(deliver)
        change(database, task_id, created_at=hours_from_now(created), deliver_at=intended)
    relay_once([database], Broker(), notes)
    (batch,) = notes.batches
    assert sorted(batch.waits) == pytest.approx([0, 3600, 7200], abs=60)


def test_an_observer_is_told_of_messages_that_another_relay_has_taken_over(database: Database) -> None:
    broker, notes = Broker(), Notes()

    def overtaken(messages: Messages) -> Outcome:
        change(database, "accepted-1", claim_token="another's")
        return answer(messages)

    broker.answer = overtaken
    add(database, *[make_message(f"accepted-{number}") for number in range(3)])
    relay_once([database], broker, notes)
    (batch,) = notes.batches
    assert (batch.published, batch.lease_lost) == (3, 1)


def test_batches_add_up_for_each_database_and_broker(make_database: MakeDatabase) -> None:
    databases = [make_database(), make_database()]
    one, other = (each.name for each in databases)
    tally, registry, broker = Tally([one, other], ["shop"]), CollectorRegistry(), Broker()
    registry.register(RelayCollector(tally, Backlogs(databases, ["shop"])))
    broker.answer = answer
    add(databases[0], make_message("accepted-1"), make_message("errors-1"))
    relay_once(databases, broker, tally)
    add(databases[0], make_message("accepted-2"))
    relay_once(databases, broker, tally)

    def number(name: str, database: str, **labels: str) -> float | None:
        labels = {"database": database, "broker": "shop", **labels}
        return registry.get_sample_value(f"celery_outbox_{name}", labels)

    assert number("published_total", one) == 2
    assert number("failed_total", one) == 1
    assert number("published_total", other) == 0
    assert number("batch_seconds_count", one) == 2
    assert number("batch_seconds_bucket", one, le="300.0") == 2
    assert number("backlog", one, state="retrying") == 1
    assert number("backlog", other, state="retrying") == 0


def test_each_wait_falls_into_the_buckets_up_to_which_it_reaches() -> None:
    tally, registry = Tally(["shop"], ["shop"]), CollectorRegistry()
    registry.register(RelayCollector(tally, Backlogs([], [])))
    tally.settled(
        Settled(
            database="shop",
            broker="shop",
            published=5,
            failed=0,
            deferred=0,
            lease_lost=0,
            seconds=0.25,
            waits=[-7.0, 0.005, 0.006, 1.0, 10**6],
        )
    )

    def number(name: str, **labels: str) -> float | None:
        labels = {"database": "shop", "broker": "shop", **labels}
        return registry.get_sample_value(f"celery_outbox_{name}", labels)

    bounds = ("0.005", "0.01", "0.5", "1.0", "86400.0", "+Inf")
    assert [number("wait_seconds_bucket", le=each) for each in bounds] == [2, 3, 3, 4, 4, 5]
    assert number("wait_seconds_sum") == pytest.approx(10**6 + 1.011)
    assert [number("batch_seconds_bucket", le=each) for each in ("0.1", "0.25")] == [0, 1]
