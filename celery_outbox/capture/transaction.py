"""Which transaction is the caller in, and how messages get into it.

The rule: what ``outbox.using`` says; else the one open transaction, on a configured database, that
this thread or asyncio task (or request) began. Where that is not certain, the dispatch is refused:
nothing is ever stored beside the transaction that it was meant for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from sqlalchemy import insert
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import InvalidRequestError, SQLAlchemyError
from sqlalchemy.orm import Session, scoped_session

from ..asynchronous import synchronous
from ..errors import OptionError, TransactionError
from ..storage.database import Database
from ..transports import is_broker_engine
from .owner import Mark, here, is_served_by_loop
from .place import OpenPlace, OwnPlace, Place
from .records import ConnectionRecord, Record, SessionRecord, bound_connection
from .register import register

__all__ = ["Transactions"]


_USING = "Write `with outbox.using(session): ...` around the dispatch"

# What ``using`` was given, for this thread or asyncio task and what it starts.
_using: ContextVar[Session | Connection | None] = ContextVar("celery_outbox_using", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What a search found, and what it depended on."""

    by: Transactions
    change: int
    mark: Mark
    name: str | None
    place: OpenPlace


class Transactions:
    """Finds the caller's transaction among the databases of one Outbox."""

    def __init__(self, databases: Mapping[str, Database], *, require: bool) -> None:
        self._databases = databases
        self._require = require
        self._insert = insert(next(iter(databases.values())).tables.messages)

    @contextmanager
    def using(self, subject: object) -> Iterator[None]:
        """Choose the transaction of every dispatch inside.

        ``subject`` is a Session, AsyncSession, scoped_session, Connection or AsyncConnection.
        Raises TransactionError when it is none of them, or works on no configured database.
        """
        # No token: it would keep the context of a threadpool call alive, and a generator dependency
        # of FastAPI's ends in another context than it began.
        outer = _using.get()
        _using.set(_plain(subject))
        try:
            yield
        finally:
            _using.set(outer)

    def find(self, name: str | None) -> Place:
        """Find the place of a dispatch made here, on database ``name`` where one is named.

        Raises TransactionError when it is missing, ambiguous or unusable, OptionError when no
        database has that name.
        """
        if name is not None and name not in self._databases:
            raise OptionError(
                f"outbox_database: expected one of {_names(self._databases)}, got {name!r}."
            )
        chosen = _using.get()
        if chosen is not None:
            place = self._explicit(chosen, name)
        else:
            me = here()
            found = self._found_before(me, name)
            if found is None:
                found = self._choose(*self._visible(me), name)
                if found is None:
                    return self._nothing_open(me, name)
                self._note(me, name, found)
            place = found
        place.check()
        return place

    def _found_before(self, me: Mark, name: str | None) -> OpenPlace | None:
        """What the last search from here found, if nothing can have changed since."""
        for note in register.found_by(me):
            if (
                note.by is self
                and note.change == register.change
                and note.mark is me
                and note.name == name
                and note.place.record.is_open
            ):
                place: OpenPlace = note.place
                return place
        return None

    def _note(self, me: Mark, name: str | None, place: OpenPlace) -> None:
        # In a request, a thread that comes to rest shows its transactions, without an event to tell.
        if me.request is None:
            place.record.found = _Found(
                by=self, change=register.change, mark=me, name=name, place=place
            )

    def _nothing_open(self, me: Mark, name: str | None) -> OwnPlace:
        self._refuse_foreign(me)
        if self._require:
            raise TransactionError(
                "expected an open transaction on a configured database "
                f"({_names(self._databases)}), because outbox_require_transaction is on, found none "
                f"begun here. Begin one before the dispatch. {_USING} if it was begun elsewhere."
            )
        return self.alone(name)

    def alone(self, name: str | None) -> OwnPlace:
        """A place in a short transaction of our own."""
        if name is not None and name not in self._databases:
            raise OptionError(
                f"outbox_database: expected one of {_names(self._databases)}, got {name!r}."
            )
        return OwnPlace(database=self._databases[name or next(iter(self._databases))])

    def _explicit(self, subject: Session | Connection, name: str | None) -> OpenPlace:
        record = _begun(subject)
        places = list(self._places(record))
        fitting = [each for each in places if name in {None, each.database.name}]
        if len(fitting) == 1:
            return fitting[0]
        found = ", ".join(repr(each.database.name) for each in places) or "a database not configured"
        wanted = repr(name) if name is not None else f"one of {_names(self._databases)}"
        raise TransactionError(
            f"outbox.using: expected a transaction on {wanted}, found one on {found}. "
            "Give the session of that database, or name it with outbox_database=."
        )

    def _visible(self, me: Mark) -> tuple[list[OpenPlace], list[Record]]:
        """The caller's open transactions: on configured databases, and on others."""
        own = [each for each in register.begun_by(me) if each.mark.is_same_call(me)]
        records = _external(own + self._of_request(me))
        places: list[OpenPlace] = []
        strangers: list[Record] = []
        for record in records:
            found = list(self._places(record))
            places += found
            if not found:
                strangers.append(record)
        return places, strangers

    def _of_request(self, me: Mark) -> list[Record]:
        """What other threads of this request began and left open for it."""
        if me.request is None:
            return []

        def belongs(record: Record) -> bool:
            return record.mark.request is me.request and not record.mark.is_same_call(me)

        if me.is_task:
            ancestors: list[Record] = []
        else:
            # The thread works for the task that called it, and sees what that task began.
            ancestors = [each for each in register.inherited() if each.mark.is_task]
        return [
            record
            for record in register.everywhere()
            if belongs(record) and (record in ancestors or record.mark.has_ended)
        ]

    def _choose(
        self, places: Sequence[OpenPlace], strangers: Sequence[Record], name: str | None
    ) -> OpenPlace | None:
        fitting = [each for each in places if name in {None, each.database.name}]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise TransactionError(
                "expected one open transaction, found several: "
                f"{', '.join(_describe_place(each) for each in fitting)}. Name the database with "
                f"outbox_database= if they differ in it. {_USING} otherwise."
            )
        if places:
            raise TransactionError(
                f"expected an open transaction on database {name!r}, found one only on "
                f"{', '.join(repr(each.database.name) for each in places)}. Begin one on {name!r}, "
                "or leave outbox_database= away."
            )
        if strangers:
            raise TransactionError(
                "expected an open transaction on a configured database "
                f"({_names(self._databases)}), found one only on "
                f"{', '.join(_describe(each) for each in strangers)}. Add that database to "
                "outbox_databases, or end its transaction before the dispatch."
            )
        return None

    def _refuse_foreign(self, me: Mark) -> None:
        """Refuse where a transaction is open that may be meant, but is not certainly the caller's."""
        foreign = [
            record
            for record in register.unknown() + register.inherited() + self._left_behind(me)
            if not _is_internal(record) and list(self._places(record))
        ]
        if foreign:
            raise TransactionError(
                "expected a transaction begun by this thread or asyncio task, found one that another "
                f"began and that is still open: {_describe(foreign[0])}. {_USING} if it is meant. In "
                "FastAPI or Starlette, app.add_middleware(OutboxMiddleware) makes the transactions of "
                "a request's dependencies visible to its endpoint."
            )

    def _left_behind(self, me: Mark) -> list[Record]:
        """Open transactions whose beginner has moved on, or that run beside the caller."""
        if me.request is not None:
            return [each for each in register.everywhere() if each.mark.request is me.request]
        if not is_served_by_loop():
            return [each for each in register.begun_by(me) if not each.mark.is_same_call(me)]

        return [each for each in register.everywhere() if each.mark.has_ended]

    def _places(self, record: Record) -> Iterator[OpenPlace]:
        """The configured databases on which ``record`` is a transaction."""
        seen: set[str] = set()
        for engine in self._engines(record):
            for database in self._databases.values():
                if database.name not in seen and database.matches(engine):
                    seen.add(database.name)
                    yield OpenPlace(database=database, engine=engine, record=record)

    def _engines(self, record: Record) -> list[Engine]:
        if isinstance(record, ConnectionRecord):
            connection = record.connection
            return [] if connection is None else [connection.engine]
        assert isinstance(record, SessionRecord)  # noqa: S101 - there are two kinds of records
        session = record.session
        if session is None:
            return []
        engines = [each.connection.engine for each in record.connections if each.connection is not None]
        if (default := self._default_engine(session)) is not None:
            engines.append(default)
        if not any(each.matches(it) for each in self._databases.values() for it in engines):
            # Session(binds={...}) without a default; SQLAlchemy 2.0 offers no public way to list them.
            binds = getattr(session, "binds", None) or getattr(session, "_Session__binds", {})
            engines += [bind.engine for bind in binds.values()]
        return engines

    def _default_engine(self, session: Session) -> Engine | None:
        """Where the Session would send an INSERT into the outbox table."""
        try:
            engine: Engine = session.get_bind(clause=self._insert).engine
        except (SQLAlchemyError, RuntimeError):
            # Unbound, or bound by something (an application context) that is not there.
            return None
        return engine


