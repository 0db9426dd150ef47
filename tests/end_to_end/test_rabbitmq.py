"""RabbitMQ: queues before workers, and results over it."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import amqp
import kombu.pools
import sqlalchemy as sa
from celery import Celery

from celery_outbox import Outbox
from tests.end_to_end.conftest import BARE
from tests.relay.apps import relay_once
from tests.relay.commands import program, running
from tests.relay.wire import amqp_connection
from tests.waiting import wait_until


def is_declared(url: str, queue: str) -> bool:
    with amqp_connection(url) as connection:
        try:
            connection.channel().queue_declare(queue, passive=True)
        except amqp.NotFound:
            return False
        return True


def test_a_worker_that_starts_later_runs_what_waits_and_answers_over_rpc(
    rabbitmq_url: str, sqlite_url: str, tmp_path: Path
) -> None:
    engine = sa.create_engine(sqlite_url)
    app = Celery("shop", broker=rabbitmq_url, backend="rpc://", set_as_current=False)
    outbox = Outbox(app, databases={"default": engine})
    outbox.install()
    runs = tmp_path / "runs"
    env = {
        **os.environ,
        "SHOP_BROKER": rabbitmq_url,
        "SHOP_RESULTS": "rpc://",
        "SHOP_RUNS": str(runs),
    }
    app.send_task("shop.note", ("early",), via_outbox=True)
    app.send_task("shop.note", ("early too",), via_outbox=True, queue="reports")
    relay_once(outbox)
    command = [program("celery"), "-A", "tests.end_to_end.stock", "worker", "-P", "solo", *BARE]
    with running([*command, "-Q", "celery,reports"], tmp_path, env), ThreadPoolExecutor(1) as pool:
        wait_until(lambda: runs.exists() and len(runs.read_text().splitlines()) == 2, 60, "both")

        def send_and_wait() -> int:
            result = app.send_task("shop.add", (2, 3), via_outbox=True)
            try:
                return int(result.get(timeout=30))
            finally:
                app.backend.result_consumer.stop()

        # The address of the answers belongs to the thread that dispatches.
        address = pool.submit(lambda: app.thread_oid).result()
        answer = pool.submit(send_and_wait)
        wait_until(lambda: is_declared(rabbitmq_url, address), 20, "the queue of the answers")
        relay_once(outbox)
        assert answer.result(timeout=30) == 5
    app.close()
    engine.dispose()
    kombu.pools.reset()
