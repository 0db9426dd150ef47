"""What differs between databases; ``of`` chooses by an engine's dialect name."""

from __future__ import annotations

from sqlalchemy.engine import Connection

from ...errors import ConfigurationError
from .default import Dialect
from .mysql import MySQL
from .postgresql import PostgreSQL
from .sqlite import SQLite

__all__ = ["Dialect", "before_savepoint", "of"]

_DIALECTS: dict[str, type[Dialect]] = {
    "postgresql": PostgreSQL,
    "mysql": MySQL,
    "mariadb": MySQL,
    "sqlite": SQLite,
}


def of(name: str) -> Dialect:
    """Return the dialect for SQLAlchemy's dialect ``name``.

    Raises ConfigurationError for a database that the outbox does not support.
    """
    try:
        return _DIALECTS[name]()
    except KeyError:
        raise ConfigurationError(
            f"expected an engine for PostgreSQL, MySQL, MariaDB or SQLite, got one for {name!r}."
        ) from None


def before_savepoint(connection: Connection) -> None:
    """Make right what would make a savepoint of ``connection`` permanent too early.

    Of every connection: which of the caller's engines mean a configured database is known only when
    settings are read, and that may be after the savepoint.
    """
    dialect = _DIALECTS.get(connection.dialect.name)
    if dialect is not None:
        dialect().before_savepoint(connection)
