"""Whether claiming, publishing and settling a batch grow with the table."""

from dataclasses import dataclass
from datetime import timedelta

import sqlalchemy as sa
from sqlalchemy.orm import Session

from celery_outbox.relay.publishers import Publisher
from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
from tests.benchmarks.filling import Pattern, analyze, fill
from tests.benchmarks.measuring import Ratio, Report, Scale, Stopwatch, rounds
from tests.benchmarks.stage import QUEUE, Shop, Stage

BATCH = 100
LEASE = timedelta(seconds=300)
STEPS = ("claim", "publish", "settle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What stands in a table: ready rows, and those that were set aside before them."""

    ready: int
    delayed: int = 0
    finished: int = 0

    def __str__(self) -> str:
        aside = self.delayed + self.finished
        return f"{self.ready:,}" + (f" + {aside:,} aside" if aside else "")


def grow_postgresql(stage: Stage, scale: Scale) -> Report:
    """Compare tables of PostgreSQL."""
    return _grow(stage, scale, "postgresql", scale.waiting)


def grow_mariadb(stage: Stage, scale: Scale) -> Report:
    """Compare tables of MariaDB."""
    return _grow(stage, scale, "mariadb", scale.waiting // 10)


def grow_sqlite(stage: Stage, scale: Scale) -> Report:
    """Compare tables of SQLite."""
    return _grow(stage, scale, "sqlite", scale.waiting // 10)


def _grow(stage: Stage, scale: Scale, kind: str, many: int) -> Report:
    shop = Shop.open(stage, kind)
    few = Contents(ready=scale.few)
    others = [
        Contents(ready=many),
        Contents(ready=few.ready, delayed=many // 5, finished=many // 5),
        Contents(ready=many, delayed=many // 5, finished=many // 5),
    ]
    pattern = _pattern(shop)
    tables = [
        (contents, _table(shop, pattern, f"outbox_{number}", contents))
        for number, contents in enumerate([few, *others])
    ]
    publisher = shop.outbox.publisher(pattern.broker)
    publisher.connect()

    def turn(watch: Stopwatch) -> None:
        for contents, database in tables:
            _batch(watch, contents, database, publisher, pattern)
        shop.redis().delete(QUEUE)
        for _, database in tables:
            fill(database, pattern, ready=BATCH)

    measured = rounds(turn, scale.shorter(6))
    publisher.close()
    shop.close()
    return Report(
        title=f"A batch of {BATCH} on {kind}, against the same with {few} ready rows",
        ratios=[
            Ratio(
                name=f"{step}, {contents}",
                ours=[each[f"{step} {contents}"] for each in measured],
                theirs=[each[f"{step} {few}"] for each in measured],
                target=2.0,
            )
            for contents in others
            for step in STEPS
        ],
        notes=["Aside: half of them failed or kept, half delayed."],
    )


def _pattern(shop: Shop) -> Pattern:
    """Dispatch one task with small arguments and read what was stored."""
    with Session(shop.engine) as session, session.begin():
        shop.stored.apply_async((4711,), {"copy_to": "ada@example.org"}, via_outbox=True)
    table = shop.outbox.databases["default"].tables.messages
    with shop.engine.connect() as connection:
        row = connection.execute(sa.select(table)).one()
    return Pattern(broker=row.broker, message=row.message, body=row.body)


def _table(shop: Shop, pattern: Pattern, name: str, contents: Contents) -> Database:
    database = Database(name, shop.engine, name)
    install(database)
    fill(
        database,
        pattern,
        ready=contents.ready,
        delayed=contents.delayed,
        finished=contents.finished,
    )
    analyze(database, shop.engine)
    return database


def _batch(
    watch: Stopwatch,
    contents: Contents,
    database: Database,
    publisher: Publisher,
    pattern: Pattern,
) -> None:
    """Deliver one batch as the relay does, each step timed."""
    store = database.store
    with watch.time(f"claim {contents}"):
        claim = database.run(
            lambda connection: store.claim(connection, broker=pattern.broker, limit=BATCH, lease=LEASE)
        )
    with watch.time(f"publish {contents}"):
        outcome = publisher.publish(claim.messages, deadline=claim.expires, read_at=claim.read_at)
    with watch.time(f"settle {contents}"):
        settled = database.run(
            lambda connection: store.accept(
                connection, claim.token, sorted(outcome.accepted), keep=False
            )
        )
    assert settled == BATCH, f"expected a batch of {BATCH}, settled {settled}"
