"""What every database does alike, and the questions that each answers in its own way.

The rule of time: a database's clock is compared only with the same database's clock. ``now`` is what
a statement compares with; ``clock`` is what it writes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, ClassVar, TypeVar

from sqlalchemy import (
    Column,
    ColumnElement,
    Delete,
    Float,
    Index,
    Row,
    Select,
    Table,
    Update,
    bindparam,
    case,
    func,
    literal_column,
)
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from ...errors import ConfigurationError, DatabaseError
from ..schema import Tables
from ..troubles import Trouble
from .listening import Subscription

__all__ = ["Dialect", "OldestTransaction", "ServerFacts", "default_isolation_level"]

#: A statement that changes rows.
D = TypeVar("D", Update, Delete)

#: Counting stops here instead of overflowing a 64-bit column, which would block every claim.
MAX_ATTEMPTS = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Settings of a server and of its sessions.

    Attributes:
        values: by the name that is shown.
        faults: what is wrong, and what to do.
        remarks: what could be better.
    """

    values: Mapping[str, str]
    faults: Sequence[str] = field(default=())
    remarks: Sequence[str] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class OldestTransaction:
    """The transaction that has been open longest; ``seconds`` None when none is open.

    ``is_complete`` False: there are others that this user may not look at.
    """

    seconds: float | None
    is_complete: bool = True


@dataclass(slots=True, kw_only=True)
class ClaimPlan:
    """A claim but for its parameters, made once: making it costs more than running it.

    Attributes:
        ready: which rows may be taken.
        look: finds the first of them.
        values: what is written into them.
        columns: what is read of them.
        statement: what a dialect makes of it.
    """

    tables: Tables
    ready: Sequence[ColumnElement[bool]]
    look: Select[Any]
    values: Mapping[str, Any]
    columns: Sequence[ColumnElement[Any]]
    statement: Any = None


