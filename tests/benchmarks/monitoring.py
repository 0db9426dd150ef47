"""What a look at the backlog costs, whatever waits."""

import statistics
from functools import partial

import sqlalchemy as sa
from sqlalchemy.orm import Session

from celery_outbox.monitoring import Thresholds, look
from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
from tests.benchmarks.filling import Pattern, analyze, fill
from tests.benchmarks.measuring import Ratio, Report, Round, Scale, Stopwatch, rounds
from tests.benchmarks.stage import Shop, Stage

TARGET_SECONDS = 0.05


def monitor_postgresql(stage: Stage, scale: Scale) -> Report:
    """Compare looks at large tables of PostgreSQL with those at a small one."""
    shop = Shop.open(stage, "postgresql")
    pattern, many = _pattern(shop), scale.waiting
    aside = many // 5
    small = _table(shop, pattern, "small", ready=scale.few)
    large = _table(shop, pattern, "large", ready=many, delayed=aside, finished=aside)
    outage = _table(shop, pattern, "outage", delayed=many)
    limit = Thresholds(pending=10_000)
    looks = {
        f"{many:,} ready": partial(look, large),
        f"{many:,} ready, --max 10000": partial(look, large, thresholds=limit),
        f"{many:,} in an outage": partial(look, outage),
    }
    few = f"{scale.few:,} ready"

    def turn(watch: Stopwatch) -> None:
        watch.time_in_any_order({few: partial(look, small), **looks})

    measured = rounds(turn, scale.shorter(3))
    shop.close()
    return Report(
        title=f"A look at {many:,} rows and more, against {few}",
        ratios=[
            Ratio(
                name=name,
                ours=[each[name] for each in measured],
                theirs=[each[few] for each in measured],
            )
            for name in looks
        ],
        notes=[
            f"{name}: {_median(measured, name) * 1000:.0f} ms (target {TARGET_SECONDS * 1000:.0f} ms)"
            for name in looks
        ],
    )


def _median(measured: list[Round], name: str) -> float:
    return statistics.median(each[name] for each in measured)


def _pattern(shop: Shop) -> Pattern:
    """Dispatch one task with small arguments, so that rows hold all they have, and read the row."""
    with Session(shop.engine) as session, session.begin():
        shop.stored.apply_async((4711,), {"copy_to": "ada@example.org"}, via_outbox=True)
    table = shop.outbox.databases["default"].tables.messages
    with shop.engine.connect() as connection:
        row = connection.execute(sa.select(table)).one()
    return Pattern(broker=row.broker, message=row.message, body=row.body)


def _table(shop: Shop, pattern: Pattern, name: str, **contents: int) -> Database:
    database = Database(name, shop.engine, f"outbox_{name}")
    install(database)
    fill(database, pattern, **contents)
    analyze(database, shop.engine)
    return database
