"""The statements that create the tables, as text: for a DBA, without any connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import create_mock_engine, insert
from sqlalchemy.engine import URL
from sqlalchemy.schema import CreateIndex

from . import dialects
from .schema import SCHEMA_VERSION, Tables

__all__ = ["create_statements"]

#: A driver for each database; it is not imported.
_DRIVERS = {"postgresql": "psycopg", "mysql": "pymysql", "mariadb": "pymysql", "sqlite": "pysqlite"}


def create_statements(table: str, backend: str) -> Sequence[str]:
    """What ``install`` does in an empty database of the kind ``backend``, statement by statement.

    ``backend`` is ``postgresql``, ``mysql``, ``mariadb`` or ``sqlite``.
    """
    tables = Tables.build(table, backend)
    elements: list[Any] = []
    engine = create_mock_engine(
        URL.create(f"{backend}+{_DRIVERS[backend]}"), lambda element, *_, **__: elements.append(element)
    )
    for each in tables.created:
        each.create(engine, checkfirst=False)
    # SQLAlchemy keeps the indexes of a table in a set.
    elements.sort(key=_index_name)
    version = insert(tables.created[1]).values(
        name="schema", value=str(SCHEMA_VERSION), seen_at=dialects.of(backend).clock()
    )
    return [
        *(_text(element, engine.dialect) for element in elements),
        _text(version, engine.dialect, compile_kwargs={"literal_binds": True}),
    ]


def _index_name(element: Any) -> str:
    return str(element.element.name) if isinstance(element, CreateIndex) else ""


def _text(element: Any, dialect: Any, **options: Any) -> str:
    lines = str(element.compile(dialect=dialect, **options)).strip().splitlines()
    return "\n".join(line.rstrip().replace("\t", "    ") for line in lines)