def _plain(subject: object) -> Session | Connection:
    """The synchronous Session or Connection behind what users hand over."""
    # Werkzeug's proxies, which claim to be what they stand for.
    current: Callable[[], Any] | None = getattr(subject, "_get_current_object", None)
    if current is not None:
        return _plain(current())
    plain = synchronous(subject() if isinstance(subject, scoped_session) else subject)
    if isinstance(plain, Session | Connection):
        return plain
    if plain is None and subject is not None:
        raise TransactionError(
            "outbox.using: expected an AsyncConnection that is connected, found one that is not. "
            "Use it inside `async with engine.begin() as connection:`."
        )
    raise TransactionError(
        "outbox.using: expected a Session, AsyncSession, scoped_session, Connection or "
        f"AsyncConnection, got {type(subject).__name__}."
    )


def _begun(subject: Session | Connection) -> Record:
    """The record of the transaction that ``subject`` is in, begun now if it is in none."""
    record = register.record_of(subject)
    if record is not None and record.is_open:
        return record
    if isinstance(subject, Connection) and subject.dialect.is_async:
        raise TransactionError(
            "outbox.using: expected an AsyncConnection in a transaction, found one that is in none. "
            "Write `await connection.begin()` first."
        )
    try:
        subject.begin()
    except InvalidRequestError as error:
        raise TransactionError(
            "outbox.using: expected a Session or Connection that can begin a transaction, found "
            f"one that cannot: {error}"
        ) from error
    record = register.record_of(subject)
    if record is None:
        raise TransactionError(
            "outbox.using: expected a Session or Connection of the application's, found one that "
            "the outbox opened for itself."
        )
    return record


