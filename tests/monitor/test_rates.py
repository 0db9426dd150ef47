"""What moves between two looks, as far as a table tells."""

from collections.abc import Sequence
from datetime import timedelta

import pytest
import sqlalchemy as sa

from celery_outbox.message import OutboxMessage
from celery_outbox.monitoring import Backlog, Rates, look, rates
from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
from celery_outbox.storage.schema import FAR_FUTURE
from tests.storage.rows import add, change, claim, fail, hours_from_now, make_message
from tests.waiting import wait_until


def messages(prefix: str, count: int) -> Sequence[OutboxMessage]:
    return [make_message(f"{prefix} {number}") for number in range(count)]


def deliver(database: Database, limit: int, *, keep: bool = False) -> None:
    made = claim(database, limit)
    ids = [message.id for message in made.messages]
    database.run(lambda connection: database.store.accept(connection, made.token, ids, keep=keep))


def moved(before: Backlog, after: Backlog) -> tuple[float | None, ...]:
    """Stored, published and failed between the two."""
    seconds = (after.read_at - before.read_at) / timedelta(seconds=1)
    found = rates(before, after)
    each = (found.stored, found.published, found.failed)
    return tuple(None if rate is None else round(rate * seconds, 3) for rate in each)


@pytest.mark.parametrize("keep", [False, True], ids=["deleted", "kept"])
def test_what_was_stored_and_delivered_between_two_looks_is_seen(
    keep: bool, database: Database
) -> None:
    add(database, *messages("a", 4))
    before = look(database)
    add(database, *messages("b", 6))
    deliver(database, 7, keep=keep)
    assert moved(before, look(database)) == (6, 7, 0)


def test_what_came_and_went_while_nobody_looked_is_seen(database: Database) -> None:
    before = look(database)
    add(database, *messages("a", 5))
    deliver(database, 5)
    assert moved(before, look(database)) == (5, 5, 0)


def test_what_was_given_up_is_failed_and_not_published(database: Database) -> None:
    add(database, *messages("a", 3))
    before = look(database)
    made = claim(database, 2)
    fail(database, made.token, made.messages[0].id, "Refused", None)
    fail(database, made.token, made.messages[1].id, "Refused")
    assert moved(before, look(database)) == (0, 0, 1)


def test_failed_messages_that_are_retried_are_no_negative_rate(database: Database) -> None:
    add(database, *messages("a", 1))
    ended = {"scheduled_at": FAR_FUTURE, "finished_at": hours_from_now(0), "error": "Refused"}
    change(database, attempts=1, **ended)
    before = look(database)
    change(database, scheduled_at=hours_from_now(0), finished_at=None, error=None)
    assert moved(before, look(database)) == (0, 0, 0)


def test_beyond_the_bound_only_postgresql_counts_what_was_published(database_url: str) -> None:
    engine = sa.create_engine(database_url)
    fresh = Database("fresh", engine, "celery_outbox")
    install(fresh)
    add(fresh, *messages("a", 20))
    before = look(fresh, bound=5)
    add(fresh, *messages("b", 2))
    deliver(fresh, 6)

    def has_counted() -> bool:
        # It tells its statistics within a second, and a connection those of its own at once or later.
        return look(fresh, bound=5).counters.removed in {6, None}

    wait_until(has_counted)
    published = 6 if engine.dialect.name == "postgresql" else None
    assert moved(before, look(fresh, bound=5)) == (2, published, 0)
    engine.dispose()


def test_a_single_look_has_no_rates(database: Database) -> None:
    found = look(database)
    assert rates(found, found) == Rates()
