"""What storing a task costs, against sending the same task plainly to a local Redis.

A stored task's cost is that of a transaction with its dispatch less that of the same transaction
without: the call, its share of the INSERT, and what the commit costs more. What is stored in one go
is compared with as many plain calls in a row.
"""

import re
from collections.abc import Callable
from typing import Any

from celery import group
from sqlalchemy import insert, text
from sqlalchemy.orm import Session

from tests.benchmarks.measuring import Ratio, Report, Round, Scale, Stopwatch, rounds
from tests.benchmarks.stage import QUEUE, Order, Shop, Stage

HUNDRED = 100

Dispatch = Callable[[], None]

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

        one = rounds(_turn(shop, stored, plainly), scale)
        many = rounds(_turn(shop, _times(HUNDRED, stored), _times(HUNDRED, plainly)), scale.shorter(5))
        ratios += [
            _ratio(f"one task: {name}", one, 1, target=0.8),
            _ratio(f"each of {HUNDRED} tasks: {name}", many, HUNDRED, target=0.55),
        ]
    on_connection = rounds(_turn(shop, stored, plainly, _on_connection), scale)
    ratios.append(_ratio("one task, at once on a Connection", on_connection, 1, target=0.8))
    seen = _inserts_seen(stage, shop, _times(HUNDRED, stored))
    shop.close()
    return Report(
        title="Storing in an open PostgreSQL transaction, against apply_async to Redis",
        ratios=ratios,
        notes=[f"INSERT statements that PostgreSQL saw for {HUNDRED} tasks: {seen} (target 1)"],
    )


def store_group(stage: Stage, scale: Scale) -> Report:
    """Store a whole group in an open PostgreSQL transaction."""
    shop = Shop.open(stage, "postgresql")
    ratios: list[Ratio] = []
    for name, (args, kwargs) in ARGUMENTS.items():

        def canvas(task: Any, args: Any = args, kwargs: Any = kwargs) -> Any:
            return group(task.s(*args, **kwargs) for _ in range(scale.group))

        def stored(canvas: Any = canvas) -> None:
            canvas(shop.stored).apply_async(via_outbox=True)

        def plainly(canvas: Any = canvas) -> None:
            canvas(shop.plain).apply_async()

        measured = rounds(_turn(shop, stored, plainly), scale.shorter(30))
        ratios.append(_ratio(f"a group of {scale.group}: {name}", measured, 1, target=0.5))
    seen, most = _inserts_seen(stage, shop, stored), 1 + scale.group // 500
    shop.close()
    return Report(
        title="Storing a group in an open PostgreSQL transaction, against sending it to Redis",
        ratios=ratios,
        notes=[
            f"INSERT statements that PostgreSQL saw for {scale.group} tasks: {seen} (target {most})"
        ],
    )


def _turn(
    shop: Shop,
    stored: Dispatch,
    plainly: Dispatch,
    transaction: Callable[[Shop, Dispatch], None] | None = None,
) -> Callable[[Stopwatch], None]:
    begun = transaction or _transaction
    pieces: dict[str, Dispatch] = {
        "without": lambda: begun(shop, _nothing),
        "with": lambda: begun(shop, stored),
        "plain": plainly,
    }

    def turn(watch: Stopwatch) -> None:
        watch.time_in_any_order(pieces)
        shop.redis().delete(QUEUE)

    return turn


def _times(count: int, dispatch: Dispatch) -> Dispatch:
    def dispatches() -> None:
        for _ in range(count):
            dispatch()

    return dispatches


def _transaction(shop: Shop, dispatch: Dispatch, *, logged: bool = False) -> None:
    with Session(shop.engine) as session, session.begin():
        session.add(Order(note="as any other"))
        session.flush()
        if logged:
            session.execute(text("SET LOCAL log_statement = 'mod'"))
        dispatch()


def _on_connection(shop: Shop, dispatch: Dispatch) -> None:
    """The same without a Session: the outbox inserts at each call."""
    with shop.engine.begin() as connection:
        connection.execute(insert(Order).values(note="as any other"))
        dispatch()


def _nothing() -> None:
    """The business work alone."""


def _ratio(name: str, measured: list[Round], count: int, *, target: float) -> Ratio:
    return Ratio(
        name=name,
        ours=[(each["with"] - each["without"]) / count for each in measured],
        theirs=[each["plain"] / count for each in measured],
        target=target,
    )


def _inserts_seen(stage: Stage, shop: Shop, dispatch: Dispatch) -> int:
    """Count, in PostgreSQL's own log, the INSERTs of one transaction."""
    assert stage.postgresql is not None
    log = stage.postgresql.processes[0].log
    before = log.stat().st_size
    _transaction(shop, dispatch, logged=True)
    with log.open("rb") as lines:
        lines.seek(before)
        return len(re.findall(rb"LOG: .*INSERT INTO \"?celery_outbox", lines.read()))
