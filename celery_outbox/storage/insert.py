"""One INSERT for many messages, on the caller's connection.

SQLAlchemy compiles the INSERT of a single row, so quoting, types and functions are its own; the row
is then repeated. Compiling a statement of hundreds of rows each time would cost more than running
it, and the driver's ``executemany`` would send one INSERT for each row. The text also bypasses a
``schema_translate_map`` of the caller's: the outbox has one table, where the relay looks.

PostgreSQL takes many rows as one array for each column, which costs it a third less than a parameter
for each value. It is also asked, in the same statement, to notify the relays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Float,
    LargeBinary,
    Text,
    bindparam,
    func,
    insert,
    literal_column,
    null,
)
from sqlalchemy.engine import Connection
from sqlalchemy.engine import Dialect as SQLAlchemyDialect
from sqlalchemy.types import TypeEngine

from ..message import OutboxMessage
from .dialects import Dialect
from .schema import MAX_NAME, Tables, UTCDateTime, storable

__all__ = ["InsertMessages"]

_MICROSECOND = timedelta(microseconds=1)
#: Fewer rows are cheaper as values.
_ARRAY_ROWS = 10

#: What a message without delay, deadline or retry policy has: most of them.
_PLAIN: dict[str, TypeEngine[Any]] = {
    "broker": Text(),
    "task_id": Text(),
    "task_name": Text(),
    "queue": Text(),
    "message": Text(),
    "body": LargeBinary(),
}
#: What any message has.
_TIMED: dict[str, TypeEngine[Any]] = _PLAIN | {
    "eta": UTCDateTime(),
    "countdown": Float(53),
    "lead": Float(53),
    "expires_in": Float(53),
    "max_attempts": BigInteger(),
    "base_delay": BigInteger(),
    "max_delay": BigInteger(),
}

#: Gives the value of a message by its name: a parameter, or a column of what is selected.
_Values = Callable[[str], ColumnElement[Any]]


class _Template(Protocol):
    """How one driver is given many messages."""

    def fill(self, messages: Sequence[OutboxMessage]) -> tuple[str, tuple[Any, ...]]:
        """The INSERT of ``messages``, and its parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One row of VALUES: its text cut at the parameters, and their names in that order."""

    parts: Sequence[str]
    names: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """VALUES with a parameter for each value of each row.

    Attributes:
        plain: the row of a message without delay, deadline or retry policy.
        timed: the row of any message.
        first: those two once more, for the first message.
        instant: turns a datetime into what the driver takes.
    """

    prefix: str
    plain: _Row
    timed: _Row
    first: tuple[_Row, _Row]
    style: str
    instant: Callable[[Any], Any]

    def fill(self, messages: Sequence[OutboxMessage]) -> tuple[str, tuple[Any, ...]]:
        """Write a row for each message, in the driver's own style of parameters."""
        rows: list[_Row] = []
        parameters: list[Any] = []
        now = time.monotonic()
        plain, timed = self.first
        for message in messages:
            row = timed if _is_timed(message) else plain
            plain, timed = self.plain, self.timed
            values = _values(message, now, self.instant)
            rows.append(row)
            parameters += [values[name] for name in row.names]
        if self.style == "numeric_dollar":  # asyncpg
            number = iter(range(1, len(parameters) + 1))
            texts = [_numbered(row.parts, number) for row in rows]
        else:
            mark = "?" if self.style == "qmark" else "%s"
            texts = [mark.join(row.parts) for row in rows]
        return f"{self.prefix} VALUES {', '.join(texts)}", tuple(parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrays:
    """A SELECT from one array for each name.

    Attributes:
        plain: the statement for messages without delay, deadline and retry policy.
        timed: the statement for any messages.
    """

    plain: str
    timed: str

    def fill(self, messages: Sequence[OutboxMessage]) -> tuple[str, tuple[Any, ...]]:
        """Turn the messages by a quarter."""
        is_timed, now = any(map(_is_timed, messages)), time.monotonic()
        columns: dict[str, list[Any]] = {name: [] for name in (_TIMED if is_timed else _PLAIN)}
        for message in messages:
            values = _values(message, now, _unchanged, is_timed=is_timed)
            for name, column in columns.items():
                column.append(values[name])
        return self.timed if is_timed else self.plain, tuple(columns.values())


def _numbered(parts: Sequence[str], number: Iterator[int]) -> str:
    head, *tail = parts
    return head + "".join(f"${next(number)}{part}" for part in tail)


class InsertMessages:
    """Writes messages into the table, in as few statements as the database allows.

    With ``notifies``, and where the database can, relays are notified when that commits.
    """

    def __init__(self, tables: Tables, dialect: Dialect, *, notifies: bool) -> None:
        self._tables = tables
        self._dialect = dialect
        self._notifies = notifies
        self._templates: dict[tuple[str, str, bool, bool], _Template] = {}

    def __call__(self, connection: Connection, messages: Sequence[OutboxMessage]) -> None:
        """Insert on ``connection``, in order; commits nothing."""
        # What is not due yet is found in its time by asking.
        is_owed = (
            self._notifies and self._dialect.can_notify(connection) and any(map(_is_due, messages))
        )
        for chunk in self._chunks(messages):
            template = self._template(connection.dialect, len(chunk), notifies=is_owed)
            connection.exec_driver_sql(*template.fill(chunk))
            is_owed = False

    def _chunks(self, messages: Sequence[OutboxMessage]) -> Iterator[Sequence[OutboxMessage]]:
        start, size = 0, 0
        for index, message in enumerate(messages):
            length = len(message.body) + len(message.envelope)
            full = index - start >= self._dialect.insert_rows
            if index > start and (full or size + length > self._dialect.insert_bytes):
                yield messages[start:index]
                start, size = index, 0
            size += length
        if start < len(messages):
            yield messages[start:]

    def _template(self, dialect: SQLAlchemyDialect, rows: int, *, notifies: bool) -> _Template:
        by_array = rows >= _ARRAY_ROWS and dialect.driver in self._dialect.array_drivers
        key = (dialect.driver, dialect.paramstyle, by_array, notifies)
        if key not in self._templates:
            # In the place of a constant that each row has, so that it costs no round trip.
            more = {"attempts": self._dialect.notify(self._tables, "0")} if notifies else {}
            make = self._arrays if by_array else self._rows
            self._templates[key] = make(dialect, more)
        return self._templates[key]

    def _rows(self, dialect: SQLAlchemyDialect, more: dict[str, Any]) -> _Template:
        def parameter(name: str) -> ColumnElement[Any]:
            return bindparam(name, type_=_TIMED[name])

        plain, timed = self._plain_row(parameter), self._timed_row(parameter)
        prefix, plain_row = self._compile(dialect, plain)
        return _Rows(
            prefix=prefix,
            plain=plain_row,
            timed=self._compile(dialect, timed)[1],
            first=(self._compile(dialect, plain | more)[1], self._compile(dialect, timed | more)[1]),
            style=dialect.paramstyle,
            instant=UTCDateTime().bind_processor(dialect) or _unchanged,
        )

    def _arrays(self, dialect: SQLAlchemyDialect, more: dict[str, Any]) -> _Template:
        def column(name: str) -> ColumnElement[Any]:
            return literal_column(f"m.{name}", type_=_TIMED[name])

        def statement(values: dict[str, Any], names: dict[str, TypeEngine[Any]]) -> str:
            prefix, row = self._compile(dialect, values)
            (selected,) = row.parts  # it has no parameters
            arrays = [
                f"{_array_mark(dialect, number, name)}::{type_.compile(dialect=dialect)}[]"
                for number, (name, type_) in enumerate(names.items(), start=1)
            ]
            source = f"unnest({', '.join(arrays)}) AS m ({', '.join(names)})"
            return f"{prefix} SELECT {selected[1:-1]} FROM {source}"  # noqa: S608 - names of ours alone

        return _Arrays(
            plain=statement(self._plain_row(column) | more, _PLAIN),
            timed=statement(self._timed_row(column) | more, _TIMED),
        )

    def _compile(self, dialect: SQLAlchemyDialect, values: dict[str, Any]) -> tuple[str, _Row]:
        # "format" marks each use of a parameter by %s, whatever the driver's own style is; inline,
        # because the new ids are of no interest.
        statement = insert(self._tables.messages).values(values).inline()
        dialect_type: Any = type(dialect)
        compiled: Any = statement.compile(dialect=dialect_type(paramstyle="format"))
        text = str(compiled)
        if dialect.paramstyle not in {"format", "pyformat"}:
            text = text.replace("%%", "%")
        prefix, _, row = text.partition(" VALUES ")
        return prefix, _Row(parts=row.split("%s"), names=compiled.positiontup)

    def _plain_row(self, value: _Values) -> dict[str, Any]:
        clock = self._dialect.clock()
        return {
            **{name: value(name) for name in _PLAIN},
            "scheduled_at": clock,
            "deliver_at": null(),
            "expires_at": null(),
            "attempts": literal_column("0"),
            "max_attempts": null(),
            "base_delay": null(),
            "max_delay": null(),
            "created_at": clock,
        }

    def _timed_row(self, value: _Values) -> dict[str, Any]:
        # A delay becomes the database's time here: the producer's clock does not matter.
        clock, shifted = self._dialect.clock(), self._dialect.shifted
        intended = func.coalesce(value("eta"), shifted(clock, value("countdown")))
        earliest = shifted(func.coalesce(intended, clock), value("lead"))
        return self._plain_row(value) | {
            "scheduled_at": self._dialect.later(earliest, clock),
            "deliver_at": intended,
            "expires_at": shifted(clock, value("expires_in")),
            **{name: value(name) for name in ("max_attempts", "base_delay", "max_delay")},
        }


def _array_mark(dialect: SQLAlchemyDialect, number: int, name: str) -> str:
    if dialect.paramstyle == "numeric_dollar":  # asyncpg
        return f"${number}"
    # Psycopg: texts and bytes in binary, which need no escapes; the others may hold nothing but NULL,
    # whose type it could not tell.
    return "%b" if name in _PLAIN else "%s"


def _unchanged(value: Any) -> Any:
    return value


def _is_due(message: OutboxMessage) -> bool:
    """Whether a relay may take it at once, as far as the producer's clock can tell."""
    if message.eta is not None:
        return (message.eta - datetime.now(UTC)).total_seconds() <= message.lead
    if message.countdown is not None:
        return message.countdown - (time.monotonic() - message.made_at) <= message.lead
    return True


def _is_timed(message: OutboxMessage) -> bool:
    return message.is_delayed or message.expires_in is not None or message.retry is not None


def _values(
    message: OutboxMessage,
    now: float,
    instant: Callable[[Any], Any],
    *,
    is_timed: bool | None = None,
) -> dict[str, Any]:
    values: dict[str, Any] = {
        "broker": message.broker,
        "task_id": message.task_id,
        "task_name": storable(message.task_name, MAX_NAME),
        "queue": storable(message.queue, MAX_NAME),
        "message": message.envelope,
        "body": message.body,
    }
    if _is_timed(message) if is_timed is None else is_timed:
        waited, retry = now - message.made_at, message.retry
        values |= {
            "eta": None if message.eta is None else instant(message.eta),
            "countdown": None if message.countdown is None else message.countdown - waited,
            "lead": -message.lead,
            "expires_in": None if message.expires_in is None else message.expires_in - waited,
            "max_attempts": retry and retry.max_attempts,
            "base_delay": retry and retry.base_delay // _MICROSECOND,
            "max_delay": retry and retry.max_delay // _MICROSECOND,
        }
    return values
