"""The page of ``monitor --watch``: what fails on top, then each database with its small graphs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ..errors import OutboxError
from ..monitoring import Backlog, Looking, Rates, rates
from .backlogs import alarms, counts, failures, oldest, relays
from .tables import printable

__all__ = ["History", "page", "sparkline"]

_BARS = "▁▂▃▄▅▆▇█"
#: Looks that are remembered: more than the widest terminal shows.
_REMEMBERED = 500
#: A look that takes longer is told of.
_PATIENCE = timedelta(seconds=5)
#: Lines that each trouble takes at most, so that the graphs below keep their place.
_URGENT_LINES = 2
#: Columns of a number beside its graph.
_NUMBER = 12


class History:
    """What the looks at one database have found, one after the other."""

    def __init__(self, looking: Looking) -> None:
        self.looking = looking
        self.name = looking.database.name
        #: The last backlog that was read; there may have been errors since.
        self.backlog: Backlog | None = None
        self.rates = Rates()
        #: Whether the last look found it busy, and the one before did not.
        self.has_become_busy = False
        self._last: Backlog | OutboxError | None = None
        self._samples: deque[tuple[Backlog, Rates] | None] = deque(maxlen=_REMEMBERED)

    def update(self) -> Backlog | None:
        """Take what the last look has found; its backlog, when it is new."""
        found = self.looking.found
        if found is None or found is self._last:
            return None
        before, self._last = self._last, found
        if not isinstance(found, Backlog):
            self._samples.append(None)
            return None
        # Also over an outage: what was stored meanwhile was stored.
        self.rates = Rates() if self.backlog is None else rates(self.backlog, found)
        self.has_become_busy = found.is_busy and not (isinstance(before, Backlog) and before.is_busy)
        self.backlog = found
        self._samples.append((found, self.rates))
        return found

    @property
    def trouble(self) -> OutboxError | None:
        """Why it cannot be read now."""
        if self.looking.is_running and self.looking.lasts > _PATIENCE:
            return self.looking.silence
        return self._last if isinstance(self._last, OutboxError) else None

    @property
    def current(self) -> Backlog | OutboxError:
        """What is known of it now."""
        if self.looking.is_running or self._last is None:
            return self.looking.silence
        return self._last

    def series(self) -> Iterator[tuple[str, str, str, list[float | None]]]:
        """Each number that has a graph: its name, its style, the number, and what it was."""
        backlog = self.backlog
        waiting, age = ("?", "?") if backlog is None else (str(backlog.pending), oldest(backlog.age))
        yield "waiting", "cyan", waiting, self._was(lambda it, _: float(it.pending.number))
        yield "oldest due", "yellow", age, self._was(lambda it, _: _seconds(it.age.duration))
        yield "stored", "blue", _rate(self.rates.stored), self._was(lambda _, it: it.stored)
        yield "published", "green", _rate(self.rates.published), self._was(lambda _, it: it.published)
        yield "failed", "red", _rate(self.rates.failed), self._was(lambda _, it: it.failed)

    def _was(self, number: Callable[[Backlog, Rates], float | None]) -> list[float | None]:
        return [None if each is None else number(*each) for each in self._samples]


def page(histories: Sequence[History], interval: timedelta, width: int) -> RenderableType:
    """The whole page; what does not fit into the terminal's height is cut off below."""
    parts: list[RenderableType] = [_heading(interval)]
    for history in histories:
        for text in _urgent(history, is_one=len(histories) == 1):
            text.truncate(_URGENT_LINES * width, overflow="ellipsis")
            parts.append(text)
    for history in histories:
        parts += _database(history, width)
    return Group(*parts)


def sparkline(numbers: Sequence[float | None], width: int) -> str:
    """The last ``width`` numbers as bars from zero to the highest; blank where there is none."""
    last = numbers[-width:] if width > 0 else []
    highest = max((each for each in last if each is not None), default=0.0)
    return "".join(" " if each is None else _bar(each, highest) for each in last)


def _bar(number: float, highest: float) -> str:
    if number <= 0 or highest <= 0:
        return _BARS[0]
    # What is not zero is not shown as zero.
    steps = len(_BARS) - 1
    return _BARS[max(1, min(steps, round(number / highest * steps)))]


def _heading(interval: timedelta) -> Text:
    seconds = f"{interval.total_seconds():g}"
    return Text(f"{datetime.now(UTC):%H:%M:%S} UTC, every {seconds} s, q quits", "dim")


def _urgent(history: History, *, is_one: bool) -> Iterator[Text]:
    """What fails, before anything else."""
    name = "" if is_one else f"{history.name}: "
    trouble = history.trouble
    if trouble is not None:
        yield Text(f"DOWN: {printable(str(trouble))}", "bold red")
    elif history.backlog is not None:
        for text in [*alarms(history.backlog), *failures(history.backlog.failing)]:
            yield Text.assemble((name, "bold"), text)


def _database(history: History, width: int) -> Iterator[RenderableType]:
    yield Rule(Text(history.name, "bold"), style="dim", align="left")
    backlog = history.backlog
    if backlog is None:
        yield Text("has not answered yet", "dim")
        return
    yield _graphs(history, width)
    if history.trouble is not None:
        yield Text(f"as of {backlog.read_at:%H:%M:%S} UTC:", "red")
    yield counts(backlog.brokers, width)
    yield from relays(backlog)


def _graphs(history: History, width: int) -> Table:
    series = list(history.series())
    label = max(len(name) for name, *_ in series)
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=label, no_wrap=True)
    grid.add_column(width=_NUMBER, justify="right", no_wrap=True)
    grid.add_column(no_wrap=True, overflow="crop")
    room = width - label - _NUMBER - 3
    for name, style, number, was in series:
        grid.add_row(name, number, Text(sparkline(was, room), style))
    return grid


def _rate(number: float | None) -> str:
    return "?" if number is None else f"{number:,.1f}/s"


def _seconds(duration: timedelta | None) -> float:
    return 0.0 if duration is None else duration.total_seconds()
