"""The pictures of docs/monitoring.md, of a destination that begins to fail."""

import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

from celery_outbox.commands.backlogs import report
from celery_outbox.commands.page import History, page
from celery_outbox.monitoring import STATES, Age, Backlog, BrokerBacklog, Count, Failing
from celery_outbox.storage.dialects.counters import Counters
from celery_outbox.storage.state import RelayRow
from tests.pictures.drawing import draw

COLUMNS = 90
NARROW = 45
INTERVAL = timedelta(seconds=2)
BEGIN = datetime(2030, 1, 31, 12, 0, tzinfo=UTC)
RELAYS = [
    RelayRow(
        name=str(number),
        about={"host": f"web-{number}", "pid": 4711 + number, "app": "shop", "since": 1896000000},
        seen_ago=timedelta(seconds=3 * number),
    )
    for number in (1, 2)
]


def draw_backlogs() -> None:
    """Draw what monitor shows, on a wide terminal and on a narrow one."""
    backlogs = list(looks("shop", 70))
    histories = [watched("shop", backlogs), watched("billing", calm("billing", 70))]
    for columns, suffix in ((COLUMNS, ""), (NARROW, "-narrow")):
        draw(f"monitor{suffix}", "monitor", report(backlogs[-1], columns), columns)
        draw(f"watch{suffix}", "monitor --watch", page(histories, INTERVAL, columns), columns)


def looks(name: str, count: int) -> Iterator[Backlog]:
    """A destination that does not answer, from the middle on."""
    error = "ConnectionRefusedError: [Errno 111] Connection refused (reports.example.org:6379)"
    for number in range(count):
        stuck = max(0, number - count // 2) * 7
        ready = int(40 + 30 * math.sin(number / 4))
        failing = [
            Failing(
                broker="reports", queue="monthly", count=Count(number=stuck), attempts=5, error=error
            )
        ]
        yield backlog(
            name,
            number,
            [
                broker("shop", {"ready": ready, "delayed": 12, "reserved": 100}, 2),
                replace(
                    broker("reports", {"retrying": stuck}, stuck // 3 if stuck else None),
                    failing=failing if stuck else [],
                ),
            ],
            stored=number * 90 + int(60 * math.sin(number / 5)),
        )


def calm(name: str, count: int) -> Iterator[Backlog]:
    """One where everything leaves at once."""
    for number in range(count):
        waits = {"ready": number * 7 % 5}
        yield backlog(name, number, [broker("shop", waits, 0)], stored=number * 11 + number % 7)


def broker(name: str, numbers: dict[str, int], seconds: int | None) -> BrokerBacklog:
    counts = {state: Count(number=numbers.get(state, 0)) for state in STATES}
    age = Age(duration=None if seconds is None else timedelta(seconds=seconds))
    return BrokerBacklog(broker=name, is_known=True, counts=counts, age=age, failing=[])


def backlog(name: str, number: int, brokers: list[BrokerBacklog], stored: int) -> Backlog:
    waiting = sum(each.counts[state].number for each in brokers for state in STATES[:4])
    return Backlog(
        database=name,
        read_at=BEGIN + number * INTERVAL,
        took=timedelta(milliseconds=14),
        pending=Count(number=waiting),
        brokers=brokers,
        relays=RELAYS,
        counters=Counters(last_id=stored),
    )


def watched(name: str, backlogs: Any) -> History:
    looking = SimpleNamespace(database=SimpleNamespace(name=name), found=None, is_running=False)
    history = History(cast(Any, looking))
    for looking.found in backlogs:
        history.update()
    return history
