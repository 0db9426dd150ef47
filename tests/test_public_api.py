"""The public face: its names, its errors, and its tables as others see them."""

import inspect
import re
from importlib import resources
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery
from celery.utils.dispatch import Signal

import celery_outbox
from celery_outbox import Outbox, OutboxError, errors, signals
from celery_outbox.storage.install import install
from tests.relay.apps import rows, send


def test_the_package_exports_a_sorted_list_of_names_that_exist() -> None:
    names = celery_outbox.__all__
    assert names == sorted(names)
    assert {"Outbox", "OutboxError", "OutboxMiddleware"} <= set(names)
    assert all(hasattr(celery_outbox, name) for name in names)


def test_every_public_name_is_documented() -> None:
    public = [getattr(celery_outbox, name) for name in celery_outbox.__all__]
    public += [each for name, each in inspect.getmembers(Outbox) if not name.startswith("_")]
    assert [each for each in public if not inspect.getdoc(each)] == []


def test_the_package_says_that_it_is_typed() -> None:
    assert resources.files(celery_outbox).joinpath("py.typed").is_file()


def test_every_error_derives_from_outbox_error() -> None:
    found = [getattr(errors, name) for name in errors.__all__]
    assert all(issubclass(each, OutboxError) for each in found)


def test_the_tree_at_the_top_of_the_errors_is_the_tree() -> None:
    drawn: dict[str, str] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"^(    [│├└─ ]*)([A-Z]\w+Error)\b", line):
            depth = (len(match[1]) - 4) // 4
            above[depth:] = [match[2]]
            drawn[match[2]] = above[depth - 1] if depth else "Exception"
    real = {name: getattr(errors, name).__base__.__name__ for name in errors.__all__}
    assert drawn == real


def test_the_signals_are_those_of_celerys_own_class() -> None:
    assert {"outbox_stored", "outbox_published", "outbox_failed", "outbox_busy"} <= set(signals.__all__)
    assert all(isinstance(getattr(signals, name), Signal) for name in signals.__all__)


def test_two_outboxes_of_two_apps_are_apart(sqlite_url: str) -> None:
    engine = sa.create_engine(sqlite_url)
    outboxes = []
    for main in ("one", "two"):
        app = Celery(main, broker="redis://127.0.0.1:1/0", set_as_current=False)
        outboxes.append(Outbox(app, databases={"default": engine}))
    outboxes[0].install()
    send(outboxes[0])
    send(outboxes[1])
    assert [row.broker for row in rows(outboxes[0])] == ["one", "two"]
    engine.dispose()


@pytest.fixture(params=["celery_outbox", "Upper_Case"])
def named_outbox(request: pytest.FixtureRequest, database_url: str) -> Any:
    """An outbox with a table of each name, not installed, on each database."""
    engine = sa.create_engine(database_url)
    app = Celery("shop", broker="redis://127.0.0.1:1/0", set_as_current=False)
    yield Outbox(app, databases={"default": engine}, table=request.param)
    engine.dispose()


def test_the_metadata_creates_the_tables_that_a_dispatch_needs(named_outbox: Outbox) -> None:
    bind = named_outbox.settings.databases["default"]
    assert isinstance(bind, sa.Engine)
    named_outbox.metadata.create_all(bind)
    stored = send(named_outbox)
    assert [row.task_id for row in rows(named_outbox)] == [stored]
    before = sorted(sa.inspect(bind).get_table_names())
    install(named_outbox.databases["default"])
    assert sorted(sa.inspect(bind).get_table_names()) == before
