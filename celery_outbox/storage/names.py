"""The names of the tables and their indexes, as each database takes them.

Invariant: every name is quoted wherever it is written, fits into what each database allows, and says
which outbox it belongs to, since index names are shared by all tables of a schema (PostgreSQL) or of
a database (SQLite).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from sqlalchemy.sql.elements import quoted_name

from ..config import MAX_TABLE_NAME
from ..errors import ConfigurationError

__all__ = ["Names"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What the tables and indexes of one outbox are called; ``schema`` None is the connection's own."""

    schema: str | None
    messages: str
    state: str
    claim_index: str
    task_id_index: str

    @classmethod
    def of(cls, table: str, backend: str) -> Names:
        """Name everything after ``table``, a valid name, optionally ``schema.name``.

        Raises ConfigurationError for a name that ``backend`` keeps for itself.
        """
        if backend == "postgresql":
            # As PostgreSQL folds each unquoted name, so that anybody's own SQL finds the table.
            table = table.lower()
        schema, _, name = table.rpartition(".")
        if backend == "sqlite" and name.lower().startswith("sqlite_"):
            raise ConfigurationError(
                f"table: expected a name that SQLite does not keep for itself, got {name!r}. "
                "Choose one that does not begin with sqlite_."
            )
        return cls(
            schema=quoted_name(schema, quote=True) if schema else None,
            messages=quoted_name(name, quote=True),
            state=_derived(name, suffix="_state"),
            claim_index=_derived(name, prefix="ix_", suffix="_claim"),
            task_id_index=_derived(name, prefix="ix_", suffix="_task_id"),
        )


def _derived(table: str, *, prefix: str = "", suffix: str) -> str:
    """Put ``table`` between prefix and suffix; where that is too long, part of it becomes a hash."""
    name = f"{prefix}{table}{suffix}"
    if len(name) > MAX_TABLE_NAME:
        digest = hashlib.sha256(table.encode()).hexdigest()[:8]
        room = MAX_TABLE_NAME - len(prefix) - len(suffix) - len(digest) - 1
        name = f"{prefix}{table[:room]}_{digest}{suffix}"
    return quoted_name(name, quote=True)
