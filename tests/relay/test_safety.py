"""What a relay must never do: read a body, run the tasks' code, or touch another app's messages."""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

from celery_outbox import Outbox
from celery_outbox.message import Envelope
from tests.relay.apps import rows, send
from tests.relay.commands import PROJECT, ROOT, environment, outbox_command, program, run
from tests.relay.conftest import OpenOutbox
from tests.relay.wire import body_of, redis_envelopes, task_ids
from tests.servers import RedisServer
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


COMMANDS = [
    outbox_command("relay", "--once"),
    [program("celery"), "-A", PROJECT, "outbox", "relay", "--once"],
]


def test_a_relay_never_unpickles_a_body_nor_imports_a_task_module(
    open_outbox: OpenOutbox, sqlite_url: str, redis_url: str, tmp_path: Path
) -> None:
    outbox = open_outbox(redis_url, sqlite_url)
    sprung, imported = tmp_path / "sprung", tmp_path / "imported"
    body = pickle.dumps(Trap(sprung))
    (tmp_path / "warehouse").mkdir()
    for module in ("more_tasks.py", "warehouse/tasks.py"):
        (tmp_path / module).write_text(f"open({str(imported)!r}, 'a').write(__name__ + ' ')\n")
    config = {"imports": ["more_tasks"], "include": ["more_tasks"]}
    env = environment(broker=redis_url, database=sqlite_url, config=config)
    env |= {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "SHOP_PACKAGES": "warehouse"}
    for command in COMMANDS:
        store_trap(outbox, body)
        done = run(command, env)
        assert done.returncode == 0, done.stderr
    assert [body_of(envelope) for envelope in redis_envelopes(redis_url)] == [body, body]
    assert not sprung.exists()
    assert not imported.exists()
    # The traps are traps: who loads the body springs the one, who works as a worker the others.
    pickle.loads(body)
    assert sprung.exists()
    load = f"from {PROJECT} import app; app.loader.import_default_modules()"
    run([sys.executable, "-c", load], env)
    assert set(imported.read_text().split()) == {"more_tasks", "warehouse.tasks"}


def test_relays_of_two_apps_share_a_table_and_each_touches_only_its_own(
    open_outbox: OpenOutbox, postgresql_url: str, redis_server: RedisServer
) -> None:
    brokers = {name: redis_server.empty_database() for name in ("one", "two")}
    apps = {name: open_outbox(url, postgresql_url, main=name) for name, url in brokers.items()}
    stored = [(name, send(apps[name])) for name in ("one", "two", "one", "two")]
    for command, (name, url) in zip(COMMANDS, brokers.items(), strict=True):
        others = [row for row in rows(apps[name]) if row.broker != name]
        done = run(command, environment(broker=url, database=postgresql_url, settings={"name": name}))
        assert done.returncode == 0, done.stderr
        assert task_ids(url) == [task_id for app, task_id in stored if app == name]
        assert rows(apps[name]) == others


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
