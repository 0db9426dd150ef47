"""How messages are shown to people: a line for each where there is room, a few short ones elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..admin import StoredMessage

__all__ = ["moment", "printable", "show_messages", "utc"]

#: Characters of an error that are shown.
_ERROR = 100
#: Where there is room for fewer, a message gets some lines of its own.
_SHORTEST_ERROR = 24

#: What a column for the state, its borders and the edges take.
_STATE_COLUMN = 18

_STYLES = {
    "ready": "cyan",
    "delayed": "blue",
    "retrying": "yellow",
    "reserved": "magenta",
    "failed": "bold red",
    "delivered": "green",
}
_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def show_messages(messages: Sequence[StoredMessage], *, tells_database: bool) -> None:
    """Print messages, with or without the names of their databases."""
    console = Console(highlight=False)
    if not console.is_terminal:
        _write_lines(messages, tells_database)
        return
    room = console.width - console.measure(_lines(messages, tells_database, 0)).maximum
    if room >= _SHORTEST_ERROR:
        console.print(_lines(messages, tells_database, min(room, _ERROR)))
    else:
        console.print(_paragraphs(messages, tells_database, console.width))


def _write_lines(messages: Sequence[StoredMessage], tells_database: bool) -> None:
    """Write whole lines for a file or a pipe, however long they are."""
    # Wide enough for whatever the columns hold: 255 characters each, and the error.
    console = Console(highlight=False, width=5000)
    with console.capture() as captured:
        console.print(_lines(messages, tells_database, _ERROR))
    for each in captured.get().splitlines():
        click.echo(each.rstrip())


def moment(message: StoredMessage) -> datetime:
    """The time that matters in the message's state.

    Ready: since when; delayed and retrying: the next attempt; reserved: the end of the lease; failed
    and delivered: when that was.
    """
    return (
        message.finished_at or message.reserved_until or message.next_attempt_at or message.created_at
    )


def printable(text: str) -> str:
    """``text`` on one line, without what a terminal would obey."""
    return "".join(
        each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in " ".join(text.split())
    )


def _lines(messages: Sequence[StoredMessage], tells_database: bool, longest_error: int) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    headings = ["state", "task", "id", "broker", "queue", "attempts", "time (UTC)", "", "error"]
    if tells_database:
        headings.insert(0, "database")
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    for each in messages:
        cells: list[str | Text] = [
            _state(each),
            printable(each.task_name),
            printable(each.task_id),
            printable(each.broker),
            printable(each.queue),
            _attempts(each),
            utc(moment(each)),
            _distance(moment(each) - each.read_at),
            _error(each, longest_error),
        ]
        table.add_row(*([each.database, *cells] if tells_database else cells))
    return table


def _paragraphs(messages: Sequence[StoredMessage], tells_database: bool, width: int) -> Table:
    table = Table(box=box.HORIZONTALS, show_header=False, pad_edge=False, show_lines=True)
    # An id that is broken over two lines cannot be copied.
    has_two_columns = width >= _STATE_COLUMN + max(len(each.task_id) for each in messages)
    if has_two_columns:
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for each in messages:
        state, attempts = _state(each), f"attempts {_attempts(each)}"
        about = Text("\n").join(_about(each, tells_database))
        if has_two_columns:
            table.add_row(Text("\n").join([state, Text(attempts)]), about)
        else:
            table.add_row(Text.assemble(state, f"  {attempts}\n", about))
    return table


def _about(message: StoredMessage, tells_database: bool) -> list[Text]:
    when = moment(message)
    about = [
        Text(printable(message.task_name), "bold"),
        Text(printable(message.task_id)),
        Text(f"broker {printable(message.broker)}, queue {printable(message.queue)}"),
        Text(f"{utc(when)} UTC, {_distance(when - message.read_at)}"),
    ]
    if tells_database:
        about.insert(2, Text(f"database {message.database}"))
    if message.error is not None:
        about.append(_error(message, _ERROR))
    return about


def _state(message: StoredMessage) -> Text:
    return Text(message.state, _STYLES.get(message.state, ""))


def _attempts(message: StoredMessage) -> str:
    most = "" if message.max_attempts is None else f"/{message.max_attempts}"
    return f"{message.attempts}{most}"


def _error(message: StoredMessage, longest: int) -> Text:
    text = Text(printable(message.error or "") if longest else "", "red")
    text.truncate(longest or 1, overflow="ellipsis")
    return text


def utc(instant: datetime) -> str:
    """An instant to the second, for people; what stands beside it says that it is UTC."""
    return f"{instant:%Y-%m-%d %H:%M:%S}"


def _distance(duration: timedelta) -> str:
    seconds = round(abs(duration.total_seconds()))
    for unit, length in _UNITS:
        if seconds >= length:
            text = f"{seconds // length} {unit}"
            return f"{text} ago" if duration < timedelta(0) else f"in {text}"
    return "now"
