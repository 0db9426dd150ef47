"""What storing a task costs, against sending the same task plainly to a local Redis.

A stored task's cost is that of a transaction with its dispatch less that of the same transaction
without: the call, its share of the INSERT, and what the commit costs more.
"""

import re
from collections.abc import Callable
from typing import Any

from celery import group
from sqlalchemy import text
from sqlalchemy.orm import Session

from tests.benchmarks.measuring import Ratio, Report, Round, Scale, Stopwatch, rounds
from tests.benchmarks.stage import QUEUE, Order, Shop, Stage

HUNDRED = 100

#: About 1 kB of arguments in JSON each. Celery's own work on them differs: it makes a readable form
#: of every value for the message's headers.
ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "one text": ((4711,), {"note": "A thousand characters. " * 43}),
    "an order": (
        (4711,),
        {
            "customer": {"name": "Ada", "mail": "ada@example.org", "tags": ["new", "eu"]},
            "note": "Please ring twice, the bell is old. " * 14,
            "lines": [{"sku": f"A-{n:04}", "count": n, "price": "12.50"} for n in range(8)],
        },
    ),
}


def store(stage: Stage, scale: Scale) -> Report:
    """Store one task, and a hundred, in an open PostgreSQL transaction."""
    shop = Shop.open(stage, "postgresql")
    ratios: list[Ratio] = []
    for name, (args, kwargs) in ARGUMENTS.items():

        def plainly(args: Any = args, kwargs: Any = kwargs) -> None:
            shop.plain.apply_async(args, kwargs)

        def stored(args: Any = args, kwargs: Any = kwargs) -> None:
            shop.stored.apply_async(args, kwargs, via_outbox=True)

        measured = rounds(_turn(shop, stored, plainly), scale)
        ratios += [
            _ratio(f"one task: {name}", measured, 1, target=0.8),
            _ratio(f"each of {HUNDRED} tasks: {name}", measured, HUNDRED, target=0.55),
        ]
    seen = _inserts_seen(stage, shop, lambda: [stored() for _ in range(HUNDRED)])
    shop.close()
    return Report(
        title="Storing in an open PostgreSQL transaction, against apply_async to Redis",
        ratios=ratios,
        notes=[f"INSERT statements that PostgreSQL saw for {HUNDRED} tasks: {seen} (target 1)"],
    )


def store_group(stage: Stage, scale: Scale) -> Report:
    """Store a whole group in an open PostgreSQL transaction."""
    shop = Shop.open(stage, "postgresql")
    args, kwargs = ARGUMENTS["an order"]

    def canvas(task: Any) -> Any:
        return group(task.s(*args, **kwargs) for _ in range(scale.group))

    def stored() -> None:
        canvas(shop.stored).apply_async(via_outbox=True)

    def turn(watch: Stopwatch) -> None:
        with watch.time("without"):
            _transaction(shop, _nothing)
        with watch.time("with"):
            _transaction(shop, stored)
        with watch.time("plain"):
            canvas(shop.plain).apply_async()
        shop.redis().delete(QUEUE)

    measured = rounds(turn, scale.shorter(30))
    seen, most = _inserts_seen(stage, shop, stored), 1 + scale.group // 500
    shop.close()
    return Report(
        title="Storing a group in an open PostgreSQL transaction, against sending it to Redis",
        ratios=[_ratio(f"a group of {scale.group}", measured, 1, target=0.5)],
        notes=[
            f"INSERT statements that PostgreSQL saw for {scale.group} tasks: {seen} (target {most})"
        ],
    )


def _turn(
    shop: Shop, stored: Callable[[], None], plainly: Callable[[], None]
) -> Callable[[Stopwatch], None]:
    def turn(watch: Stopwatch) -> None:
        with watch.time("without"):
            _transaction(shop, _nothing)
        with watch.time("plain"):
            plainly()
        with watch.time("with 1"):
            _transaction(shop, stored)
        with watch.time("plain"):
            plainly()
        with watch.time(f"with {HUNDRED}"):
            _transaction(shop, lambda: [stored() for _ in range(HUNDRED)])
        shop.redis().delete(QUEUE)

    return turn


def _transaction(shop: Shop, dispatch: Callable[[], object], *, logged: bool = False) -> None:
    with Session(shop.engine) as session, session.begin():
        session.add(Order(note="as any other"))
        session.flush()
        if logged:
            session.execute(text("SET LOCAL log_statement = 'mod'"))
        dispatch()


def _nothing() -> None:
    """The business work alone."""


def _ratio(name: str, measured: list[Round], count: int, *, target: float) -> Ratio:
    filled = f"with {count}" if f"with {count}" in measured[0] else "with"
    return Ratio(
        name=name,
        ours=[(each[filled] - each["without"]) / count for each in measured],
        theirs=[each["plain"] for each in measured],
        target=target,
    )


def _inserts_seen(stage: Stage, shop: Shop, dispatch: Callable[[], object]) -> int:
    """Count, in PostgreSQL's own log, the INSERTs of one transaction."""
    assert stage.postgresql is not None
    log = stage.postgresql.processes[0].log
    before = log.stat().st_size
    _transaction(shop, dispatch, logged=True)
    with log.open("rb") as lines:
        lines.seek(before)
        return len(re.findall(rb"LOG: .*INSERT INTO \"?celery_outbox", lines.read()))
