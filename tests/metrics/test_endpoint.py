"""``relay --metrics-port``: the numbers of a real relay, as Prometheus reads them."""

import socket
from pathlib import Path

from tests.metrics.scraping import showing
from tests.processes import HOST, unused_port
from tests.relay.apps import rows, send
from tests.relay.commands import environment, outbox_command, run
from tests.relay.conftest import OpenOutbox
from tests.relay.wire import task_ids
from tests.storage.rows import change
from tests.waiting import wait_until

#: Read by Python itself before anything else: prometheus-client is not there.
WITHOUT = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "prometheus_client":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
"""


def test_a_relay_shows_what_it_has_delivered_and_what_has_failed(
    open_outbox: OpenOutbox, redis_url: str, postgresql_url: str, tmp_path: Path
) -> None:
    outbox = open_outbox(redis_url, postgresql_url)
    bad = send(outbox)
    change(outbox.databases["default"], bad, message="no envelope")
    for _ in range(3):
        send(outbox)
    with showing(tmp_path, environment(broker=redis_url, database=postgresql_url)) as relay:
        wait_until(lambda: relay.number("celery_outbox_published_total{default,shop}") == 3)
        numbers = relay.numbers()
        assert numbers["celery_outbox_failed_total{default,shop}"] == 1
        assert numbers["celery_outbox_deferred_total{default,shop}"] == 0
        assert numbers["celery_outbox_lease_lost_total{default,shop}"] == 0
        assert numbers["celery_outbox_wait_seconds_count{default,shop}"] == 3
        assert 0 < numbers["celery_outbox_wait_seconds_sum{default,shop}"] < 3 * 60
        assert numbers["celery_outbox_wait_seconds_bucket{default,shop,0.005}"] == 0
        assert numbers["celery_outbox_wait_seconds_bucket{default,shop,+Inf}"] == 3
        assert numbers["celery_outbox_batch_seconds_count{default,shop}"] >= 1
        assert numbers["celery_outbox_database_up{default}"] == 1
    assert [row.task_id for row in rows(outbox)] == [bad]


def test_a_relay_shows_what_waits_for_each_broker_in_each_state(
    open_outbox: OpenOutbox, redis_url: str, sqlite_url: str, tmp_path: Path
) -> None:
    outbox = open_outbox(redis_url, sqlite_url)
    for broker in ("shop", "other", "other"):
        stored = send(outbox, countdown=24 * 3600)
        change(outbox.databases["default"], stored, broker=broker)
    with showing(tmp_path, environment(broker=redis_url, database=sqlite_url)) as relay:
        numbers = relay.numbers()
        backlog = {name: value for name, value in numbers.items() if "backlog" in name and value}
        assert backlog == {
            "celery_outbox_backlog{default,shop,delayed}": 1,
            "celery_outbox_backlog{default,other,delayed}": 2,
        }
        assert numbers["celery_outbox_oldest_age_seconds{default,shop}"] == 0
        assert numbers["celery_outbox_oldest_age_seconds{default,other}"] == 0


def test_the_age_of_the_oldest_counts_from_its_intended_time(
    open_outbox: OpenOutbox, sqlite_url: str, tmp_path: Path
) -> None:
    away = f"redis://{HOST}:{unused_port()}/0"
    send(open_outbox(away, sqlite_url))
    with showing(tmp_path, environment(broker=away, database=sqlite_url)) as relay:
        name = "celery_outbox_oldest_age_seconds{default,shop}"
        first = wait_until(lambda: relay.number(name))
        assert wait_until(lambda: (now := relay.number(name) or 0) > first and now, 15) < 60


def test_numbers_are_there_and_zero_before_anything_happens(
    open_outbox: OpenOutbox, redis_url: str, sqlite_url: str, tmp_path: Path
) -> None:
    open_outbox(redis_url, sqlite_url)
    with showing(tmp_path, environment(broker=redis_url, database=sqlite_url)) as relay:
        numbers = relay.numbers()
    for name in ("published_total", "failed_total", "deferred_total", "lease_lost_total"):
        assert numbers[f"celery_outbox_{name}{{default,shop}}"] == 0
    assert numbers["celery_outbox_wait_seconds_count{default,shop}"] == 0


def test_a_database_that_is_down_is_said_to_be_and_has_no_backlog(
    redis_url: str, tmp_path: Path
) -> None:
    down = f"postgresql+psycopg://shop:hunter2@{HOST}:{unused_port()}/shop"
    with showing(tmp_path, environment(broker=redis_url, database=down)) as relay:
        numbers = relay.numbers()
        _, text = relay.ask("/metrics")
    assert numbers["celery_outbox_database_up{default}"] == 0
    assert not [name for name in numbers if "backlog" in name or "oldest" in name]
    assert numbers["celery_outbox_published_total{default,shop}"] == 0
    assert "hunter2" not in text


def test_nothing_of_a_task_is_shown(
    open_outbox: OpenOutbox, redis_url: str, sqlite_url: str, tmp_path: Path
) -> None:
    outbox = open_outbox(redis_url, sqlite_url)
    stored = [send(outbox, "4111-1111", 2), send(outbox, "4111-1111", 3, countdown=24 * 3600)]
    change(outbox.databases["default"], stored[0], message="4111-1111")
    with showing(tmp_path, environment(broker=redis_url, database=sqlite_url)) as relay:
        wait_until(lambda: relay.number("celery_outbox_failed_total{default,shop}"))
        said = "".join(relay.ask(path)[1] for path in ("/metrics", "/healthz", "/readyz", "/else"))
    assert "celery_outbox_failed_total" in said
    for secret in (*stored, "4111-1111", "shop.add"):
        assert secret not in said


def test_many_scrapes_do_not_ask_the_database_more_often(
    open_outbox: OpenOutbox, redis_url: str, sqlite_url: str, tmp_path: Path
) -> None:
    outbox = open_outbox(redis_url, sqlite_url)
    name = "celery_outbox_backlog{default,shop,delayed}"
    with showing(tmp_path, environment(broker=redis_url, database=sqlite_url)) as relay:
        assert relay.number(name) == 0
        send(outbox, countdown=24 * 3600)
        assert [relay.number(name) for _ in range(20)] == [0] * 20
        wait_until(lambda: relay.number(name) == 1, 15)


def test_other_paths_are_not_found(
    open_outbox: OpenOutbox, redis_url: str, sqlite_url: str, tmp_path: Path
) -> None:
    open_outbox(redis_url, sqlite_url)
    with showing(tmp_path, environment(broker=redis_url, database=sqlite_url)) as relay:
        assert relay.ask("/")[0] == 404


def test_a_port_in_use_is_an_error_before_anything_is_relayed(
    open_outbox: OpenOutbox, redis_url: str, sqlite_url: str
) -> None:
    outbox = open_outbox(redis_url, sqlite_url)
    send(outbox)
    with socket.create_server((HOST, 0)) as taken:
        port = str(taken.getsockname()[1])
        command = outbox_command("relay", "--once", "--metrics-port", port, "--metrics-host", HOST)
        done = run(command, environment(broker=redis_url, database=sqlite_url))
    assert done.returncode == 1
    assert f"expected to listen on {HOST} port {port}, found: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr
    assert (len(rows(outbox)), task_ids(redis_url)) == (1, [])


def test_without_prometheus_client_the_port_is_refused_and_the_rest_works(
    open_outbox: OpenOutbox, redis_url: str, sqlite_url: str, tmp_path: Path
) -> None:
    outbox = open_outbox(redis_url, sqlite_url)
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    env = environment(broker=redis_url, database=sqlite_url)
    env["PYTHONPATH"] = f"{tmp_path}:{Path.cwd()}"
    refused = run(outbox_command("relay", "--metrics-port", str(unused_port())), env)
    assert refused.returncode == 1
    assert "expected the package prometheus-client, found none" in refused.stderr
    assert "celery-outbox[metrics]" in refused.stderr
    assert "Traceback" not in refused.stderr
    send(outbox)
    assert run(outbox_command("relay", "--stop-when-empty"), env).returncode == 0
    assert rows(outbox) == []


def test_a_limit_for_the_health_alone_is_wrong_usage() -> None:
    done = run(outbox_command("relay", "--unhealthy-after", "5m"))
    assert done.returncode == 2, done.stderr


def test_a_relay_that_is_told_to_end_ends_while_it_is_asked(
    open_outbox: OpenOutbox, redis_url: str, sqlite_url: str, tmp_path: Path
) -> None:
    open_outbox(redis_url, sqlite_url)
    with showing(tmp_path, environment(broker=redis_url, database=sqlite_url)) as relay:
        with socket.create_connection((HOST, relay.port)) as silent:
            silent.sendall(b"GET /metrics HT")
            relay.process.popen.terminate()
            assert relay.process.wait(10) == 0
        assert "Traceback" not in relay.process.output