class Dialect(ABC):
    """How one kind of database does what the store asks of it."""

    #: The oldest server that can run every statement, for each name that a server goes by.
    oldest_versions: ClassVar[Mapping[str, tuple[int, ...]]]
    #: What error codes mean, where they mean more than their text says.
    troubles: ClassVar[Mapping[object, Trouble]] = {}
    #: Whether a migration that fails or is killed leaves nothing behind.
    has_transactional_ddl: ClassVar[bool] = True

    #: Rows that one INSERT holds at most: far below each database's limit of parameters.
    insert_rows: ClassVar[int] = 500
    #: Bytes of bodies that one INSERT holds at most, unless a single message is larger.
    insert_bytes: ClassVar[int] = 4 * 1024 * 1024
    #: Drivers by which many rows go as one array for each column.
    array_drivers: ClassVar[frozenset[str]] = frozenset()
    #: A synchronous driver for the same database, by the name of the asynchronous one.
    sync_drivers: ClassVar[dict[str, str]] = {}

    @abstractmethod
    def now(self) -> ColumnElement[datetime]:
        """The time that a statement compares with: fixed for the statement, so an index serves."""

    def clock(self) -> ColumnElement[datetime]:
        """The time of this very moment, for writing."""
        return self.now()

    @abstractmethod
    def shifted(
        self, instant: ColumnElement[datetime], seconds: ColumnElement[float]
    ) -> ColumnElement[datetime]:
        """``instant`` moved by ``seconds``, fractions included; NULL when either is NULL."""

    @abstractmethod
    def seconds_until(self, instant: ColumnElement[datetime]) -> ColumnElement[float]:
        """The seconds from now to ``instant``, negative when past, NULL when it is NULL."""

    def later(
        self, one: ColumnElement[datetime], other: ColumnElement[datetime]
    ) -> ColumnElement[datetime]:
        """The later of two instants, neither of them NULL."""
        return func.greatest(one, other)

    @abstractmethod
    def claim(
        self, connection: Connection, plan: ClaimPlan, limit: int, parameters: Mapping[str, Any]
    ) -> Sequence[Row[Any]]:
        """Write the plan's ``values`` into up to ``limit`` of the rows that are ``ready``.

        Returns the plan's ``columns``. The rows are those that have been due longest. No row is waited
        for: what another relay is claiming is passed over.
        """

    def in_due_order(self, statement: Select[Any], tables: Tables) -> Select[Any]:
        """``statement`` in the order in which rows fall due, which the claim's index serves.

        Also where the order is of no interest: without it, the planner may rather read the table.
        """
        t = tables.messages
        return statement.order_by(t.c.scheduled_at, t.c.id)

    def claim_values(self, tables: Tables) -> dict[str, Any]:
        """What a claim writes: the parameters ``new_token`` and ``claim_lease``, seconds."""
        attempts = tables.messages.c.attempts
        lease = bindparam("claim_lease", type_=Float(53))
        return {
            "claim_token": bindparam("new_token"),
            "lease_until": self.shifted(self.clock(), lease),
            "attempts": case((attempts < MAX_ATTEMPTS, attempts + 1), else_=attempts),
        }

    def seconds(self, duration: timedelta) -> ColumnElement[float]:
        """A duration as a parameter of a statement."""
        return bindparam(None, duration.total_seconds(), type_=Float(53))

    def only(self, statement: D, tables: Tables, ids: Sequence[int] | None = None) -> D:
        """Restrict an UPDATE or DELETE to rows by primary key, so that it locks no others.

        Without ``ids``, to those of the parameter ``rows``, which is a value that ``rows`` makes.
        """
        return statement.where(self.is_among(tables, ids))

    def is_among(self, tables: Tables, ids: Sequence[int] | None) -> ColumnElement[bool]:
        """The rows with these primary keys, or those of the parameter ``rows``."""
        return tables.messages.c.id.in_(bindparam("rows", expanding=True) if ids is None else ids)

    def rows(self, ids: Sequence[int]) -> Any:
        """Primary keys as the parameter ``rows``."""
        return ids

    def own_engine_options(self) -> dict[str, Any]:
        """Arguments of ``create_engine`` for engines that the outbox opens itself."""
        return {"pool_pre_ping": True}

    def prepare_own_engine(self, engine: Engine) -> None:
        """Set up an engine that the outbox opened itself."""

    def before_savepoint(self, connection: Connection) -> None:
        """Make right what would make a savepoint permanent before its transaction is."""

    def is_autocommit(self, engine: Engine, connection: Connection | None) -> bool:
        """Whether each statement is permanent at once, on ``connection`` or one of ``engine``."""
        level = None if connection is None else option(connection, "isolation_level")
        if (level or default_isolation_level(engine)) == "AUTOCOMMIT":
            return True
        return connection is not None and self.is_driver_autocommit(
            connection.connection.driver_connection
        )

    def is_driver_autocommit(self, driver: Any) -> bool:
        """Whether the driver's connection was told so without SQLAlchemy's knowledge."""
        # Some drivers have a method of that name.
        return getattr(driver, "autocommit", False) is True

    def is_read_only(self, engine: Engine, connection: Connection | None) -> bool:
        """Whether ``connection``, or one of ``engine``, is for reading only."""
        return False

    def working_engine(self, engine: Engine) -> Engine:
        """``engine`` with the options that the outbox's own transactions need."""
        return engine

    @contextmanager
    def begin(self, engine: Engine) -> Iterator[Connection]:
        """A short transaction of the outbox's own, for writing; on a ``working_engine``."""
        with engine.begin() as connection:
            yield connection

    @contextmanager
    def begin_as_configured(self, engine: Engine) -> Iterator[Connection]:
        """A transaction for writing beside the outbox's table, at the level that ``engine`` chooses."""
        with engine.begin() as connection:
            yield connection

    def can_notify(self, connection: Connection) -> bool:
        """Whether the transaction of ``connection`` can notify relays when it commits."""
        return False

    def notify(self, tables: Tables, constant: str) -> ColumnElement[Any]:
        """``constant``, as an expression that notifies the relays of these tables when committed."""
        return literal_column(constant)

    def can_listen(self, engine: Engine) -> bool:
        """Whether relays can be notified, by ``engine``'s driver."""
        return False

    def listen(self, engine: Engine, tables: Tables, bell: int) -> Subscription:
        """Listen to what ``notify`` says, on a new connection. Raises DatabaseError."""
        raise DatabaseError(
            f"expected a database that can notify relays, found {engine.dialect.name} with the driver "
            f"{engine.driver}. Ask it every --sleep instead."
        )

    def schemas_for_writing(self, connection: Connection, names: Sequence[str]) -> set[str | None]:
        """The schemas in which ``connection`` finds tables and sequences; None where it has but one.

        Empty when it may not write into one of them.
        """
        return {None}

    def lock_for_writing(self, connection: Connection, table: Table) -> None:
        """Take what lock it needs to write after it has read ``table``."""

    def longest_text(self, connection: Connection, column: Column[str]) -> int | None:
        """Bytes that a text column holds; more might be cut. None: no limit to think of."""
        return None

    def lock_schema(self, connection: Connection, table: str) -> AbstractContextManager[None]:
        """Let one process at a time create or change the tables."""
        return nullcontext()

    @abstractmethod
    def is_transient(self, error: DBAPIError) -> bool:
        """Whether ``error`` means: another transaction was in the way, try again."""

    @abstractmethod
    def code(self, error: DBAPIError) -> object:
        """The database's own code for ``error``."""

    def trouble(self, error: DBAPIError) -> Trouble | None:
        """What ``error`` means for an operator; None: no more than its text says."""
        return self.troubles.get(self.code(error))

    def server_name(self, connection: Connection) -> str:
        """What the server calls itself: one of ``oldest_versions``."""
        return next(iter(self.oldest_versions))

    def server_version(self, connection: Connection) -> tuple[int, ...]:
        """The server's version, as SQLAlchemy has asked it at its first connection."""
        found = connection.dialect.server_version_info or ()
        return tuple(part for part in found if isinstance(part, int))

    def check_server(self, connection: Connection) -> None:
        """Refuse a server that cannot run the statements. Raises ConfigurationError."""
        name = self.server_name(connection)
        found, oldest = self.server_version(connection), self.oldest_versions[name]
        if found < oldest:
            raise ConfigurationError(
                f"expected {name} {_dotted(oldest)} or later, found {_dotted(found)}. "
                "Upgrade the server, or configure another database."
            )

    @abstractmethod
    def server_facts(self, connection: Connection) -> ServerFacts:
        """The settings that matter to an outbox."""

    def oldest_transaction(self, connection: Connection) -> OldestTransaction | None:
        """The oldest transaction that is open beside this one; None where nobody can know."""
        return None

    def table_faults(self, connection: Connection, tables: Tables) -> Sequence[str]:
        """What is wrong with the tables beyond their columns and indexes, and what to do."""
        return ()

    def odd_indexes(self, connection: Connection, tables: Tables) -> set[str]:
        """Indexes of the messages that are not what their columns say.

        Such as descending, partial, only of the beginnings of values, switched off or half built.
        """
        return set()

    def replace_index(self, connection: Connection, index: Index) -> None:
        """Build ``index`` anew in place of the one that has its name."""
        index.drop(connection)
        index.create(connection)

    def missing_settings(self, connection: Connection, tables: Tables) -> Sequence[str]:
        """Clauses of ALTER TABLE that would give the message table the settings that it lacks.

        What an operator has set to another value is not missing.
        """
        return ()

    def checkpoint(self, connection: Connection) -> None:
        """Between two steps of a migration: make the first permanent, where DDL does so anyway."""


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def option(subject: Engine | Connection, name: str) -> Any:
    """An execution option, None when it is not set."""
    return subject.get_execution_options().get(name)


def default_isolation_level(engine: Engine) -> str | None:
    """The isolation level that ``create_engine`` was given; None for the database's default."""
    # SQLAlchemy keeps it on the dialect and offers no public way to ask without connecting.
    level: str | None = option(engine, "isolation_level") or getattr(
        engine.dialect, "_on_connect_isolation_level", None
    )
    return level
