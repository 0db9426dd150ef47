"""One INSERT for many messages, on the caller's connection.

SQLAlchemy compiles the INSERT of a single row, so quoting, types and functions are its own; the row
is then repeated. Compiling a statement of hundreds of rows each time would cost more than running
it, and the driver's ``executemany`` would send one INSERT for each row. The text also bypasses a
``schema_translate_map`` of the caller's: the outbox has one table, where the relay looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import BigInteger, Float, bindparam, func, insert, literal_column, null
from sqlalchemy.engine import Connection
from sqlalchemy.engine import Dialect as SQLAlchemyDialect

from ..message import OutboxMessage
from .dialects import Dialect
from .schema import MAX_NAME, Tables, UTCDateTime, storable

__all__ = ["InsertMessages"]

_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One row of VALUES: its text cut at the parameters, and their names in that order."""

    parts: Sequence[str]
    names: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Template:
    """An INSERT for one driver.

    Attributes:
        plain: the row of a message without delay, deadline or retry policy: most of them.
        timed: the row of any message.
        instant: turns a datetime into what the driver takes.
    """

    prefix: str
    plain: _Row
    timed: _Row
    style: str
    instant: Callable[[Any], Any]

    def statement(self, rows: Sequence[_Row]) -> str:
        """Write the INSERT of ``rows`` in the driver's own style of parameters."""
        if self.style == "numeric_dollar":  # asyncpg
            number = iter(range(1, sum(len(row.names) for row in rows) + 1))
            values = [_numbered(row.parts, number) for row in rows]
        else:
            mark = "?" if self.style == "qmark" else "%s"
            values = [mark.join(row.parts) for row in rows]
        return f"{self.prefix} VALUES {', '.join(values)}"


def _numbered(parts: Sequence[str], number: Iterator[int]) -> str:
    head, *tail = parts
    return head + "".join(f"${next(number)}{part}" for part in tail)


class InsertMessages:
    """Writes messages into the table, in as few statements as the database allows."""

    def __init__(self, tables: Tables, dialect: Dialect) -> None:
        self._tables = tables
        self._dialect = dialect
        self._templates: dict[tuple[str, str], _Template] = {}

    def __call__(self, connection: Connection, messages: Sequence[OutboxMessage]) -> None:
        """Insert on ``connection``, in order; commits nothing."""
        template = self._template(connection.dialect)
        for chunk in self._chunks(messages):
            rows: list[_Row] = []
            parameters: list[Any] = []
            now = time.monotonic()
            for message in chunk:
                row = template.timed if _is_timed(message) else template.plain
                values = _values(message, now, template.instant)
                rows.append(row)
                parameters += [values[name] for name in row.names]
            connection.exec_driver_sql(template.statement(rows), tuple(parameters))

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

    def _template(self, dialect: SQLAlchemyDialect) -> _Template:
        key = (dialect.driver, dialect.paramstyle)
        if key not in self._templates:
            prefix, plain = self._compile(dialect, self._plain_row())
            _, timed = self._compile(dialect, self._timed_row())
            self._templates[key] = _Template(
                prefix=prefix,
                plain=plain,
                timed=timed,
                style=dialect.paramstyle,
                instant=UTCDateTime().bind_processor(dialect) or (lambda value: value),
            )
        return self._templates[key]

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

    def _plain_row(self) -> dict[str, Any]:
        clock = self._dialect.clock()
        return {
            **{
                name: bindparam(name)
                for name in ("broker", "task_id", "task_name", "queue", "message", "body")
            },
            "scheduled_at": clock,
            "deliver_at": null(),
            "expires_at": null(),
            "attempts": literal_column("0"),
            "max_attempts": null(),
            "base_delay": null(),
            "max_delay": null(),
            "created_at": clock,
        }

    def _timed_row(self) -> dict[str, Any]:
        # A delay becomes the database's time here: the producer's clock does not matter.
        clock, seconds = self._dialect.clock(), Float(53)
        intended = func.coalesce(
            bindparam("eta", type_=UTCDateTime),
            self._dialect.shifted(clock, bindparam("countdown", type_=seconds)),
        )
        earliest = self._dialect.shifted(
            func.coalesce(intended, clock), bindparam("lead", type_=seconds)
        )
        return self._plain_row() | {
            "scheduled_at": self._dialect.later(earliest, clock),
            "deliver_at": intended,
            "expires_at": self._dialect.shifted(clock, bindparam("expires_in", type_=seconds)),
            "max_attempts": bindparam("max_attempts", type_=BigInteger),
            "base_delay": bindparam("base_delay", type_=BigInteger),
            "max_delay": bindparam("max_delay", type_=BigInteger),
        }


def _is_timed(message: OutboxMessage) -> bool:
    return message.is_delayed or message.expires_in is not None or message.retry is not None


def _values(message: OutboxMessage, now: float, instant: Callable[[Any], Any]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "broker": message.broker,
        "task_id": message.task_id,
        "task_name": storable(message.task_name, MAX_NAME),
        "queue": storable(message.queue, MAX_NAME),
        "message": message.envelope,
        "body": message.body,
    }
    if _is_timed(message):
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
