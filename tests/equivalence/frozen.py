"""Engines of databases whose clock stands still, by what each database itself offers for that."""

import sqlite3
from datetime import UTC, datetime
from typing import Any

# Drivers that are imported while the clock stands still would keep freezegun's types for ever.
import psycopg  # noqa: F401
import pymysql  # noqa: F401
import sqlalchemy as sa


def frozen_engine(url: str, now: datetime) -> sa.Engine:
    """Make an engine for whose connections it is always ``now``."""
    freeze = {"sqlite": _sqlite, "postgresql": _postgresql, "mysql": _mariadb}
    return freeze[sa.make_url(url).get_backend_name()](sa.make_url(url), now)


def _sqlite(url: sa.URL, now: datetime) -> sa.Engine:
    """A function of the application's hides the built-in one of its name."""
    text = f"{now.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f}"
    # In any thread: a relay may work beside the test.
    original = sqlite3.connect(":memory:", check_same_thread=False)

    def strftime(*arguments: Any) -> Any:
        given = [text if each == "now" else each for each in arguments]
        marks = ", ".join("?" * len(given))
        return original.execute(f"SELECT strftime({marks})", given).fetchone()[0]

    def connected(driver: Any, _: object) -> None:
        driver.create_function("strftime", -1, strftime)
        driver.execute("PRAGMA synchronous = OFF")

    engine = sa.create_engine(url)
    sa.event.listen(engine, "connect", connected)
    return engine


def _postgresql(url: sa.URL, now: datetime) -> sa.Engine:
    """Functions of a schema that is named before the one of the built-in functions."""
    maker = sa.create_engine(url, poolclass=sa.NullPool)
    with maker.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA frozen")
        for name in ("statement_timestamp", "clock_timestamp"):
            connection.exec_driver_sql(
                f"CREATE FUNCTION frozen.{name}() RETURNS timestamptz LANGUAGE sql STABLE"
                f" AS $$ SELECT timestamptz '{now.isoformat()}' $$"
            )
    return sa.create_engine(
        url.update_query_dict({"options": "-csearch_path=public,frozen,pg_catalog"})
    )


def _mariadb(url: sa.URL, now: datetime) -> sa.Engine:
    """The session variable that replication sets to what the time was on the other server."""
    engine = sa.create_engine(url)

    def connected(driver: Any, _: object) -> None:
        with driver.cursor() as cursor:
            cursor.execute("SET timestamp = %s", (now.timestamp(),))

    sa.event.listen(engine, "connect", connected)
    return engine
