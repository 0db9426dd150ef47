"""celery beat: its entries are stored or sent as they or their tasks say."""

import os
from pathlib import Path

import sqlalchemy as sa
from celery import Celery

from celery_outbox import Outbox
from tests.relay.apps import rows
from tests.relay.commands import program, running
from tests.relay.wire import redis_envelopes
from tests.waiting import wait_until


def test_beat_stores_the_entries_that_say_so_and_sends_the_others(
    redis_url: str, postgresql_url: str, tmp_path: Path
) -> None:
    engine = sa.create_engine(postgresql_url)
    app = Celery("shop", broker=redis_url, set_as_current=False)
    outbox = Outbox(app, databases={"default": engine})
    outbox.install()
    env = {**os.environ, "SHOP_BROKER": redis_url, "SHOP_DATABASE": postgresql_url}
    schedule = ["-s", str(tmp_path / "schedule")]
    command = [program("celery"), "-A", "tests.end_to_end.clockwork", "beat", *schedule]
    with running(command, tmp_path, env):
        wait_until(lambda: len({row.task_name for row in rows(outbox)}) == 3, 60, "three entries")
        wait_until(lambda: redis_envelopes(redis_url), 30, "the direct entry")
    assert {row.task_name for row in rows(outbox)} == {"shop.add", "shop.note", "other.run"}
    sent = redis_envelopes(redis_url)
    assert {(each["headers"]["task"], each["headers"]["argsrepr"]) for each in sent} == {
        ("shop.add", "[3, 4]")
    }
    app.close()
    engine.dispose()
