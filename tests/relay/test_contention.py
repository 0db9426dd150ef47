"""Four relays and eight producers at once: nobody's transaction fails, nothing is lost or sent twice.

A few transactions by default; as many as the promise says (500 for each producer) where CI=true.
"""

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kombu.pools
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from celery_outbox import Outbox
from tests.pages import ROOT, blocks
from tests.relay.apps import make_outbox, relaying, rows
from tests.relay.commands import environment, outbox_command, running
from tests.relay.wire import task_ids
from tests.waiting import wait_until

PRODUCERS = 8
PROCESSES = 3  # and one relay in this process, on the producers' own engine
TRANSACTIONS = 500 if os.environ.get("CI") == "true" else 40

LEVEL = {
    "postgresql": "SHOW transaction_isolation",
    "mysql": "SELECT @@SESSION.tx_isolation",
    "sqlite": "PRAGMA read_uncommitted",
}
DEADLOCKS = {
    "postgresql": "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()",
    "mysql": "SELECT variable_value FROM information_schema.global_status "
    "WHERE variable_name = 'INNODB_DEADLOCKS'",
}
#: Two seconds: whoever has to wait for a relay for so long fails.
IMPATIENT: dict[str, dict[str, Any]] = {
    "postgresql": {"options": "-c lock_timeout=2000"},
    "mysql": {"init_command": "SET innodb_lock_wait_timeout = 2"},
}


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    task_id: Mapped[str] = mapped_column(sa.String(36))


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    """The producers' engine, set up as docs/sqlite.md says where it is SQLite."""
    backend = sa.make_url(database_url).get_backend_name()
    if backend == "sqlite":
        (code,) = blocks(ROOT / "docs" / "sqlite.md", Path())
        names: dict[str, Any] = {}
        exec(code.replace("sqlite:///shop.db", database_url), names)
        engine: sa.Engine = names["engine"]
    else:
        engine = sa.create_engine(database_url, connect_args=IMPATIENT[backend])
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def outbox(engine: sa.Engine, redis_url: str) -> Iterator[Outbox]:
    made = make_outbox(redis_url, engine)
    yield made
    made.app.close()
    kombu.pools.reset()


def place_orders(outbox: Outbox, engine: sa.Engine) -> list[object]:
    """Be one producer; return the isolation level of its session in each transaction."""
    task, levels = outbox.app.tasks["shop.add"], list[object]()
    for _ in range(TRANSACTIONS):
        with Session(engine) as session, session.begin():
            levels.append(session.execute(sa.text(LEVEL[engine.dialect.name])).scalar())
            result = task.apply_async((1, 2), via_outbox=True)
            session.add(Order(task_id=result.id))
    return levels


def ask(engine: sa.Engine, query: str | None) -> object:
    if query is None:
        return None
    with engine.connect() as connection:
        return connection.execute(sa.text(query)).scalar()


def test_relays_and_producers_do_not_hurt_each_other(
    outbox: Outbox, engine: sa.Engine, database_url: str, redis_url: str, tmp_path: Path
) -> None:
    backend = engine.dialect.name
    before = ask(engine, LEVEL[backend]), ask(engine, DEADLOCKS.get(backend))
    env = environment(broker=redis_url, database=database_url)
    with ExitStack() as stack:
        relays = [
            stack.enter_context(running(outbox_command("relay", "--sleep", "0.05"), tmp_path, env))
            for _ in range(PROCESSES)
        ]
        for relay in relays:
            relay.wait_for("Relaying from")
        stack.enter_context(relaying(outbox))
        with ThreadPoolExecutor(PRODUCERS) as pool:
            futures = [pool.submit(place_orders, outbox, engine) for _ in range(PRODUCERS)]
            levels = {level for future in futures for level in future.result()}
        wait_until(lambda: not rows(outbox), timeout=60, message="every delivery", interval=0.2)
        said = "".join(relay.output for relay in relays)
    with engine.connect() as connection:
        ordered = list(connection.execute(sa.select(Order.task_id)).scalars())
    assert len(ordered) == PRODUCERS * TRANSACTIONS
    assert Counter(task_ids(redis_url)) == Counter(ordered)
    assert levels == {before[0]}
    assert ask(engine, DEADLOCKS.get(backend)) == before[1]
    assert not [line for line in said.splitlines() if " INFO/" not in line and "Relaying" not in line]
