"""What must hold in a process of its own: its first dispatch, its end, its app from elsewhere."""

import subprocess
import sys

import pytest

from tests.capture.shop import Shop

PREFACE = """
import os, pickle, sys
import sqlalchemy as sa
from sqlalchemy.orm import Session
from celery import Celery
from celery_outbox import Outbox
from tests.capture.shop import Order, insert_order, receipt
engine = sa.create_engine(sys.argv[1])
app = Celery("shop", broker="redis://127.0.0.1:1/0")
task = app.task(name="shop.receipt")(receipt)
"""


def run_python(program: str, *arguments: str, exit_code: int = 0) -> str:
    """Run a program that begins with PREFACE; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", PREFACE + program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == exit_code, done.stderr
    return done.stdout


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_the_first_dispatch_finds_what_was_begun_before_the_outbox_was_used(
    sqlite_shop: Shop, end: str
) -> None:
    program = """
outbox = Outbox(app, databases={"default": engine})
with Session(engine) as session:
    insert_order(session, 1)
    task.apply_async(task_id="a", via_outbox=True)
    getattr(session, sys.argv[2])()
"""
    run_python(program, str(sqlite_shop.engine.url), end)
    found = (sqlite_shop.orders, sqlite_shop.tasks)
    assert found == (([1], ["a"]) if end == "commit" else ([], []))


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_the_first_dispatch_finds_what_was_begun_before_the_outbox_was_made(
    sqlite_shop: Shop, end: str
) -> None:
    program = """
with Session(engine) as session:
    insert_order(session, 1)
    outbox = Outbox(app, databases={"default": engine})
    task.apply_async(task_id="a", via_outbox=True)
    getattr(session, sys.argv[2])()
"""
    run_python(program, str(sqlite_shop.engine.url), end)
    found = (sqlite_shop.orders, sqlite_shop.tasks)
    assert found == (([1], ["a"]) if end == "commit" else ([], []))


def test_a_dispatch_outside_transactions_survives_the_death_of_its_process(shop: Shop) -> None:
    program = """
outbox = Outbox(app, databases={"default": engine})
task.apply_async(task_id="a", via_outbox=True)
os._exit(0)
"""
    run_python(program, shop.engine.url.render_as_string(hide_password=False))
    assert shop.tasks == ["a"]


STORE_AND_COMMIT = """
outbox = Outbox(app, databases={"default": engine})
with Session(engine) as session:
    insert_order(session, 1)
    task.apply_async(task_id="a", via_outbox=True)
    session.flush()
    if sys.argv[2] == "before":
        os.kill(os.getpid(), 9)
    session.commit()
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_process_killed_around_its_commit_leaves_all_or_nothing(shop: Shop, moment: str) -> None:
    url = shop.engine.url.render_as_string(hide_password=False)
    assert run_python(STORE_AND_COMMIT, url, moment, exit_code=-9) == ""
    assert (shop.orders, shop.tasks) == (([1], ["a"]) if moment == "after" else ([], []))


def test_an_app_pickled_into_another_process_refuses_our_options(sqlite_shop: Shop) -> None:
    pickled = run_python(
        """
outbox = Outbox(app, databases={"default": engine})
print(pickle.dumps(app).hex())
""",
        str(sqlite_shop.engine.url),
    )
    program = """
import subprocess
done = subprocess.run(
    [sys.executable, "-c", '''
import pickle, sys
app = pickle.loads(bytes.fromhex(sys.argv[1]))
try:
    app.send_task("elsewhere", via_outbox=True)
except Exception as error:
    print(type(error).__name__)
''', sys.argv[2]], capture_output=True, text=True, timeout=30)
print(done.stdout, done.stderr)
"""
    assert run_python(program, "sqlite://", pickled.strip()).strip() == "NoOutboxError"
