"""What a relay must never do with what it carries: read a body, or run the tasks' code."""

import os
import pickle
from pathlib import Path
from typing import Any

from celery_outbox import Outbox
from celery_outbox.message import Envelope
from tests.relay.apps import rows
from tests.relay.commands import ROOT, environment, outbox_command, run
from tests.relay.conftest import OpenOutbox
from tests.relay.wire import body_of, redis_envelopes
from tests.storage.rows import add, make_message


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "sprung")


def store_trap(outbox: Outbox, body: bytes) -> None:
    envelope = Envelope(
        exchange="",
        routing_key="celery",
        content_type="application/x-python-serialize",
        content_encoding="binary",
        headers={"id": "trap", "task": "shop.add"},
    )
    message = make_message("trap", body=body, envelope=envelope.to_text())
    add(outbox.databases["default"], message)


def test_a_relay_never_unpickles_a_body_nor_imports_a_task_module(
    open_outbox: OpenOutbox, sqlite_url: str, redis_url: str, tmp_path: Path
) -> None:
    outbox = open_outbox(redis_url, sqlite_url)
    sprung, imported = tmp_path / "sprung", tmp_path / "imported"
    body = pickle.dumps(Trap(sprung))
    store_trap(outbox, body)
    (tmp_path / "tasks_of_the_shop.py").write_text(
        f"import pathlib\npathlib.Path({str(imported)!r}).touch()\n"
    )
    config = {"imports": ["tasks_of_the_shop"], "include": ["tasks_of_the_shop"]}
    env = environment(broker=redis_url, database=sqlite_url, config=config)
    env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    done = run(outbox_command("relay", "--once"), env)
    assert done.returncode == 0, done.stderr
    (envelope,) = redis_envelopes(redis_url)
    assert body_of(envelope) == body
    assert not sprung.exists()
    assert not imported.exists()
    # The trap is a trap: whoever loads it springs it.
    pickle.loads(body)
    assert sprung.exists()


def test_a_relay_says_nothing_of_what_it_carries(
    open_outbox: OpenOutbox, sqlite_url: str, redis_url: str
) -> None:
    outbox = open_outbox(redis_url, sqlite_url)
    store_trap(outbox, b"a secret payload")
    add(outbox.databases["default"], make_message("bad", envelope="a secret envelope"))
    env = environment(broker=redis_url, database=sqlite_url)
    done = run(outbox_command("relay", "--once"), env)
    assert done.returncode == 0
    (bad,) = rows(outbox)
    said = f"{done.stdout} {done.stderr} {bad.error}"
    assert "Delivery of 1 message(s) failed" in said
    assert "secret" not in said
