"""Databases that go away under a relay, or have no connection to spare."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from celery import Celery

from celery_outbox import Outbox
from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.relay.apps import make_outbox, make_relay, relay_all, relay_once, relaying, rows, send
from tests.relay.conftest import OpenOutbox
from tests.relay.wire import task_ids
from tests.waiting import wait_until

MakeProxy = Callable[[str, int], TcpProxy]
Apart = tuple[TcpProxy, Outbox, Outbox]


@pytest.fixture(params=["postgresql", "mariadb"])
def apart(
    request: pytest.FixtureRequest, open_outbox: OpenOutbox, tcp_proxy: MakeProxy, redis_url: str
) -> Apart:
    """A proxy before a database, an outbox that stores beside it, and one that relays through it."""
    url = sa.make_url(request.getfixturevalue(f"{request.param}_url"))
    proxy = tcp_proxy(HOST, url.port or 0)
    through = url.set(port=proxy.port)
    producer, relays = (
        open_outbox(redis_url, each.render_as_string(hide_password=False)) for each in (url, through)
    )
    return proxy, producer, relays


def test_a_running_relay_survives_an_outage_of_its_database(apart: Apart, redis_url: str) -> None:
    proxy, producer, relays = apart
    first = send(producer)
    with relaying(relays):
        wait_until(lambda: task_ids(redis_url) == [first], 20, "the first delivery")
        wait_until(lambda: not rows(producer), 20, "its settlement")
        proxy.refuse()
        proxy.cut()
        second = send(producer)
        relay_once(relays)
        assert [row.task_id for row in rows(producer)] == [second]
        proxy.listen()
        wait_until(lambda: not rows(producer), 20, "the second delivery")
    assert task_ids(redis_url) == [first, second]


def test_a_database_that_goes_away_after_the_publish_gets_the_same_message_sent_again(
    postgresql_url: str, open_outbox: OpenOutbox, tcp_proxy: MakeProxy, redis_url: str
) -> None:
    url = sa.make_url(postgresql_url)
    proxy = tcp_proxy(HOST, url.port or 0)
    producer = open_outbox(redis_url, postgresql_url)
    behind = url.set(port=proxy.port).render_as_string(hide_password=False)
    relays = open_outbox(redis_url, behind, retry_after=1)
    stored = send(producer)
    bind = relays.settings.databases["default"]

    @sa.event.listens_for(bind, "before_cursor_execute")
    def cut(connection: sa.Connection, cursor: object, statement: str, *rest: object) -> None:
        if statement.startswith("DELETE"):
            proxy.refuse()
            proxy.cut()

    relay_once(relays)
    assert task_ids(redis_url) == [stored]
    assert [row.task_id for row in rows(producer)] == [stored]
    wait_until(lambda: relay_all(producer), 10, "the end of the lease")
    assert task_ids(redis_url) == [stored, stored]


def test_what_was_published_when_the_database_went_away_is_settled_when_it_is_back(
    apart: Apart, redis_url: str
) -> None:
    proxy, producer, relays = apart
    stored = send(producer)
    cuts = []

    @sa.event.listens_for(relays.settings.databases["default"], "before_cursor_execute")
    def cut(connection: sa.Connection, cursor: object, statement: str, *rest: object) -> None:
        if statement.startswith("DELETE") and not cuts:
            cuts.append(statement)
            proxy.refuse()
            proxy.cut()

    with relaying(relays):
        wait_until(lambda: cuts, 20, "the cut before the settlement")
        assert [row.task_id for row in rows(producer)] == [stored]
        proxy.listen()
        # Long before the end of its lease, which is 300 seconds.
        wait_until(lambda: not rows(producer), 20, "the settlement")
    assert task_ids(redis_url) == [stored]


def test_a_claim_whose_commit_was_not_answered_is_put_back_when_the_database_answers(
    apart: Apart, redis_url: str
) -> None:
    proxy, producer, relays = apart
    engine, claims = relays.settings.databases["default"], list[str]()

    @sa.event.listens_for(engine, "before_cursor_execute")
    def note(connection: sa.Connection, cursor: object, statement: str, *rest: object) -> None:
        if "UPDATE" in statement and "lease_until=" in statement:
            claims.append(statement)

    @sa.event.listens_for(engine, "commit")
    def lose_the_answer(connection: sa.Connection) -> None:
        if claims:
            proxy.swallow_replies()

    stored = send(producer)
    with relaying(relays):
        wait_until(lambda: rows(producer)[0].claim_token, 20, "a claim that was committed")
        sa.event.remove(engine, "commit", lose_the_answer)
        proxy.cut()
        proxy.resume()
        # Long before the end of its lease, which is 300 seconds.
        wait_until(lambda: not rows(producer), 20, "the delivery")
    assert task_ids(redis_url) == [stored]


def test_a_pool_without_a_free_connection_does_not_end_the_relay(
    sqlite_url: str, redis_url: str
) -> None:
    engine = sa.create_engine(sqlite_url, pool_size=1, max_overflow=0, pool_timeout=0.05)
    outbox = make_outbox(redis_url, engine)
    stored = send(outbox)
    with engine.connect():
        relay_once(outbox)
    assert task_ids(redis_url) == []
    relay_once(outbox)
    assert task_ids(redis_url) == [stored]
    outbox.app.close()
    engine.dispose()


def test_a_database_that_cannot_be_used_rests_while_the_others_are_busy(
    sqlite_url: str, tmp_path: Path, redis_url: str
) -> None:
    good = sa.create_engine(sqlite_url)
    bare = sa.create_engine(f"sqlite:///{tmp_path / 'bare.db'}")
    install(Database("good", good, "celery_outbox"))
    app = Celery("shop", broker=redis_url, set_as_current=False)
    outbox = Outbox(app, databases={"bare": bare, "good": good})
    stored = [send(outbox, outbox_database="good") for _ in range(5)]
    tries: list[object] = []
    sa.event.listen(bare, "begin", tries.append)
    make_relay(outbox, batch=1, stop_when_empty=True, sleep=timedelta(hours=1)).run()
    assert task_ids(redis_url) == stored
    assert len(tries) == 1
    app.close()
    good.dispose()
    bare.dispose()
