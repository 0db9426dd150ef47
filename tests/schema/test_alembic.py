"""Alembic, given ``outbox.metadata``, creates what an install creates, then finds nothing to do."""

import shutil
from pathlib import Path

import alembic
import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from celery import Celery

from celery_outbox import Outbox
from celery_outbox.storage.database import Database
from celery_outbox.storage.inspection import inspect_tables
from celery_outbox.storage.install import install
from tests.relay.apps import relaying
from tests.schema.described import described
from tests.storage.rows import add, claim, ids, make_message
from tests.waiting import wait_until

ENV = """
from alembic import context

given = context.config.attributes
with given["engine"].connect() as connection:
    context.configure(
        connection=connection,
        target_metadata=given["target_metadata"],
        compare_type=True,
        compare_server_default=True,
        include_schemas=given["include_schemas"],
    )
    with context.begin_transaction():
        context.run_migrations()
"""

OFFLINE = """
from alembic import context

context.configure(dialect_name="postgresql", target_metadata=None)
with context.begin_transaction():
    context.run_migrations()
"""


class Project:
    """A project whose migrations Alembic writes."""

    def __init__(self, engine: sa.Engine, outbox: Outbox, directory: Path) -> None:
        self.engine, self.outbox = engine, outbox
        self._has_schema = "." in outbox.settings.table
        (directory / "versions").mkdir(parents=True)
        (directory / "env.py").write_text(ENV)
        template = Path(alembic.__file__).parent / "templates" / "generic" / "script.py.mako"
        shutil.copy(template, directory)
        self._directory = directory

    def config(self) -> Config:
        config = Config()
        config.set_main_option("script_location", str(self._directory))
        config.set_main_option("path_separator", "os")
        config.attributes["engine"] = self.engine
        config.attributes["target_metadata"] = [sa.MetaData(), self.outbox.metadata]
        config.attributes["include_schemas"] = self._has_schema
        return config

    def autogenerate_and_upgrade(self) -> str:
        """Let Alembic write a revision, carry it out, and return its text."""
        command.revision(self.config(), message="outbox", autogenerate=True)
        command.upgrade(self.config(), "head")
        (script,) = (self._directory / "versions").glob("*.py")
        return script.read_text()

    def differences(self) -> list[object]:
        with self.engine.connect() as connection:
            options = {"compare_type": True, "compare_server_default": True}
            options["include_schemas"] = self._has_schema
            context = MigrationContext.configure(connection, opts=options)
            found = compare_metadata(context, self.outbox.metadata)
        # Alembic's own table is in no metadata of ours.
        return [each for each in found if "alembic_version" not in str(each)]


@pytest.fixture
def project(engine: sa.Engine, tmp_path: Path) -> Project:
    return Project(engine, make_outbox(engine), tmp_path / "migrations")


def make_outbox(engine: sa.Engine, **settings: object) -> Outbox:
    app = Celery("shop", broker="memory://", set_as_current=False)
    return Outbox(app, databases={"default": engine}, **settings)


def test_autogenerate_creates_both_tables_with_their_indexes(project: Project) -> None:
    script = project.autogenerate_and_upgrade()
    assert script.count("op.create_table(") == 2
    assert script.count("op.create_index(") == 2
    made = described(project.engine)
    with project.engine.begin() as connection:
        for table in ("celery_outbox", "celery_outbox_state", "alembic_version"):
            connection.execute(sa.text(f"DROP TABLE {table}"))
    install(project.outbox.databases["default"])
    assert made == described(project.engine)


def test_a_second_autogenerate_finds_no_difference(project: Project) -> None:
    project.autogenerate_and_upgrade()
    command.check(project.config())
    assert project.differences() == []


def test_alembic_finds_no_difference_to_what_an_install_made(project: Project) -> None:
    project.outbox.install()
    assert project.differences() == []


def test_an_install_finds_nothing_to_repair_in_what_alembic_made(project: Project) -> None:
    project.autogenerate_and_upgrade()
    assert install(project.outbox.databases["default"]) == []


def test_a_table_that_alembic_made_is_relayed_without_an_install(
    project: Project, redis_url: str
) -> None:
    project.autogenerate_and_upgrade()
    app = Celery("shop", broker=redis_url, set_as_current=False)
    outbox = Outbox(app, databases={"default": project.engine})
    database = outbox.databases["default"]
    with relaying(outbox):
        result = app.send_task("shop.add", (1, 2), via_outbox=True)
        wait_until(lambda: database.read(database.store.count)["ready"] == 0)
    assert result.id
    found = database.read(lambda connection: inspect_tables(database, connection))
    assert found.version == 1
    app.close()


def test_a_downgrade_drops_everything(project: Project) -> None:
    project.autogenerate_and_upgrade()
    command.downgrade(project.config(), "base")
    assert set(sa.inspect(project.engine).get_table_names()) <= {"alembic_version"}


@pytest.mark.parametrize("name", ["order", "t" * 63], ids=["order", "63 characters"])
def test_names_that_need_care_go_through_alembic(name: str, engine: sa.Engine, tmp_path: Path) -> None:
    project = Project(engine, make_outbox(engine, table=name), tmp_path / "migrations")
    project.autogenerate_and_upgrade()
    assert project.differences() == []
    database = Database("default", engine, name)
    assert install(database) == []
    add(database, make_message())
    assert ids(claim(database)) == ["id-1"]


def test_a_table_in_a_schema_goes_through_alembic(postgresql_url: str, tmp_path: Path) -> None:
    engine = sa.create_engine(postgresql_url)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE SCHEMA queue"))
    outbox = make_outbox(engine, table="queue.celery_outbox")
    project = Project(engine, outbox, tmp_path / "migrations")
    project.autogenerate_and_upgrade()
    assert project.differences() == []
    assert install(outbox.databases["default"]) == []
    engine.dispose()


def test_migrations_that_alembic_prints_need_no_connection(
    postgresql_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = sa.create_engine(postgresql_url)
    project = Project(engine, make_outbox(engine), tmp_path / "migrations")
    command.revision(project.config(), message="outbox", autogenerate=True)
    (tmp_path / "migrations" / "env.py").write_text(OFFLINE)
    command.upgrade(project.config(), "head", sql=True)
    printed = capsys.readouterr().out
    assert "CREATE TABLE celery_outbox (" in printed
    assert "fillfactor = 50" in printed
    engine.dispose()
