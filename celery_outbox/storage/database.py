"""A named database: which engines mean it, and the outbox's own short transactions on it.

The outbox's own work runs on a synchronous engine: the caller's, one opened from a URL, or one
derived from an AsyncEngine. Connections of the outbox's own carry an execution option by which the
capture knows that they are not the caller's.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from sqlalchemy import create_engine
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.exc import DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as NoConnectionFree
from sqlalchemy.pool import QueuePool, SingletonThreadPool, StaticPool

from ..asynchronous import is_async_engine, synchronous
from ..config import DatabaseSource
from ..errors import ConfigurationError, DatabaseError, OutboxError
from ..transports import is_in_memory
from . import dialects
from .broker import BrokerQueues
from .dialects.default import default_isolation_level
from .dialects.listening import Subscription
from .schema import Tables
from .state import StateStore
from .store import OutboxStore
from .troubles import explained

__all__ = ["Database", "is_own"]

T = TypeVar("T")

_OWN = "celery_outbox_own"
_TRIES = 4
_DEFAULT_PORTS = {"postgresql": 5432, "mysql": 3306}
# Where PostgreSQL begins to quote the statement or the row, below its message.
_QUOTING = re.compile(r"\n(?:LINE \d+|DETAIL|CONTEXT):")

# Engines that the outbox works on; no connection of theirs may cross a fork.
_used: weakref.WeakSet[Engine] = weakref.WeakSet()
# Their locks may be held at a fork, by threads that the child does not have.
_databases: weakref.WeakSet[Database] = weakref.WeakSet()


def is_own(connection: Connection) -> bool:
    """Whether ``connection`` does the outbox's own work rather than the caller's."""
    return bool(connection.get_execution_options().get(_OWN))


class Database:
    """One database that holds an outbox table.

    Args:
        name: what users call it.
        source: an engine, an AsyncEngine or a URL.
        table: the outbox table's name, optionally with its schema.
        notify: whether what is stored wakes the relays, where the database can do so.

    Raises ConfigurationError when it is not a supported database, commits each statement by itself,
    or can only be reached by asyncio.
    """

    def __init__(self, name: str, source: DatabaseSource, table: str, *, notify: bool = True) -> None:
        self.name = name
        self._source = source
        self._notify = notify
        self._callers = engine = _caller_engine(source)
        self.url: URL = source if engine is None else engine.url
        self.dialect = dialects.of(self.url.get_backend_name())
        if engine is not None:
            self._refuse_autocommit(engine)
        self.tables = Tables.build(table, self.url.get_backend_name())
        self.store = OutboxStore(self.tables, self.dialect, notify=notify)
        self.state = StateStore(self.tables, self.dialect)
        #: What of Kombu's database transport is in the same database.
        self.queues = BrokerQueues()
        self._urls: dict[int, tuple[URL, bool]] = {}
        self._is_server_checked = False
        self._first_use = threading.RLock()
        _databases.add(self)
        self._identity = _identity(self.url)
        self._identities: weakref.WeakKeyDictionary[Engine, object] = weakref.WeakKeyDictionary()
        self._own = source if isinstance(source, Engine) else self._open()
        if self._identity is not None:
            _used.update(each for each in (engine, self._own) if each is not None)

    def __repr__(self) -> str:
        return f"<Database {self.name!r}: {self.url.render_as_string(hide_password=True)}>"

    @property
    def identity(self) -> object:
        """What two names of one table have in common: compare with ``==``."""
        return (self._identity or id(self._own.pool), self.tables.messages.fullname)

    def matches(self, engine: Engine) -> bool:
        """Whether ``engine`` is this database: the same pool, or a URL of the same database."""
        callers = self._callers
        if engine.pool is self._own.pool or (callers is not None and engine.pool is callers.pool):
            return True
        return self._identity is not None and self._identity == self._identity_of(engine)

    def is_at(self, url: URL | None) -> bool:
        """Whether ``url`` is that of this database, whatever its driver and user."""
        if url is None or self._identity is None:
            return False
        # By the object: to compare URLs takes longer than to build a message.
        if id(url) not in self._urls:
            self._urls[id(url)] = (url, self._identity == _identity(url))
        return self._urls[id(url)][1]

    def _identity_of(self, engine: Engine) -> object:
        if engine not in self._identities:
            self._identities[engine] = _identity(engine.url)
        return self._identities[engine]

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """A short transaction of the outbox's own, committed at the end.

        Raises SchemaError when the table is missing, DatabaseError for every other failure of the
        database.
        """
        try:
            with self._one_by_one, self.dialect.begin(self._working) as connection:
                self._check_server(connection)
                yield connection
        except (DBAPIError, NoConnectionFree) as error:
            raise self.explain(error) from error

    def run(self, work: Callable[[Connection], T]) -> T:
        """Do ``work`` in a transaction of its own, again when another was in the way.

        Raises like ``begin``, after a few tries.
        """
        for left in reversed(range(_TRIES)):
            try:
                with self._one_by_one, self.dialect.begin(self._working) as connection:
                    self._check_server(connection)
                    return work(connection)
            except DBAPIError as error:
                if not left or not self.dialect.is_transient(error):
                    raise self.explain(error) from error
                time.sleep(random.uniform(0.01, 0.1))
            except NoConnectionFree as error:
                raise self.explain(error) from error
        raise AssertionError("unreachable")

    def read(self, work: Callable[[Connection], T], *, any_server: bool = False) -> T:
        """Do ``work`` without writing: it takes no lock that a writer would wait for.

        Raises like ``begin``; with ``any_server``, servers that cannot do the work are read, too.
        """
        try:
            with self._one_by_one, self._working.connect() as connection:
                if not any_server:
                    self._check_server(connection)
                return work(connection)
        except (DBAPIError, NoConnectionFree) as error:
            raise self.explain(error) from error

    @property
    def can_listen(self) -> bool:
        """Whether a relay can be notified of what is stored here."""
        return self._notify and self.dialect.can_listen(self._own)

    def listen(self, bell: int) -> Subscription:
        """Be notified of what is stored, on a new connection outside the pool.

        A file descriptor ``bell`` that can be read ends every wait. Raises DatabaseError.
        """
        with self._one_by_one:
            return self.dialect.listen(self._own, self.tables, bell)

    def explain(self, error: DBAPIError | NoConnectionFree) -> OutboxError:
        """Say what a database error means for the outbox, without its parameters."""
        where = f"database {self.name!r}"
        if isinstance(error, NoConnectionFree):
            return DatabaseError(f"{where}: no connection was free: {error}")
        text = _QUOTING.split(str(error.orig))[0]
        said = f"{type(error).__name__}: {' '.join(text.split())}"
        if self.dialect.is_transient(error):
            return DatabaseError(
                f"{where}: others were in the way for too long ({said}). Try again; `celery-outbox -A "
                "your_app schema check` shows how long the oldest transaction has been open."
            )
        return explained(self.dialect.trouble(error), where, said, self.tables.names)

    @property
    def pool_limit(self) -> int | None:
        """Connections that the pool of the outbox's own engine holds at most; None: no limit."""
        pool = self._own.pool
        if isinstance(pool, StaticPool | SingletonThreadPool):
            return 1
        if not isinstance(pool, QueuePool):
            return None
        overflow: int = pool._max_overflow  # there is no public way to ask
        return None if overflow < 0 or not pool.size() else pool.size() + overflow

    @property
    def is_for_one_thread(self) -> bool:
        """Whether threads cannot have connections of their own, as with most databases in memory."""
        return isinstance(self._own.pool, StaticPool | SingletonThreadPool)

    def _check_server(self, connection: Connection) -> None:
        # Once; not before it was found right, so that a server may be set right under a relay.
        if not self._is_server_checked:
            try:
                self.dialect.check_server(connection)
            except ConfigurationError as error:
                raise ConfigurationError(f"database {self.name!r}: {error}") from None
            self._is_server_checked = True

    @property
    def _one_by_one(self) -> AbstractContextManager[object]:
        """Lets one thread at a time use the engine, until it has been used once.

        SQLAlchemy learns what server it is from the first connection; another pool for the same
        engine, such as that of a listener, does not wait for it.
        """
        return nullcontext() if self._is_server_checked else self._first_use

    @cached_property
    def _working(self) -> Engine:
        # A schema_translate_map of the caller's engine does not move the outbox's table.
        marked = self._own.execution_options(**{_OWN: True, "schema_translate_map": {}})
        return self.dialect.working_engine(marked)

    def _refuse_autocommit(self, engine: Engine) -> None:
        if default_isolation_level(engine) == "AUTOCOMMIT":
            raise ConfigurationError(
                f"database {self.name!r}: expected an engine whose transactions can be rolled back, "
                "found isolation_level='AUTOCOMMIT'. Configure the plain engine, and use "
                "engine.execution_options(isolation_level='AUTOCOMMIT') where you need that level."
            )

    def _open(self) -> Engine:
        url = self._synchronous_url()
        if self._identity is None:
            raise ConfigurationError(
                f"database {self.name!r}: expected a database that a second connection can reach, "
                "found SQLite in memory, or a URL that does not say where the database is. Use a "
                "file or a complete URL, or hand over a synchronous engine."
            )
        try:
            engine = create_engine(url, **self.dialect.own_engine_options())
        except (NoSuchModuleError, ModuleNotFoundError) as error:
            raise ConfigurationError(
                f"database {self.name!r}: expected the driver {url.drivername!r} to be installed: "
                f"{error}."
            ) from error
        self.dialect.prepare_own_engine(engine)
        weakref.finalize(self, engine.dispose)
        return engine

    def _synchronous_url(self) -> URL:
        driver = self.url.get_driver_name()
        if not is_async_engine(self._source) and driver not in self.dialect.sync_drivers:
            return self.url
        substitute = self.dialect.sync_drivers.get(driver)
        # "pysqlite" is the name of SQLAlchemy's dialect for the standard library's sqlite3.
        module = "sqlite3" if substitute == "pysqlite" else substitute
        if module is None or importlib.util.find_spec(module) is None:
            raise ConfigurationError(
                f"database {self.name!r}: expected a synchronous driver for the outbox's own work, "
                f"found only {driver!r}. Install {module or 'one'}, or give a URL with a synchronous "
                "driver instead of the AsyncEngine."
            )
        return self.url.set(drivername=f"{self.url.get_backend_name()}+{substitute}")


def _caller_engine(source: DatabaseSource) -> Engine | None:
    source = synchronous(source)
    return source if isinstance(source, Engine) else None


def _identity(url: URL) -> tuple[str, str | None, int | None, str | None] | None:
    """What makes two URLs the same database, whatever their drivers and users; None: nothing does."""
    backend = url.get_backend_name()
    if is_in_memory(url):
        return None
    if backend == "sqlite":
        path = str(url.database).removeprefix("file:")
        return (backend, None, None, str(Path(path).resolve()))
    backend = "mysql" if backend == "mariadb" else backend
    host = url.host or url.query.get("host")
    if host is None and url.database is None:
        return None  # made by a creator function: nothing to compare
    return (backend, str(host), url.port or _DEFAULT_PORTS.get(backend), url.database)


def _after_fork_in_child() -> None:
    # As SQLAlchemy's documentation asks of every program that forks: outbox.install() alone leaves a
    # connection in the pool. A database in memory is left alone (it would be gone).
    for engine in list(_used):
        engine.dispose(close=False)
    for database in list(_databases):
        database._first_use = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)
