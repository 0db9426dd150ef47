"""``prune``: what is deleted, in what steps, and what is said of it."""

from pathlib import Path

import pytest
import sqlalchemy as sa

from celery_outbox import admin
from celery_outbox.admin import sweeping
from celery_outbox.errors import DatabaseError
from celery_outbox.storage.database import Database
from celery_outbox.storage.schema import FAR_FUTURE
from tests.desk.conftest import Call
from tests.desk.test_list import on_a_terminal
from tests.relay.apps import relay_once, send
from tests.relay.apps import rows as rows_of_outbox
from tests.relay.conftest import OpenOutbox, open_outbox
from tests.relay.wire import task_ids
from tests.storage.conftest import database, shared_database
from tests.storage.rows import HOUR, add, change, hours_from_now, make_message, rows

__all__ = ["database", "open_outbox", "shared_database"]

DAY = 24


def make_kept(
    database: Database, *task_ids: str, days: float, error: str | None = None, broker: str = "shop"
) -> None:
    """Store messages that were delivered, or given up, so many days ago."""
    add(database, *(make_message(task_id, broker=broker) for task_id in task_ids))
    values = {
        "finished_at": hours_from_now(-DAY * days),
        "scheduled_at": FAR_FUTURE,
        "attempts": 1,
        "error": error,
    }
    t = database.tables.messages
    with database.begin() as connection:
        connection.execute(t.update().where(t.c.task_id.in_(task_ids)).values(values))


def left(database: Database) -> list[str]:
    return [row.task_id for row in rows(database)]


def test_delivered_messages_that_are_old_enough_are_deleted(
    call: Call, shop: Database, billing: Database
) -> None:
    make_kept(shop, "old", "older", days=8)
    make_kept(shop, "young", days=6)
    make_kept(shop, "failed", days=8, error="no")
    add(shop, make_message("waiting"))
    make_kept(billing, "old", days=8)
    done = call("prune", "--older-than", "7d")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == ("shop: deleted 2 delivered messages\nbilling: deleted 1 delivered message\n")
    assert left(shop) == ["young", "failed", "waiting"]
    assert left(billing) == []


def test_failed_messages_go_only_when_they_are_named(call: Call, shop: Database) -> None:
    make_kept(shop, "delivered", days=8)
    make_kept(shop, "failed", days=8, error="no")
    done = call("prune", "--older-than", "7d", "--state", "failed", "shop")
    assert done.stdout == "shop: deleted 1 failed message\n"
    assert left(shop) == ["delivered"]


def test_both_states_can_be_named(call: Call, shop: Database) -> None:
    make_kept(shop, "delivered", days=8)
    make_kept(shop, "failed", days=8, error="no")
    done = call("prune", "--older-than", "7d", "--state", "failed", "--state", "delivered", "shop")
    assert done.stdout == "shop: deleted 1 failed message and 1 delivered message\n"
    assert left(shop) == []


@pytest.mark.parametrize("form", [["billing"], ["--database", "billing"]], ids=" ".join)
def test_one_database_is_pruned_when_it_is_named(
    form: list[str], call: Call, shop: Database, billing: Database
) -> None:
    for each in (shop, billing):
        make_kept(each, "old", days=8)
    done = call("prune", "--older-than", "7d", *form)
    assert done.stdout == "billing: deleted 1 delivered message\n"
    assert (left(shop), left(billing)) == (["old"], [])


def test_a_database_that_is_down_is_named_and_the_others_are_pruned(
    call_half: Call, shop: Database
) -> None:
    make_kept(shop, "old", days=8)
    done = call_half("prune", "--older-than", "7d")
    assert (done.exit_code, done.stdout) == (1, "shop: deleted 1 delivered message\n")
    assert done.stderr.startswith("Error: database 'down': OperationalError")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "Expected --older-than with a duration, such as 90s, 15m, 12h or 7d."),
        (["--older-than", "soon"], "90, 90s, 15m, 12h or 7d, got 'soon'"),
        (["--older-than", "0"], "expected more than zero"),
        (["--older-than", "-7d"], "got '-7d'"),
        (["--older-than", "7d", "--state", "ready"], "'ready' is not one of 'delivered', 'failed'"),
    ],
    ids=str,
)
def test_wrong_usage_deletes_nothing(
    arguments: list[str], expected: str, call: Call, shop: Database
) -> None:
    make_kept(shop, "old", days=800)
    done = call("prune", *arguments)
    assert done.exit_code == 2
    assert expected in " ".join(done.stderr.split())
    assert left(shop) == ["old"]


