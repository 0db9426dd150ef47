"""Whether claims slow down while an old transaction keeps every deleted row."""

from functools import partial

import sqlalchemy as sa

from celery_outbox.relay.horizon import Horizon
from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
from tests.benchmarks.growing import BATCH, LEASE
from tests.benchmarks.measuring import Ratio, Report, Round, Scale, Stopwatch
from tests.benchmarks.stage import Shop, Stage
from tests.storage.rows import BROKER, make_message


def pin_postgresql(stage: Stage, scale: Scale) -> Report:
    """Compare the last claims with the first, of a run under an old snapshot of PostgreSQL."""
    shop = Shop.open(stage, "postgresql")
    rounds = [_pass_through(shop, f"outbox_{number}", scale) for number in range(scale.rounds)]
    shop.close()
    tenth = scale.passing // 10
    return Report(
        title=f"{scale.passing:,} messages beside an open transaction, against the first {tenth:,}",
        ratios=[
            Ratio(
                name=f"{step}, last {tenth:,}",
                ours=[each[f"{step} last"] for each in rounds],
                theirs=[each[f"{step} first"] for each in rounds],
                target=3.0,
            )
            for step in ("claim", "settle")
        ],
    )


def _pass_through(shop: Shop, name: str, scale: Scale) -> Round:
    """Store, claim and settle batch by batch, as a relay does."""
    database = Database(name, shop.engine, name)
    install(database)
    watch, horizon, batches = Stopwatch(), Horizon(), scale.passing // BATCH
    old = shop.engine.connect().execution_options(isolation_level="REPEATABLE READ")
    old.execute(sa.text("SELECT 1"))
    messages = [make_message(f"{number:036}", body=b"x" * 900) for number in range(BATCH)]
    for number in range(batches):
        part = {0: "first", 9: "last"}.get(number * 10 // batches, "middle")
        database.run(partial(database.store.add, messages=messages))
        _deliver(database, horizon, watch, part)
    old.close()
    return watch.medians()


def _deliver(database: Database, horizon: Horizon, watch: Stopwatch, part: str) -> None:
    store, since = database.store, horizon.since
    with watch.time(f"claim {part}"):
        looking = partial(store.is_empty, broker=BROKER, since=since)
        assert not horizon.is_empty(since, partial(database.read, looking))
        claiming = partial(store.claim, broker=BROKER, limit=BATCH, lease=LEASE, since=since)
        claim = horizon.take(since, partial(database.run, claiming))
    horizon.claimed(claim.latest)
    numbers = [message.id for message in claim.messages]
    assert len(numbers) == BATCH
    with watch.time(f"settle {part}"):
        database.run(partial(store.accept, token=claim.token, ids=numbers, keep=False))
