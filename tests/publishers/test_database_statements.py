"""Kombu's database transport: what a batch costs the database."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from tests.publishers.batches import connected, message, publish
from tests.relay.wire import database_envelopes

# Kombu's tables use what SQLAlchemy 2.1 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often each kind of statement is executed, by any engine, until the block ends."""
    counts: dict[str, int] = {}

    def count(connection: Any, cursor: Any, statement: str, *args: Any) -> None:
        word = statement.partition(" ")[0]
        counts[word] = counts.get(word, 0) + 1

    def count_commit(connection: Any) -> None:
        counts["COMMIT"] = counts.get("COMMIT", 0) + 1

    event.listen(sa.Engine, "before_cursor_execute", count)
    event.listen(sa.Engine, "commit", count_commit)
    try:
        yield counts
    finally:
        event.remove(sa.Engine, "before_cursor_execute", count)
        event.remove(sa.Engine, "commit", count_commit)


def test_a_batch_is_one_transaction_of_a_few_statements(database_url: str) -> None:
    url = f"sqla+{database_url}"
    publisher = connected(url)
    publish(publisher, [message(), message("other")])
    messages = [message("other" if number % 3 else "celery") for number in range(300)]
    with counted() as counts:
        assert publish(publisher, messages).accepted == {each.id for each in messages}
    publisher.close()
    assert counts["COMMIT"] == 1
    assert counts["INSERT"] <= 2
    assert counts["SELECT"] <= 2
    assert len(database_envelopes(url)) == 302
