"""What must hold in a process of its own: its first dispatch, its end, its app from elsewhere."""

import pickle
import subprocess
import sys

import pytest

from tests.capture.shop import FurnishedEngine, OpenShop, Shop

PREFACE = """
import os, sys
import sqlalchemy as sa
from sqlalchemy.orm import Session
from celery import Celery
from celery_outbox import Outbox
from tests.capture.shop import Order, insert_order, receipt
engine = sa.create_engine(sys.argv[1])
app = Celery("shop", broker="redis://127.0.0.1:1/0")
task = app.task(name="shop.receipt")(receipt)
"""


def run_python(program: str, *arguments: str, exit_code: int = 0, preface: str = PREFACE) -> str:
    """Run a program; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", preface + program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == exit_code, done.stderr
    return done.stdout


FIRST_DISPATCH = {
    "used": """
outbox = Outbox(app, databases={"default": engine})
with Session(engine) as session:
    insert_order(session, 1)
    task.apply_async(task_id="a", via_outbox=True)
    session.rollback()
""",
    "made": """
with Session(engine) as session:
    insert_order(session, 1)
    outbox = Outbox(app, databases={"default": engine})
    task.apply_async(task_id="a", via_outbox=True)
    session.rollback()
""",
}


@pytest.mark.parametrize("moment", FIRST_DISPATCH)
def test_the_first_dispatch_finds_what_was_begun_before_the_outbox_was(
    sqlite_shop: Shop, moment: str
) -> None:
    run_python(FIRST_DISPATCH[moment], str(sqlite_shop.engine.url))
    assert (sqlite_shop.orders, sqlite_shop.tasks) == ([], [])


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
    if sys.argv[2] == "written":
        # After our own listener: the task is in the transaction, and COMMIT has not been sent.
        sa.event.listen(engine, "commit", lambda connection: os.kill(os.getpid(), 9))
    session.commit()
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("moment", ["before", "written", "after"])
def test_a_process_killed_around_its_commit_leaves_all_or_nothing(
    furnished_engine: FurnishedEngine, open_shop: OpenShop, moment: str
) -> None:
    shop = open_shop({"default": furnished_engine("postgresql")})
    url = shop.engine.url.render_as_string(hide_password=False)
    assert run_python(STORE_AND_COMMIT, url, moment, exit_code=-9) == ""
    assert (shop.orders, shop.tasks) == (([1], ["a"]) if moment == "after" else ([], []))


def test_an_app_pickled_into_another_process_refuses_our_options(sqlite_shop: Shop) -> None:
    program = """
import pickle, sys
app = pickle.loads(bytes.fromhex(sys.argv[1]))
try:
    app.send_task("elsewhere", via_outbox=True)
except Exception as error:
    print(type(error).__name__)
"""
    pickled = pickle.dumps(sqlite_shop.app).hex()
    assert run_python(program, pickled, preface="").strip() == "NoOutboxError"


def test_an_app_in_a_process_that_never_made_an_outbox_refuses_our_options() -> None:
    program = """
app.conf.broker_url = "memory://"
for send in (task.apply_async, lambda **options: app.send_task("elsewhere", **options)):
    try:
        send(via_outbox=True)
    except Exception as error:
        print(type(error).__name__)
    else:
        print("sent")
"""
    assert run_python(program, "sqlite://").split() == ["NoOutboxError", "NoOutboxError"]


LISTENERS_FIRST = """
import sys
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session

heard = set()

def listen(target, name):
    def send(*args):
        if name not in heard:
            heard.add(name)
            app.send_task("elsewhere", task_id=name, via_outbox=True)
    event.listen(target, name, send)

for name in sys.argv[2].split():
    listen(sa.Engine if name == "commit" else Session, name)
"""
COMMIT_TWICE = """
outbox = Outbox(app, databases={"default": engine})
with Session(engine) as session:
    session.add(Order(id=1))
    session.commit()
    session.add(Order(id=2))
    session.rollback()
"""


@pytest.mark.parametrize(
    "names",
    [
        ["after_transaction_create", "before_flush"],
        ["after_flush", "before_commit", "commit"],
        ["after_commit"],
        ["after_rollback", "after_soft_rollback"],
    ],
    ids=" ".join,
)
def test_listeners_registered_before_the_package_was_imported_find_the_same(
    sqlite_shop: Shop, names: list[str]
) -> None:
    url = str(sqlite_shop.engine.url)
    run_python(COMMIT_TWICE, url, " ".join(names), preface=LISTENERS_FIRST + PREFACE)
    assert (sqlite_shop.orders, sorted(sqlite_shop.tasks)) == ([1], names)


def test_a_listener_registered_before_the_package_was_imported_shares_the_rollback(
    sqlite_shop: Shop,
) -> None:
    program = """
outbox = Outbox(app, databases={"default": engine})
with Session(engine) as session:
    session.add(Order(id=1))
    session.flush()
    session.rollback()
"""
    names = "after_transaction_create after_attach before_flush after_begin after_flush"
    run_python(program, str(sqlite_shop.engine.url), names, preface=LISTENERS_FIRST + PREFACE)
    assert (sqlite_shop.orders, sqlite_shop.tasks) == ([], [])


IMPORTED_LATE = """
import sys
import sqlalchemy as sa
from sqlalchemy.orm import Session
engine = sa.create_engine(sys.argv[1])
with Session(engine) as session:
    session.execute(sa.text("INSERT INTO orders (id) VALUES (1)"))
    from celery import Celery
    from celery_outbox import Outbox
    app = Celery("shop", broker="redis://127.0.0.1:1/0")
    outbox = Outbox(app, databases={"default": engine})
    for using in (False, True):
        try:
            if using:
                with outbox.using(session):
                    app.send_task("shop.receipt", via_outbox=True)
            else:
                app.send_task("shop.receipt", via_outbox=True)
        except Exception as error:
            print(type(error).__name__)
    session.rollback()
app.send_task("shop.receipt", task_id="later", via_outbox=True)
"""


def test_a_transaction_open_before_the_package_was_imported_is_refused(sqlite_shop: Shop) -> None:
    printed = run_python(IMPORTED_LATE, str(sqlite_shop.engine.url), preface="")
    assert printed.split() == ["TransactionError", "TransactionError"]
    assert (sqlite_shop.orders, sqlite_shop.tasks) == ([], ["later"])


FORK_DURING_THE_FIRST_USE = """
import signal, threading
from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
install(Database("default", engine, "celery_outbox"))
database = Database("default", engine, "celery_outbox")
inside, leave = threading.Event(), threading.Event()

@sa.event.listens_for(engine, "checkout")
def wait(*_):
    if threading.current_thread() is not threading.main_thread():
        inside.set()
        leave.wait(30)

asking = threading.Thread(target=lambda: database.read(lambda connection: None))
asking.start()
assert inside.wait(30)
child = os.fork()
if child == 0:
    signal.alarm(10)  # ends a child that waits for ever
    database.read(lambda connection: None)
    os._exit(0)
_, status = os.waitpid(child, 0)
leave.set()
asking.join(30)
print(os.waitstatus_to_exitcode(status))
"""


def test_a_child_does_not_wait_for_a_lock_that_a_thread_held_at_the_fork(sqlite_url: str) -> None:
    assert run_python(FORK_DURING_THE_FIRST_USE, sqlite_url).strip() == "0"
