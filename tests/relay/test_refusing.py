"""A broker that takes nothing: the backlog is not claimed and failed again and again."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
import sqlalchemy as sa

from celery_outbox import Outbox
from tests.processes import HOST
from tests.proxy import TcpProxy
from tests.redis_servers import private_redis
from tests.relay.apps import rows
from tests.relay.commands import environment, outbox_command, running
from tests.relay.conftest import OpenOutbox
from tests.storage.rows import add, make_message
from tests.waiting import wait_until

SLEEP = 0.25
BACKLOG = 3000
BATCH = 100
#: As many claims as a test looks at.
CLAIMS = 8
#: Each UPDATE that gives rows to a relay, with the moment, as PostgreSQL sees it.
COUNT_CLAIMS = """
CREATE TABLE claims (token text PRIMARY KEY, at timestamptz DEFAULT clock_timestamp(), size int);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO claims (token, size) SELECT claim_token, count(*) FROM changed
   WHERE claim_token IS NOT NULL GROUP BY claim_token;
  RETURN NULL;
END $$;
CREATE TRIGGER note AFTER UPDATE ON celery_outbox
  REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION note();
"""


def store_backlog(outbox: Outbox) -> None:
    database = outbox.databases["default"]
    add(database, *(make_message(f"{number}") for number in range(BACKLOG)))
    with database.begin() as connection:
        connection.execute(sa.text(COUNT_CLAIMS))


def claims(outbox: Outbox) -> list[tuple[float, int]]:
    """When a relay has claimed, and how many messages."""
    with outbox.databases["default"].begin() as connection:
        asked = sa.text("SELECT extract(epoch FROM at), size FROM claims ORDER BY at")
        return [(float(at), size) for at, size in connection.execute(asked)]


def assert_paced(found: list[tuple[float, int]], threads: int) -> None:
    """No more claims than one for each thread at first, and then one for each --sleep."""
    (began, _), *_, (ended, _) = found
    # A rest that follows a lost connection is a quarter shorter at most.
    assert len(found) - threads <= (ended - began) / (0.75 * SLEEP) + 1


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_broker_that_refuses_every_message_gets_one_batch_per_sleep(
    concurrency: int, open_outbox: OpenOutbox, postgresql_url: str, tmp_path: Path
) -> None:
    with private_redis(tmp_path / "full", "--maxmemory", "1") as full:
        url = f"redis://{HOST}:{full.connection_pool.connection_kwargs['port']}/0"
        outbox = open_outbox(url, postgresql_url)
        store_backlog(outbox)
        env = environment(broker=url, database=postgresql_url)
        arguments = "--sleep", str(SLEEP), "--concurrency", str(concurrency)
        with running(outbox_command("relay", *arguments), tmp_path, env) as relay:
            wait_until(lambda: len(claims(outbox)) >= CLAIMS + concurrency, 30, "the claims")
            relay.send(signal.SIGTERM)
            assert relay.wait() == 0
        found = claims(outbox)
        assert_paced(found, concurrency + 1)
        # Every claim took others: nobody is tried a second time while there are some not tried.
        assert max(row.attempts for row in rows(outbox)) == 1
        assert sum(row.attempts for row in rows(outbox)) <= len(found) * BATCH
        full.config_set("maxmemory", 0)
        with running(outbox_command("relay", *arguments), tmp_path, env):
            wait_until(lambda: not rows(outbox), 30, "every delivery")
        assert full.llen("celery") == BACKLOG


def test_a_broker_that_breaks_every_connection_gets_one_small_batch_per_sleep(
    open_outbox: OpenOutbox,
    tcp_proxy: Callable[[str, int], TcpProxy],
    redis_url: str,
    postgresql_url: str,
    tmp_path: Path,
) -> None:
    wire = tcp_proxy(HOST, urlsplit(redis_url).port or 0)
    outbox = open_outbox(redis_url, postgresql_url)
    store_backlog(outbox)
    env = environment(broker=wire.through(redis_url), database=postgresql_url)
    broken = [0]

    def has_claimed_enough() -> bool:
        if wire.accepted > broken[0]:
            broken[0] = wire.accepted
            wire.cut_after(1500)  # less than a batch, more than a greeting
        return len(claims(outbox)) >= CLAIMS

    arguments = "--sleep", str(SLEEP), "--concurrency", "4"
    with running(outbox_command("relay", *arguments), tmp_path, env) as relay:
        wait_until(has_claimed_enough, 60, "the claims", interval=0.005)
        found, began = claims(outbox), time.monotonic()
        assert_paced(found, 5)
        # After the first ones, probes only.
        assert max(size for _, size in found[5:]) <= 10
        assert sum(row.attempts for row in rows(outbox)) <= sum(size for _, size in found)
        wire.cut_after(2**40)
        wait_until(lambda: not rows(outbox), 30, "every delivery")
        assert relay.popen.poll() is None
        assert time.monotonic() - began < 15
    with redis.Redis.from_url(redis_url) as client:
        assert client.llen("celery") >= BACKLOG
