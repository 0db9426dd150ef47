"""The statements that create the tables, as text: for a DBA, without any connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import create_mock_engine, insert
from sqlalchemy.engine import URL

from . import dialects
from .schema import SCHEMA_VERSION, Tables

__all__ = ["create_statements"]

#: A driver for each database; it is not imported.
_DRIVERS = {"postgresql": "psycopg", "mysql": "pymysql", "mariadb": "pymysql", "sqlite": "pysqlite"}


def create_statements(table: str, backend: str) -> Sequence[str]:
    """What ``install`` does in an empty database of the kind ``backend``, statement by statement.

    ``backend`` is ``postgresql``, ``mysql``, ``mariadb`` or ``sqlite``.
    """
    tables, statements = Tables.build(table, backend), []

    def write(element: Any, *args: Any, **kwargs: Any) -> None:
        statements.append(_text(element, engine.dialect))

    engine = create_mock_engine(URL.create(f"{backend}+{_DRIVERS[backend]}"), write)
    for each in tables.created:
        each.create(engine, checkfirst=False)
    version = insert(tables.created[1]).values(
        name="schema", value=str(SCHEMA_VERSION), seen_at=dialects.of(backend).clock()
    )
    return [*statements, _text(version, engine.dialect, compile_kwargs={"literal_binds": True})]


def _text(element: Any, dialect: Any, **options: Any) -> str:
    lines = str(element.compile(dialect=dialect, **options)).strip().splitlines()
    return "\n".join(line.rstrip().replace("\t", "    ") for line in lines)
