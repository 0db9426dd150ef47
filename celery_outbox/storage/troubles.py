"""What an operator can do about an error of a database: one text for each kind of trouble."""

from __future__ import annotations

from enum import Enum, auto

from ..errors import ConfigurationError, DatabaseError, OutboxError, SchemaError
from .names import Names

__all__ = ["STATEMENT_BINLOG", "Trouble", "explained"]


class Trouble(Enum):
    """What an error of a database means for an operator."""

    MISSING_TABLE = auto()
    MISSING_SCHEMA = auto()
    MISSING_COLUMN = auto()
    READ_ONLY = auto()
    NO_RIGHTS = auto()
    STATEMENT_BINLOG = auto()


STATEMENT_BINLOG = (
    "expected binlog_format ROW or MIXED, found STATEMENT, with which InnoDB refuses every write at "
    "READ COMMITTED, the isolation level of claims. Set binlog_format=ROW on the server."
)


def explained(trouble: Trouble | None, where: str, said: str, names: Names) -> OutboxError:
    """Make the error for a trouble that a database reported with the words ``said``."""
    both = f"{names.messages!r} and {names.state!r}"
    match trouble:
        case None:
            return DatabaseError(f"{where}: {said}")
        case Trouble.MISSING_TABLE:
            return SchemaError(
                f"{where}: expected the tables {both}, but one does not exist ({said}). "
                "Run `celery-outbox -A your_app schema install`, or call outbox.install()."
            )
        case Trouble.MISSING_SCHEMA:
            return SchemaError(
                f"{where}: expected the schema of the tables {both} to exist ({said}). "
                "Create it, then run `celery-outbox -A your_app schema install`."
            )
        case Trouble.MISSING_COLUMN:
            return SchemaError(
                f"{where}: expected the columns of this version in the tables {both} ({said}). "
                "`celery-outbox -A your_app schema check` says what differs; `schema migrate` brings "
                "an older table up to date."
            )
        case Trouble.READ_ONLY:
            return DatabaseError(
                f"{where}: expected a database that can be written, found it read-only ({said}). "
                "Point the URL at the primary server, or turn off what makes it read-only for the "
                "outbox's user."
            )
        case Trouble.NO_RIGHTS:
            return DatabaseError(
                f"{where}: a right is missing ({said}). The outbox's user needs SELECT, INSERT, "
                f"UPDATE and DELETE on the tables {both}; to install and to migrate it must own them."
            )
        case Trouble.STATEMENT_BINLOG:
            return ConfigurationError(f"{where}: {STATEMENT_BINLOG}")
