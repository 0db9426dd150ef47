"""A table of version 0, made by hand, and the way from it to version 1.

It has no queue and no kept rows; its names are in a column that is to go; its index serves another
order.
"""

from collections.abc import Sequence

import sqlalchemy as sa

from celery_outbox.storage.database import Database
from celery_outbox.storage.migrate import Migration, Progress, Step, rewrite

COMMON = """
  broker VARCHAR(191) NOT NULL, task_id VARCHAR(255) NOT NULL, task_name VARCHAR(255) NOT NULL,
  routing VARCHAR(255), message {long_text} NOT NULL, body {bytes} NOT NULL,
  scheduled_at {time} NOT NULL, deliver_at {time}, expires_at {time}, attempts BIGINT NOT NULL,
  max_attempts BIGINT, base_delay BIGINT, max_delay BIGINT, claim_token VARCHAR(32),
  lease_until {time}, error {long_text}, created_at {time} NOT NULL
"""
STATE = "name VARCHAR(191) NOT NULL PRIMARY KEY, value TEXT NOT NULL, seen_at {time} NOT NULL"
WORDS = {
    "sqlite": {
        "id": "id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT",
        "time": "DATETIME",
        "long_text": "TEXT",
        "bytes": "BLOB",
        "options": "",
        "now": "strftime('%Y-%m-%d %H:%M:%f000', 'now')",
    },
    "postgresql": {
        "id": "id BIGSERIAL PRIMARY KEY",
        "time": "TIMESTAMP WITH TIME ZONE",
        "long_text": "TEXT",
        "bytes": "BYTEA",
        "options": "",
        "now": "now()",
    },
    "mysql": {
        "id": "id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY",
        "time": "DATETIME(6)",
        "long_text": "LONGTEXT",
        "bytes": "LONGBLOB",
        "options": "ENGINE=InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin",
        "now": "utc_timestamp(6)",
    },
}


def make_old_table(engine: sa.Engine, rows: int) -> None:
    """Make the table of version 0 with messages ``old 1``, ``old 2`` and so on, all of them due."""
    words = WORDS[engine.dialect.name]
    statements = [
        f"CREATE TABLE celery_outbox ({words['id']}, {COMMON}) {words['options']}",
        f"CREATE TABLE celery_outbox_state ({STATE}) {words['options']}",
        "CREATE INDEX ix_celery_outbox_claim ON celery_outbox (scheduled_at)",
        "INSERT INTO celery_outbox_state (name, value, seen_at) VALUES ('schema', '0', {now})",
    ]
    insert = (
        "INSERT INTO celery_outbox (broker, task_id, task_name, routing, message, body, "
        "scheduled_at, attempts, created_at) VALUES "
        "('shop', :id, 'shop.add', 'letters', '', :body, {now}, 0, {now})"
    )
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement.format(**words))
        if rows:
            messages = [{"id": f"old {number}", "body": b"[]"} for number in range(1, rows + 1)]
            connection.execute(sa.text(insert.replace("{now}", words["now"])), messages)


def has_column(connection: sa.Connection, name: str) -> bool:
    columns = sa.inspect(connection).get_columns("celery_outbox")
    return name in {column["name"] for column in columns}


def add_columns(database: Database, connection: sa.Connection, progress: Progress) -> None:
    words = WORDS[connection.dialect.name]
    if not has_column(connection, "queue"):
        connection.exec_driver_sql(
            "ALTER TABLE celery_outbox ADD COLUMN queue VARCHAR(255) NOT NULL DEFAULT ''"
        )
    if not has_column(connection, "finished_at"):
        connection.exec_driver_sql(f"ALTER TABLE celery_outbox ADD COLUMN finished_at {words['time']}")


def copy_queue(database: Database, connection: sa.Connection, progress: Progress) -> None:
    t = database.tables.messages
    rewrite(
        database,
        connection,
        progress,
        step="copy the queue",
        table=t,
        values={"queue": sa.literal_column("routing")},
        where=t.c.queue == "",
        batch=10,
    )


def drop_column(database: Database, connection: sa.Connection, progress: Progress) -> None:
    if has_column(connection, "routing"):
        connection.exec_driver_sql("ALTER TABLE celery_outbox DROP COLUMN routing")


ADD = Step(name="add columns", run=add_columns)
COPY = Step(name="copy the queue", run=copy_queue)
DROP = Step(name="drop a column", run=drop_column)
STEPS: Sequence[Step] = (ADD, COPY, DROP)
MIGRATIONS: Sequence[Migration] = (Migration(source=0, steps=STEPS),)