def _is_internal(record: Record) -> bool:
    """Whether it belongs to Kombu's database transport, which keeps Sessions open in any thread."""
    if isinstance(record, ConnectionRecord):
        connection = record.connection
        return connection is not None and is_broker_engine(connection.engine)
    bind = record.session.bind if isinstance(record, SessionRecord) and record.session else None
    return bind is not None and is_broker_engine(bind.engine)


def _external(records: Iterable[Record]) -> list[Record]:
    """The application's own among ``records``, each transaction once.

    A Session stands for the Connections that it works on, also where another thread began it: who
    lets it begin a Connection uses it.
    """
    found: dict[int, Record] = {}
    for record in records:
        sessions: Sequence[Record] = (
            record.open_sessions if isinstance(record, ConnectionRecord) else ()
        )
        for each in sessions or (record,):
            if not _is_internal(each):
                found[id(each)] = each
    bound = [
        bound_connection(each.session)
        for each in found.values()
        if isinstance(each, SessionRecord) and each.session is not None
    ]
    return [
        each
        for each in found.values()
        if not (isinstance(each, ConnectionRecord) and any(each.connection is it for it in bound))
    ]


def _names(databases: Mapping[str, Database]) -> str:
    return ", ".join(repr(name) for name in databases)


def _describe_place(place: OpenPlace) -> str:
    return f"{_describe(place.record)} ({place.database.name!r})"


def _describe(record: Record | None) -> str:
    if isinstance(record, ConnectionRecord):
        connection = record.connection
        return (
            f"a Connection to {connection.engine.url!r}" if connection is not None else "a Connection"
        )
    session = record.session if isinstance(record, SessionRecord) else None
    bind = None if session is None else session.bind
    return f"a {type(session).__name__} on {bind.engine.url!r}" if bind is not None else "a Session"


# In the child what the parent was using is the parent's.
os.register_at_fork(after_in_child=lambda: _using.set(None))
