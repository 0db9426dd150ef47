"""Greenlets of gevent: each is a thread to the outbox.

Gevent replaces much of Python for a whole process: this module runs itself in one of its own.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import gevent
import pytest
import sqlalchemy as sa
from celery import Celery
from gevent.event import Event
from sqlalchemy.orm import Session

from celery_outbox import Outbox
from celery_outbox.errors import TransactionError
from tests.capture.async_support import PATIENCE_SECONDS, AsyncShop, lasting_shop
from tests.capture.shop import TASK_NAME, Order, Shop, receipt

COUNT = 20


@pytest.fixture(scope="module")
def lasting(request: pytest.FixtureRequest) -> Iterator[AsyncShop]:
    with lasting_shop(request, "asyncpg") as shop:
        yield shop


@pytest.fixture(scope="module")
def outcomes(lasting: AsyncShop) -> Any:
    """What the scenes say, played one after the other under gevent in another process."""
    url = lasting.engine.url.render_as_string(hide_password=False)
    done = subprocess.run(
        [sys.executable, "-m", "gevent.monkey", __file__, url],
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_interleaved_greenlets_store_each_in_its_own_transaction(
    lasting: AsyncShop, outcomes: Any
) -> None:
    committed = list(range(1, COUNT, 2))
    stored = [int(task) for task in lasting.tasks if task.isdigit()]
    assert (sorted(stored), lasting.orders) == (committed, committed)


def test_a_greenlet_without_a_transaction_stores_alone_while_another_has_one(
    lasting: AsyncShop, outcomes: Any
) -> None:
    assert outcomes["beside"] == "stored"
    assert "beside" in lasting.tasks
    assert "rolled back" not in lasting.tasks


def test_a_greenlet_never_stores_in_the_transaction_of_the_one_that_spawned_it(
    lasting: AsyncShop, outcomes: Any
) -> None:
    assert ("child" in lasting.tasks) == (outcomes["child"] == "stored")


def send(shop: Shop, task_id: str) -> str:
    try:
        shop.send(task_id)
    except TransactionError:
        return "refused"
    return "stored"


def interleave(shop: Shop) -> None:
    import gevent

    def work(number: int) -> None:
        with Session(shop.engine) as session:
            session.add(Order(id=number))
            shop.send(str(number))
            gevent.sleep(0)
            session.flush()
            gevent.sleep(0)
            (session.commit if number % 2 else session.rollback)()

    gevent.joinall([gevent.spawn(work, number) for number in range(COUNT)], raise_error=True)
    return "played"


def beside(shop: Shop) -> None:
    import gevent

    is_open, may_end = Event(), Event()

    def with_a_transaction() -> None:
        with Session(shop.engine) as session:
            session.begin()
            shop.send("rolled back")
            is_open.set()
            may_end.wait(PATIENCE_SECONDS)
            session.rollback()

    def without() -> str:
        is_open.wait(PATIENCE_SECONDS)
        outcome = send(shop, "beside")
        may_end.set()
        return outcome

    greenlets = [gevent.spawn(with_a_transaction), gevent.spawn(without)]
    gevent.joinall(greenlets, raise_error=True)
    return str(greenlets[1].get())


def child(shop: Shop) -> str:
    with Session(shop.engine) as session:
        session.begin()
        outcome = gevent.spawn(send, shop, "child").get()
        session.rollback()
    return str(outcome)


def main(url: str) -> None:
    engine = sa.create_engine(url, pool_size=COUNT)
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.task(name=TASK_NAME)(receipt)
    outbox = Outbox(app, databases={"default": engine})
    shop = Shop(app=app, outbox=outbox, engines={"default": engine})
    print(json.dumps({scene.__name__: scene(shop) for scene in (interleave, beside, child)}))


if __name__ == "__main__":
    main(sys.argv[1])