def test_a_table_of_another_version_is_refused(call: Call, shop: Database) -> None:
    make_kept(shop, "old", days=8)
    shop.run(lambda connection: shop.state.set_version(connection, 99))
    done = call("prune", "--older-than", "7d", "shop")
    assert done.exit_code == 1
    assert "expected schema version 1, found 99" in done.stderr
    assert left(shop) == ["old"]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_it_goes_in_batches_over_all_brokers(
    size: int, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "BATCH", size)
    monkeypatch.setattr(sweeping, "PAGE", 2 * size)
    make_kept(database, *"abcde", days=2)
    make_kept(database, *"fgh", days=2, broker="Shop")
    make_kept(database, "young", days=0.5)
    add(database, make_message("waiting"))
    told: list[int] = []
    assert admin.prune(database, state="delivered", older_than=DAY * HOUR, progress=told.append) == 8
    assert sum(told) == 8
    assert max(told) <= size
    assert left(database) == ["young", "waiting"]


def test_what_was_deleted_before_an_error_is_told(
    call: Call, shop: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "BATCH", 2)
    make_kept(shop, *"abcde", days=8)
    run, calls = Database.run, list[None]()

    def breaks(self: Database, work: object) -> object:
        calls.append(None)
        if len(calls) == 4:  # the version, and two batches
            raise DatabaseError("database 'shop': it is gone")
        return run(self, work)  # type: ignore[arg-type]

    monkeypatch.setattr(Database, "run", breaks)
    done = call("prune", "--older-than", "7d", "shop")
    assert done.exit_code == 1
    assert done.stdout == "shop: deleted 4 delivered messages, then it ended early\n"
    assert done.stderr == "Error: database 'shop': it is gone\n"


def test_nothing_is_locked_between_two_batches(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "BATCH", 4)
    make_kept(database, *map(str, range(16)), days=2)
    impatient = {
        "sqlite": {"timeout": 0},
        "postgresql": {"options": "-c lock_timeout=1"},
        "mysql": {"init_command": "SET innodb_lock_wait_timeout = 1"},
    }
    engine = sa.create_engine(database.url, connect_args=impatient[database.url.get_backend_name()])
    application = Database("application", engine, "celery_outbox")

    def work(count: int) -> None:
        add(application, make_message("new"))
        change(application, "1", error="changed")
        change(application, "15", attempts=7)

    assert admin.prune(database, state="delivered", older_than=HOUR, progress=work) == 16
    assert left(database) == ["new"] * 4
    engine.dispose()


def test_delivered_messages_are_kept_until_they_are_pruned(
    open_outbox: OpenOutbox, redis_url: str, database_url: str
) -> None:
    outbox = open_outbox(redis_url, database_url, keep=True)
    sent = [send(outbox) for _ in range(3)]
    relay_once(outbox)
    assert task_ids(redis_url) == sent
    database = outbox.databases["default"]
    change(database, sent[0], finished_at=hours_from_now(-2))
    told: list[int] = []
    assert admin.prune(database, state="delivered", older_than=HOUR, progress=told.append) == 1
    assert [row.task_id for row in rows_of_outbox(outbox)] == sent[1:]


def test_a_terminal_sees_how_far_it_is_and_a_pipe_does_not(tmp_path: Path, shop: Database) -> None:
    make_kept(shop, *map(str, range(20)), days=8)
    url = shop.url.render_as_string()
    shown = on_a_terminal(80, "prune", "--older-than", "7d", default=url)
    assert "default: deleting delivered messages" in shown
    assert shown.rstrip().endswith("default: deleted 20 delivered messages")
