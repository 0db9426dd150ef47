"""How a backlog is shown to people: its counts, its age, who relays, what fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import click
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..monitoring import BOUND, STATES, Age, Backlog, BrokerBacklog, Count, Failing
from ..storage.state import RelayRow
from .tables import printable

__all__ = [
    "alarms",
    "counts",
    "failures",
    "headline",
    "lasting",
    "oldest",
    "relays",
    "report",
    "write_lines",
]

#: Characters of an error that are shown.
_ERROR = 160
#: Columns of what is no terminal.
_WIDEST = 5000
#: Failing queues that are shown.
_FAILING = 5
#: For how long messages may be due, with a relay that has not failed, before that is said.
_SLOW = timedelta(minutes=1)

_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))

_STYLES = {
    "ready": "cyan",
    "delayed": "blue",
    "retrying": "yellow",
    "reserved": "magenta",
    "failed": "bold red",
    "delivered": "green",
}


def report(backlog: Backlog, width: int) -> Group:
    """Everything about one database, in so many columns."""
    inside: list[RenderableType] = [*failures(backlog.failing), counts(backlog.brokers, width - 2)]
    inside += relays(backlog)
    note = f"looked at in {backlog.took.total_seconds() * 1000:,.0f} ms"
    if _is_cut(backlog):
        note += f"; +: at least, since no more than {BOUND:,} rows of a kind are counted"
    inside.append(Text(note, "dim"))
    return Group(headline(backlog), *alarms(backlog), Padding(Group(*inside), (0, 0, 0, 2)))


def write_lines(backlog: Backlog) -> None:
    """Write everything about one database for a file or a pipe: whole lines, however long they are."""
    console = Console(highlight=False, width=_WIDEST)
    with console.capture() as captured:
        console.print(report(backlog, _WIDEST))
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def headline(backlog: Backlog) -> Text:
    """How much waits, and for how long."""
    number, age = backlog.pending, backlog.age
    is_one = number == Count(number=1)
    text = Text.assemble(
        (backlog.database, "bold"),
        f": {'nothing waits' if number == Count(number=0) else ''}",
    )
    if number.number:
        text.append(f"{number} message{'' if is_one else 's'} wait{'s' if is_one else ''}")
    if age.duration is not None:
        least = "" if age.is_exact else "at least "
        text.append(f", the oldest has been due for {least}{lasting(age.duration)}")
    elif number.number:
        text.append(", none is due")
    return text


def alarms(backlog: Backlog) -> Iterator[Text]:
    """What somebody has to do something about."""
    if backlog.is_busy:
        yield Text("BUSY: a threshold is reached", "bold red")
    for broker in backlog.unknown:
        due = broker.counts["ready"] + broker.counts["retrying"] + broker.counts["reserved"]
        yield Text(
            f"UNKNOWN: {due} message{'' if due.number == 1 else 's'} for the broker "
            f"{printable(broker.broker)!r}, to which no relay here delivers. Add it to outbox_brokers, "
            "or run a relay of the app that has this outbox_name.",
            "bold red",
        )
    if not backlog.running and any(broker.has_due for broker in backlog.brokers):
        yield Text("NO RELAY is running, and messages are due", "bold red")
    failing = {each.broker for each in backlog.failing}
    for broker in backlog.brokers if backlog.running else ():
        age = broker.age.duration
        if broker.is_known and broker.broker not in failing and age is not None and age >= _SLOW:
            # While a broker cannot be reached nothing is taken, and so no message gets an error.
            yield Text(
                f"SLOW: messages for the broker {printable(broker.broker)!r} have been due for "
                f"{lasting(age)}, and no delivery has failed. Its relay cannot reach the broker or "
                "cannot keep up, is paused or missing: see its log.",
                "bold yellow",
            )


def failures(failing: Sequence[Failing]) -> Iterator[Text]:
    """The queues that deliveries fail for, each on a line or more."""
    for each in failing[:_FAILING]:
        one = each.count == Count(number=1)
        yield Text.assemble(
            ("failing ", "bold yellow"),
            (f"{printable(each.broker)}, {printable(each.queue)}", "bold"),
            f": {each.count} message{'' if one else 's'}, {each.attempts} attempts: ",
            (_shortened(each.error, _ERROR), "red"),
        )
    if len(failing) > _FAILING:
        yield Text(f"failing {len(failing) - _FAILING} more queues", "bold yellow")


def counts(brokers: Sequence[BrokerBacklog], width: int) -> Table:
    """A line for each broker; where that is too wide, a line for each number."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("broker", no_wrap=True)
    for state in STATES:
        table.add_column(state, justify="right", no_wrap=True)
    table.add_column("oldest due", justify="right", no_wrap=True)
    for each in brokers:
        numbers = [_number(each.counts[state], _STYLES[state]) for state in STATES]
        table.add_row(printable(each.broker), *numbers, oldest(each.age))
    room = Console(width=_WIDEST).measure(table).maximum
    return table if room <= width else _narrow(brokers)


def _narrow(brokers: Sequence[BrokerBacklog]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right", overflow="fold")
    for each in brokers:
        table.add_row(Text("broker", "bold"), Text(printable(each.broker), "bold"))
        for state in STATES:
            if each.counts[state].number or state == "ready":
                table.add_row(state, _number(each.counts[state], _STYLES[state]))
        table.add_row("oldest due", oldest(each.age))
    return table


def relays(backlog: Backlog) -> Iterator[Text]:
    """The relays that run, and those that do not answer any more."""
    if not backlog.relays:
        yield Text("no relay is running")
    for relay in backlog.relays:
        since = _since(relay)
        seen = lasting(relay.seen_ago)
        if relay.is_running:
            yield Text(f"relay {_place(relay)}{since}, seen {seen} ago")
        else:
            yield Text(f"relay {_place(relay)}{since}: stuck or killed, not seen for {seen}", "red")


def oldest(age: Age) -> str:
    """An age in a table."""
    if age.duration is None:
        return "–" if age.is_exact else "?"
    return f"{lasting(age.duration)}{'' if age.is_exact else '+'}"


def lasting(duration: timedelta) -> str:
    """A duration in its two largest units."""
    seconds = max(0, int(duration.total_seconds()))
    for (unit, length), (lower, small) in pairwise(_UNITS):
        if seconds >= length:
            rest = seconds % length // small
            return f"{seconds // length} {unit}{f' {rest} {lower}' if rest else ''}"
    return f"{seconds} s"


def _shortened(text: str, longest: int) -> str:
    """``text`` on one line, its end cut off where it is too long."""
    line = printable(text)
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def _number(count: Count, style: str) -> Text:
    return Text(str(count), style if count.number else "dim")


def _place(relay: RelayRow) -> str:
    host, pid = relay.about.get("host", "?"), relay.about.get("pid", "?")
    return f"{printable(str(host))}, process {printable(str(pid))}"


def _since(relay: RelayRow) -> str:
    since = relay.about.get("since")
    if not isinstance(since, int | float):
        return ""
    return f", since {datetime.fromtimestamp(since, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _is_cut(backlog: Backlog) -> bool:
    numbers = [*backlog.counts.values(), *(failing.count for failing in backlog.failing)]
    return not (backlog.age.is_exact and all(number.is_exact for number in numbers))
