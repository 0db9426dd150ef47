"""What stands in the database's catalogue about the tables, to compare before and after."""

from typing import Any

import sqlalchemy as sa


def described(
    engine: sa.Engine, table: str = "celery_outbox", schema: str | None = None
) -> dict[str, Any]:
    """Describe both tables: columns, keys, indexes, and what the database keeps beside them."""
    inspector: Any = sa.inspect(engine)
    found: dict[str, Any] = {}
    for name in (table, f"{table}_state"):
        found[name] = {
            "columns": [
                (each["name"], str(each["type"]), each["nullable"], each.get("default"))
                for each in inspector.get_columns(name, schema)
            ],
            "key": inspector.get_pk_constraint(name, schema)["constrained_columns"],
            "indexes": sorted(
                (each["name"], each["column_names"], bool(each["unique"]))
                for each in inspector.get_indexes(name, schema)
            ),
            "beside": _beside(engine, name, schema),
        }
    return found


def _beside(engine: sa.Engine, table: str, schema: str | None) -> object:
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            query = (
                "SELECT c.reloptions, array_agg(a.attstorage ORDER BY a.attnum) FROM pg_class c "
                "JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 "
                "WHERE c.oid = to_regclass(coalesce(:schema || '.', '') || quote_ident(:table)) "
                "GROUP BY c.oid"
            )
        elif engine.dialect.name == "sqlite":
            query = f"SELECT sql FROM {schema or 'main'}.sqlite_master WHERE name = :table"
            row = connection.execute(sa.text(query), {"table": table}).one()
            return "AUTOINCREMENT" in row.sql
        else:
            query = (
                "SELECT engine, table_collation FROM information_schema.tables "
                "WHERE table_schema = coalesce(:schema, database()) AND table_name = :table"
            )
        names = {"table": table, "schema": schema}
        return [tuple(row) for row in connection.execute(sa.text(query), names)]
