"""The whole way, into real workers of every pool."""

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.end_to_end.conftest import Works
from tests.relay.apps import rows
from tests.waiting import wait_until

# Celery's tables of results use what SQLAlchemy 2.1 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")


def session_of(works: Works) -> Session:
    bind = works.outbox.settings.databases["default"]
    assert isinstance(bind, sa.Engine)
    return Session(bind)


def test_a_committed_task_runs_exactly_once_and_a_rolled_back_one_never(works: Works) -> None:
    for what, is_committed in (("first", True), ("never", False), ("second", True)):
        with session_of(works) as session:
            session.execute(sa.text("SELECT 1"))
            works.send("note", f"once {what}", via_outbox=True)
            session.commit() if is_committed else session.rollback()
    works.catch_up()
    assert works.runs("once") == []
    works.relay()
    works.relay()
    wait_until(lambda: len(works.runs("once")) == 2, 20, "both runs")
    works.catch_up()
    assert sorted(works.runs("once")) == ["once first", "once second"]
    assert rows(works.outbox) == []


def test_the_result_comes_back_to_the_sender(works: Works) -> None:
    result = works.send("add", 2, 3, via_outbox=True)
    works.relay()
    assert result.get(timeout=20) == 5


def test_a_task_without_a_transaction_stores_what_it_dispatches(works: Works) -> None:
    inner = works.send("passes_on", "inner").get(timeout=20)
    assert [row.task_id for row in rows(works.outbox)] == [inner]
    assert works.runs("inner") == []
    works.relay()
    wait_until(lambda: works.runs("inner") == ["inner"], 20, "the run")


@pytest.mark.parametrize("task", ["passes_on_in_a_transaction", "passes_on_in_a_coroutine"])
def test_a_task_with_a_transaction_stores_what_it_dispatches_with_it(works: Works, task: str) -> None:
    # In turn: an AsyncEngine must not be used by two event loops at once.
    assert works.send(task, f"{task} no", "rollback").get(timeout=20) == "refused"
    inner = works.send(task, f"{task} yes", "commit").get(timeout=20)
    assert [row.task_id for row in rows(works.outbox)] == [inner]
    works.relay()
    wait_until(lambda: works.runs(task) == [f"{task} yes"], 20, "the run")
    works.catch_up()
    assert works.runs(task) == [f"{task} yes"]


def test_no_connection_made_at_the_import_of_the_app_is_used_by_a_forked_process(works: Works) -> None:
    (importer, then), (runner, now) = works.send("connections").get(timeout=20)
    is_forked = runner != importer
    assert is_forked is (works.pool == "prefork")
    assert not is_forked or now != then


def test_retry_goes_directly_though_the_task_always_uses_the_outbox(works: Works) -> None:
    result = works.send("retries", "again", via_outbox=True)
    works.relay()
    assert result.get(timeout=20) == 2
    assert works.runs("again") == ["again 0", "again 1", "again 2"]
    assert rows(works.outbox) == []
