"""What does not choose the outbox goes out as if there were none."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import freezegun
import pytest
import sqlalchemy as sa
from celery import Celery, chain, group
from sqlalchemy.orm import Session

from celery_outbox import Outbox
from tests.capture.shop import TASK_NAME, Shop, insert_order, receipt

MakeApp = Callable[..., Celery]


@pytest.fixture
def missing_table(memory_shop: Shop) -> Shop:
    for engine in memory_shop.engines.values():
        with engine.begin() as connection:
            connection.execute(sa.text("DROP TABLE celery_outbox"))
    return memory_shop


@contextmanager
def counted_queries() -> Iterator[list[str]]:
    """Every statement of every engine of this process."""
    statements: list[str] = []

    def count(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        statements.append(statement)

    sa.event.listen(sa.Engine, "before_cursor_execute", count)
    try:
        yield statements
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", count)


@pytest.mark.parametrize("options", [{}, {"via_outbox": False}, {"via_outbox": None}], ids=repr)
def test_no_table_is_needed_and_no_query_is_run(missing_table: Shop, options: dict[str, Any]) -> None:
    task = missing_table.app.tasks[TASK_NAME]
    with counted_queries() as queries:
        result = task.apply_async((1,), task_id="a", **options)
    assert (result.id, missing_table.sent, queries) == ("a", ["a"], [])


def test_an_open_transaction_is_neither_looked_at_nor_used(memory_shop: Shop) -> None:
    with Session(memory_shop.engine) as session:
        session.begin()
        with counted_queries() as queries:
            memory_shop.send("a", via_outbox=False)
        sent_before_the_end = memory_shop.sent
        insert_order(session, 1)
        session.rollback()
    assert (queries, sent_before_the_end, memory_shop.tasks) == ([], ["a"], [])


def test_two_open_transactions_are_no_reason_to_refuse(memory_shop: Shop) -> None:
    with Session(memory_shop.engine) as first, Session(memory_shop.engine) as second:
        first.begin()
        second.begin()
        memory_shop.send("a", via_outbox=False)
    assert memory_shop.sent == ["a"]


def test_a_database_that_is_not_there_is_no_matter(memory_app: Celery) -> None:
    Outbox(memory_app, databases={"main": "sqlite:////nowhere/at/all.db"})
    with counted_queries() as queries:
        memory_app.tasks[TASK_NAME].apply_async(task_id="a")
    assert queries == []
    assert Shop(app=memory_app, outbox=Outbox(), engines={}).sent == ["a"]


# The bytes


def plain(app: Celery) -> None:
    app.tasks[TASK_NAME].apply_async((1, "zwei"), {}, task_id="a")


def delayed(app: Celery) -> None:
    app.tasks[TASK_NAME].apply_async((1,), task_id="a", countdown=60, expires=120)


def decorated(app: Celery) -> None:
    app.tasks[TASK_NAME].apply_async(
        (1,),
        task_id="a",
        priority=3,
        headers={"tenant": "north"},
        shadow="shade",
        time_limit=9,
        ignore_result=True,
        link=app.signature(TASK_NAME, args=(2,), options={"task_id": "linked"}),
    )


def compressed(app: Celery) -> None:
    app.tasks[TASK_NAME].apply_async(("x" * 500,), task_id="a", compression="zlib")


def pickled(app: Celery) -> None:
    app.tasks[TASK_NAME].apply_async((b"\xff\x00",), task_id="a", serializer="pickle")


def by_name(app: Celery) -> None:
    app.send_task("elsewhere", (1,), {"key": "value"}, task_id="a")


def signature(app: Celery, number: int) -> Any:
    return app.signature(TASK_NAME, args=(number,), options={"task_id": str(number)})


def as_group(app: Celery) -> None:
    group(signature(app, 1), signature(app, 2), app=app).apply_async(task_id="group")


def as_chain(app: Celery) -> None:
    chain(signature(app, 1), signature(app, 2), app=app).apply_async()


WAYS = [plain, delayed, decorated, compressed, pickled, by_name, as_group, as_chain]


@pytest.mark.parametrize("protocol", [1, 2])
@pytest.mark.parametrize("send", WAYS, ids=lambda send: send.__name__)
def test_the_messages_are_those_of_an_app_without_an_outbox(
    memory_shop: Shop, send: Callable[[Celery], None], protocol: int
) -> None:
    stock = Celery(memory_shop.app.main, broker="memory://", set_as_current=False)
    stock.conf.task_default_queue = memory_shop.app.conf.task_default_queue
    stock.task(name=TASK_NAME, shared=False)(receipt)
    found = []
    for app in (stock, memory_shop.app):
        app.conf.update(task_protocol=protocol, result_backend="cache+memory://")
        with freezegun.freeze_time("2024-05-06 07:08:09"):
            send(app)
        found.append(messages(app))
    assert found[0]
    assert found[0] == found[1]


def messages(app: Celery) -> list[dict[str, Any]]:
    """Every message on the app's queue as it lies there, but for what is new for each."""
    found = []
    with app.connection_for_read() as broker:
        while message := broker.default_channel.basic_get(app.conf.task_default_queue, no_ack=True):
            properties = {**message.properties, "delivery_tag": "new for each"}
            properties["reply_to"] = properties["reply_to"] == app.thread_oid
            found.append(
                {
                    "body": message.body.replace(app.thread_oid.encode(), b"here"),
                    "content_type": message.content_type,
                    "content_encoding": message.content_encoding,
                    "headers": message.headers,
                    "properties": properties,
                }
            )
    return found
