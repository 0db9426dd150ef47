"""What storing a task costs, against sending the same task plainly to a local Redis.

Three ways: at once on a Connection, where the call itself inserts; a hundred in a Session, which
inserts them with its commit; and a single one in a Session. What a Session stores costs what its
transaction takes with the dispatches less what it takes without.
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
IN_A_ROW = 20

Dispatch = Callable[[], None]

USUAL = "an order"

#: About 1 kB of arguments in JSON each: what applications send, and what costs Celery itself the
#: least. It makes a readable form of every value for the message's headers.
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

        at_once = rounds(_turn_at_once(shop, stored, plainly), scale.shorter(3))
        many = rounds(_turn(shop, _times(HUNDRED, stored), _times(HUNDRED, plainly)), scale.shorter(5))
        one = rounds(_turn(shop, stored, plainly), scale)
        ratios += [
            Ratio(
                name=f"on a Connection, one task: {name}",
                ours=[each["stored"] for each in at_once],
                theirs=[each["plain"] for each in at_once],
                target=_of_usual(name, 0.8),
            ),
            _ratio(
                f"in a Session, each of {HUNDRED} tasks: {name}",
                many,
                HUNDRED,
                target=_of_usual(name, 0.55),
            ),
            _ratio(f"in a Session, one task: {name}", one, 1),
        ]
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
        ratios.append(
            _ratio(f"a group of {scale.group}: {name}", measured, 1, target=_of_usual(name, 0.5))
        )
    seen, most = _inserts_seen(stage, shop, stored), 1 + scale.group // 500
    shop.close()
    return Report(
        title="Storing a group in an open PostgreSQL transaction, against sending it to Redis",
        ratios=ratios,
        notes=[
            f"INSERT statements that PostgreSQL saw for {scale.group} tasks: {seen} (target {most})"
        ],
    )


def _of_usual(name: str, target: float) -> float | None:
    return target if name == USUAL else None


def _turn(shop: Shop, stored: Dispatch, plainly: Dispatch) -> Callable[[Stopwatch], None]:
    """A transaction without the dispatches, one with them, and one with plain calls after it."""

    def sent_after() -> None:
        _transaction(shop, _nothing)
        plainly()

    pieces: dict[str, Dispatch] = {
        "without": lambda: _transaction(shop, _nothing),
        "stored": lambda: _transaction(shop, stored),
        "sent": sent_after,
    }

    def turn(watch: Stopwatch) -> None:
        watch.time_in_any_order(pieces)
        shop.redis().delete(QUEUE)

    return turn


def _turn_at_once(shop: Shop, stored: Dispatch, plainly: Dispatch) -> Callable[[Stopwatch], None]:
    """Calls inside one open transaction of a Connection, and as many plain calls."""

    def turn(watch: Stopwatch) -> None:
        with shop.engine.begin() as connection:
            connection.execute(insert(Order).values(note="as any other"))
            for _ in range(IN_A_ROW):
                with watch.time("stored"):
                    stored()
        for _ in range(IN_A_ROW):
            with watch.time("plain"):
                plainly()
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


def _nothing() -> None:
    """The business work alone."""


def _ratio(name: str, measured: list[Round], count: int, *, target: float | None = None) -> Ratio:
    return Ratio(
        name=name,
        ours=[(each["stored"] - each["without"]) / count for each in measured],
        theirs=[(each["sent"] - each["without"]) / count for each in measured],
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
