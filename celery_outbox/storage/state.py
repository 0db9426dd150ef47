"""The state table: the version of the tables, a migration on its way, the relays that run, restarts.

A relay's row says when it was last seen, by the database's clock; how long ago that is, only the
database says.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import delete, insert, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from ..errors import SchemaError
from .dialects import Dialect
from .schema import Tables

__all__ = ["MigrationMark", "RelayRow", "StateStore"]

_VERSION = "schema"
_MIGRATION = "migration"
_RELAY = "relay:"
_RESTART = "restart:"

#: A relay that has not been seen for so long does not run any more.
STALE_AFTER = timedelta(seconds=60)
#: A killed relay leaves its row; the next one that begins removes it when it is as old as that.
FORGOTTEN_AFTER = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationMark:
    """A migration that has begun and not ended.

    Attributes:
        source: the version that it began with.
        target: the version that it leads to.
        done: the steps that need not be repeated.
    """

    source: int
    target: int
    done: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayRow:
    """A relay that has not removed its row: it runs, or was killed.

    Attributes:
        name: random, one for each run.
        about: where it runs: ``host``, ``pid``, ``since`` (Unix seconds); ``app``: its outbox_name.
        seen_ago: how long ago it was last seen.
    """

    name: str
    about: Mapping[str, Any]
    seen_ago: timedelta

    @property
    def is_running(self) -> bool:
        """Whether it was seen lately."""
        return self.seen_ago < STALE_AFTER

    def __str__(self) -> str:
        place = f"{self.about.get('host', '?')}, process {self.about.get('pid', '?')}"
        return f"{place}, seen {self.seen_ago.total_seconds():.0f} s ago"


class StateStore:
    """The state table of one database, as statements; it never commits."""

    def __init__(self, tables: Tables, dialect: Dialect) -> None:
        self._table = tables.state
        self._dialect = dialect

    def version(self, connection: Connection) -> int | None:
        """The version of the tables; None when nobody has written it down."""
        found = self._get(connection, _VERSION)
        if found is None:
            return None
        if not found.isdecimal():
            raise SchemaError(
                f"table {self._table.fullname!r}: expected a number as the schema version, found "
                f"{found!r}. Is it another program's table? Then set outbox_table to another name."
            )
        return int(found)

    def set_version(self, connection: Connection, version: int) -> None:
        """Write down that the tables are of ``version``, and that no migration is on its way."""
        self._put(connection, _VERSION, str(version))
        self._remove(connection, _MIGRATION)

    def migration(self, connection: Connection) -> MigrationMark | None:
        """The migration that has begun and not ended."""
        found = self._get(connection, _MIGRATION)
        return None if found is None else MigrationMark(**json.loads(found))

    def mark(self, connection: Connection, mark: MigrationMark) -> None:
        """Write down how far a migration has come."""
        value = {"source": mark.source, "target": mark.target, "done": list(mark.done)}
        self._put(connection, _MIGRATION, json.dumps(value))

    def see_relay(self, connection: Connection, name: str, about: Mapping[str, Any]) -> None:
        """Write down that a relay runs now."""
        self._put(connection, _RELAY + name, json.dumps(about))

    def remove_relay(self, connection: Connection, name: str) -> None:
        """Write down that a relay has ended."""
        self._remove(connection, _RELAY + name)

    def relays(self, connection: Connection) -> Sequence[RelayRow]:
        """Every relay with a row, those seen last first."""
        t = self._table
        ago = -self._dialect.seconds_until(t.c.seen_at)
        rows = connection.execute(
            select(t.c.name, t.c.value, ago.label("ago")).where(t.c.name.startswith(_RELAY))
        )
        found = [
            RelayRow(
                name=row.name.removeprefix(_RELAY),
                about=json.loads(row.value),
                seen_ago=timedelta(seconds=float(row.ago)),
            )
            for row in rows
        ]
        return sorted(found, key=lambda relay: relay.seen_ago)

    def forget_relays(self, connection: Connection) -> None:
        """Remove the rows of relays that were killed long ago."""
        # One by one: a DELETE by time would lock the rows of those that run.
        for relay in self.relays(connection):
            if relay.seen_ago > FORGOTTEN_AFTER:
                self.remove_relay(connection, relay.name)

    def ask_restart(self, connection: Connection, app: str) -> None:
        """Ask every relay of an app, by its outbox_name, that has begun before now to end."""
        self._put(connection, _restart(app), secrets.token_hex(8))

    def restart(self, connection: Connection, app: str) -> str | None:
        """The mark of the last ``ask_restart``: it is another one after each; None before the first."""
        return self._get(connection, _restart(app))

    def _get(self, connection: Connection, name: str) -> str | None:
        t = self._table
        value: str | None = connection.execute(select(t.c.value).where(t.c.name == name)).scalar()
        return value

    def _put(self, connection: Connection, name: str, value: str) -> None:
        t, now = self._table, self._dialect.clock()
        changed = connection.execute(update(t).where(t.c.name == name).values(value=value, seen_at=now))
        if changed.rowcount:
            return
        try:
            with connection.begin_nested():
                connection.execute(insert(t).values(name=name, value=value, seen_at=now))
        except IntegrityError:  # another process has put it there meanwhile
            connection.execute(update(t).where(t.c.name == name).values(value=value, seen_at=now))

    def _remove(self, connection: Connection, name: str) -> None:
        connection.execute(delete(self._table).where(self._table.c.name == name))


def _restart(app: str) -> str:
    # Names of apps may be as long as the column alone is.
    return _RESTART + hashlib.sha256(app.encode()).hexdigest()
