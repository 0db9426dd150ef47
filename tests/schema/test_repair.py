"""What an install repairs, what it leaves alone, and what it refuses to touch."""

from typing import Any

import pytest
import sqlalchemy as sa

from celery_outbox.errors import SchemaError
from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
from celery_outbox.storage.state import MigrationMark
from tests.schema.described import described
from tests.storage.rows import add, claim, ids, make_message, rows

CLAIM = "ix_celery_outbox_claim"

#: Indexes under the name of the claim's that are not the claim's.
WRONG = {
    "other columns": "CREATE INDEX {0} ON celery_outbox (broker, scheduled_at)",
    "another order of columns": "CREATE INDEX {0} ON celery_outbox (scheduled_at, broker, id)",
    "unique": "CREATE UNIQUE INDEX {0} ON celery_outbox (broker, scheduled_at, id)",
}
#: What MariaDB 10.6 cannot make.
WRONG_ELSEWHERE = {
    "descending": "CREATE INDEX {0} ON celery_outbox (broker, scheduled_at DESC, id)",
    "partial": "CREATE INDEX {0} ON celery_outbox (broker, scheduled_at, id) WHERE attempts = 0",
    "of expressions": "CREATE INDEX {0} ON celery_outbox (lower(broker))",
}


def execute(engine: sa.Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(sa.text(statement))


def drop_index(engine: sa.Engine, name: str) -> None:
    on = " ON celery_outbox" if engine.dialect.name == "mysql" else ""
    execute(engine, f"DROP INDEX {name}{on}")


@pytest.fixture
def database(engine: sa.Engine) -> Database:
    """A database with the table installed, and one message in it."""
    database = Database("default", engine, "celery_outbox")
    install(database)
    add(database, make_message())
    return database


@pytest.mark.parametrize("name", [CLAIM, "ix_celery_outbox_task_id"])
def test_a_missing_index_comes_back(name: str, database: Database, engine: sa.Engine) -> None:
    before = described(engine)
    drop_index(engine, name)
    assert install(database) == [f"created the index {name}"]
    assert described(engine) == before


def test_an_index_that_differs_is_rebuilt(database: Database, engine: sa.Engine) -> None:
    before = described(engine)
    # What MariaDB 10.6 cannot make is tried on the others.
    others = {} if engine.dialect.name == "mysql" else WRONG_ELSEWHERE
    for wrong in {**WRONG, **others}.values():
        drop_index(engine, CLAIM)
        execute(engine, wrong.format(CLAIM))
        assert install(database) == [f"rebuilt the index {CLAIM}"], wrong
        assert described(engine) == before, wrong
        assert install(database) == [], wrong
    assert ids(claim(database)) == ["id-1"]


@pytest.mark.parametrize(
    "wrong",
    [
        f"CREATE INDEX {CLAIM} ON celery_outbox (broker(10), scheduled_at, id)",
        f"CREATE FULLTEXT INDEX {CLAIM} ON celery_outbox (broker)",
        f"CREATE INDEX {CLAIM} ON celery_outbox (broker, scheduled_at, id) IGNORED",
    ],
    ids=["of beginnings", "full text", "ignored"],
)
def test_what_mariadb_alone_can_make_of_an_index_is_rebuilt(wrong: str, mariadb_url: str) -> None:
    engine = sa.create_engine(mariadb_url)
    database = Database("default", engine, "celery_outbox")
    install(database)
    drop_index(engine, CLAIM)
    execute(engine, wrong)
    assert install(database) == [f"rebuilt the index {CLAIM}"]
    assert install(database) == []
    engine.dispose()


def test_an_index_that_postgresql_could_not_finish_is_rebuilt(postgresql_url: str) -> None:
    engine = sa.create_engine(postgresql_url)
    database = Database("default", engine, "celery_outbox")
    install(database)
    add(database, make_message("one"), make_message("two"))
    drop_index(engine, "ix_celery_outbox_task_id")
    statement = "CREATE UNIQUE INDEX CONCURRENTLY ix_celery_outbox_task_id ON celery_outbox (queue)"
    with pytest.raises(sa.exc.IntegrityError):
        execute(engine.execution_options(isolation_level="AUTOCOMMIT"), statement)
    assert install(database) == ["rebuilt the index ix_celery_outbox_task_id"]
    assert install(database) == []
    engine.dispose()


def test_columns_and_indexes_of_the_users_own_are_left_alone(
    database: Database, engine: sa.Engine
) -> None:
    execute(
        engine,
        "ALTER TABLE celery_outbox ADD COLUMN tenant VARCHAR(20)",
        "ALTER TABLE celery_outbox ADD COLUMN shard INTEGER NOT NULL DEFAULT 7",
        "CREATE INDEX ix_tenant ON celery_outbox (tenant, broker)",
    )
    before = described(engine)
    assert install(database) == []
    add(database, make_message("id-2"))
    assert described(engine) == before
    assert [row.task_id for row in rows(database)] == ["id-1", "id-2"]


def test_an_own_column_that_nobody_would_fill_is_refused(engine: sa.Engine) -> None:
    database = Database("default", engine, "celery_outbox")
    install(database)
    if engine.dialect.name == "sqlite":
        recreate_sqlite(engine, "created_at DATETIME NOT NULL", "{0}, tenant VARCHAR(20) NOT NULL")
    else:
        execute(engine, "ALTER TABLE celery_outbox ADD COLUMN tenant VARCHAR(20) NOT NULL")
    with pytest.raises(
        SchemaError, match=r"'tenant'.*your own: expected .* default.*Give it a default"
    ):
        install(database)


def recreate_sqlite(engine: sa.Engine, old: str, new: str) -> None:
    """Make the table anew from its own text, changed: SQLite alters little."""
    with engine.begin() as connection:
        query = sa.text("SELECT sql FROM sqlite_master WHERE name = 'celery_outbox'")
        text = connection.execute(query).scalar_one()
        assert old in text
        connection.execute(sa.text("DROP TABLE celery_outbox"))
        connection.execute(sa.text(text.replace(old, new.format(old))))


#: For each fault: the change on SQLite (old and new text), elsewhere the ALTER TABLE, and the error.
FAULTS: dict[str, tuple[tuple[str, str], str, str]] = {
    "a column is missing": (
        ("queue VARCHAR(255) NOT NULL,", ""),
        "DROP COLUMN queue",
        r"'queue' of 'celery_outbox': expected VARCHAR\(255\) NOT NULL, found none\.",
    ),
    "a column has another type": (
        ("attempts BIGINT", "attempts VARCHAR(9)"),
        "{alter} attempts {type} VARCHAR(9) {not_null}",
        r"'attempts'.*: expected BIGINT NOT NULL, found VARCHAR\(9\) NOT NULL\.",
    ),
    "a column is shorter": (
        ("task_id VARCHAR(255)", "task_id VARCHAR(36)"),
        "{alter} task_id {type} VARCHAR(36) {not_null}",
        r"'task_id'.*: expected VARCHAR\(255\) NOT NULL, found VARCHAR\(36\) NOT NULL\.",
    ),
    "a column may be null": (
        ("broker VARCHAR(191) NOT NULL", "broker VARCHAR(191)"),
        "{nullable}",
        r"'broker'.*: expected VARCHAR\(191\) NOT NULL, found VARCHAR\(191\)\.",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_table_whose_columns_differ_is_refused_and_left_alone(
    fault: str, database: Database, engine: sa.Engine
) -> None:
    (old, new), alter, expected = FAULTS[fault]
    if engine.dialect.name == "sqlite":
        recreate_sqlite(engine, old, new)
    else:
        execute(engine, f"ALTER TABLE celery_outbox {altered(alter, engine.dialect.name)}")
    before = described(engine)
    with pytest.raises(SchemaError, match=expected) as caught:
        install(database)
    assert "ALTER TABLE" in str(caught.value)
    assert "schema sql" in str(caught.value)
    assert described(engine) == before


def altered(clause: str, dialect: str) -> str:
    if dialect == "mysql":
        words = {
            "alter": "MODIFY",
            "type": "",
            "not_null": "CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL",
            "nullable": "MODIFY broker VARCHAR(191) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin",
        }
    else:
        words = {
            "alter": "ALTER COLUMN",
            "type": "TYPE",
            "not_null": "",
            "nullable": "ALTER COLUMN broker DROP NOT NULL",
        }
    return clause.format(**words)


def test_times_without_fractions_are_refused_on_mariadb(mariadb_url: str) -> None:
    engine = sa.create_engine(mariadb_url)
    database = Database("default", engine, "celery_outbox")
    install(database)
    execute(engine, "ALTER TABLE celery_outbox MODIFY scheduled_at DATETIME NOT NULL")
    with pytest.raises(SchemaError, match=r"expected DATETIME\(6\) NOT NULL, found DATETIME NOT NULL"):
        install(database)
    engine.dispose()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("ENGINE=MyISAM", r"expected the engine InnoDB, found MyISAM\. Do: ALTER TABLE"),
        ("CONVERT TO CHARACTER SET utf8mb3", r"expected the collation utf8mb4_bin, found utf8.*Do:"),
        (
            "CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci",
            r"found utf8mb4_general_ci\. Do: ALTER TABLE `celery_outbox` CONVERT",
        ),
    ],
    ids=["MyISAM", "utf8mb3", "case-insensitive"],
)
def test_a_table_that_mariadb_keeps_in_another_way_is_refused(
    change: str, expected: str, mariadb_url: str
) -> None:
    engine = sa.create_engine(mariadb_url)
    database = Database("default", engine, "celery_outbox")
    install(database)
    execute(engine, f"ALTER TABLE celery_outbox {change}")
    with pytest.raises(SchemaError, match=expected):
        install(database)
    engine.dispose()


def test_the_table_of_another_program_is_refused(engine: sa.Engine) -> None:
    execute(engine, "CREATE TABLE celery_outbox (id INTEGER PRIMARY KEY, payload VARCHAR(20))")
    with pytest.raises(SchemaError, match=r"found none.*set outbox_table to another name"):
        install(Database("default", engine, "celery_outbox"))
    assert not sa.inspect(engine).has_table("celery_outbox_state")


@pytest.mark.parametrize(
    ("version", "help_"),
    [("0", r"celery-outbox -A your_app schema migrate"), ("99", r"pip install --upgrade")],
    ids=["older", "newer"],
)
def test_a_table_of_another_version_is_refused(
    version: str, help_: str, database: Database, engine: sa.Engine
) -> None:
    execute(engine, f"UPDATE celery_outbox_state SET value = '{version}'")
    drop_index(engine, CLAIM)
    before = described(engine)
    with pytest.raises(SchemaError, match=rf"expected schema version 1, found {version}\b.*{help_}"):
        install(database)
    assert described(engine) == before


def test_a_version_that_is_no_number_is_refused(database: Database, engine: sa.Engine) -> None:
    execute(engine, "UPDATE celery_outbox_state SET value = 'two'")
    with pytest.raises(SchemaError, match=r"expected a number as the schema version, found 'two'"):
        install(database)


def test_a_half_migrated_table_is_refused(database: Database) -> None:
    mark = MigrationMark(source=0, target=1, done=["0: add the queue"])
    database.run(lambda connection: database.state.mark(connection, mark))
    with pytest.raises(
        SchemaError, match=r"migration from 0 to 1 that was interrupted.*schema migrate` again"
    ):
        install(database)


@pytest.mark.parametrize("left", ["messages alone", "state alone", "no version"])
def test_an_install_that_was_killed_is_completed_by_the_next(
    left: str, database: Database, engine: sa.Engine
) -> None:
    before = described(engine)
    statement = {
        "messages alone": "DROP TABLE celery_outbox_state",
        "state alone": "DROP TABLE celery_outbox",
        "no version": "DELETE FROM celery_outbox_state",
    }[left]
    execute(engine, statement)
    install(database)
    assert described(engine) == before
    version: Any = database.read(database.state.version)
    assert version == 1


def test_storage_parameters_that_nobody_has_set_are_set(postgresql_url: str) -> None:
    engine = sa.create_engine(postgresql_url)
    database = Database("default", engine, "celery_outbox")
    install(database)
    before = described(engine)
    execute(
        engine,
        "ALTER TABLE celery_outbox RESET (fillfactor, vacuum_truncate)",
        "ALTER TABLE celery_outbox ALTER COLUMN body SET STORAGE EXTENDED",
    )
    assert install(database) == ["set the table's storage parameters"]
    assert {*options(described(engine))} == {*options(before)}
    assert install(database) == []
    engine.dispose()


def test_storage_parameters_that_a_dba_has_chosen_stay(postgresql_url: str) -> None:
    engine = sa.create_engine(postgresql_url)
    database = Database("default", engine, "celery_outbox")
    install(database)
    execute(engine, "ALTER TABLE celery_outbox SET (fillfactor = 80, autovacuum_enabled = false)")
    execute(engine, "ALTER TABLE celery_outbox ALTER COLUMN body SET STORAGE MAIN")
    before = described(engine)
    assert install(database) == []
    assert described(engine) == before
    engine.dispose()


def options(made: dict[str, Any]) -> list[str]:
    ((reloptions, storage),) = made["celery_outbox"]["beside"]
    return [*reloptions, "".join(map(str, storage))]
