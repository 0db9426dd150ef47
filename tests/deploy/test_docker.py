"""The Dockerfile and its neighbour for Compose: the relay is process 1, and outwaited."""

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import yaml

from celery_outbox.relay.loop import STOP_SECONDS
from tests.deploy.conftest import APP, DEPLOY, assert_begins, seconds
from tests.processes import HOST


def instructions() -> dict[str, str]:
    """The last of each kind."""
    text = (DEPLOY / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name: rest.strip() for name, _, rest in (line.partition(" ") for line in lines)}


def words(name: str) -> list[str]:
    """The words of an instruction in the form without a shell."""
    found = json.loads(instructions()[name])
    assert isinstance(found, list)
    return found


def test_no_shell_stands_between_the_container_and_the_relay() -> None:
    assert words("ENTRYPOINT") == ["celery-outbox", "-A", APP]
    assert_begins([*words("ENTRYPOINT")[1:], *words("CMD")])
    assert instructions()["STOPSIGNAL"] == "SIGTERM"
    assert instructions()["USER"] == "10001"


def check() -> list[str]:
    """The command of the HEALTHCHECK."""
    options, _, command = instructions()["HEALTHCHECK"].partition("CMD ")
    assert all(each.startswith("--") for each in options.split())
    found = json.loads(command)
    assert isinstance(found, list)
    return found


@contextmanager
def answering(status: int) -> Iterator[int]:
    """A server that gives /healthz this status, and other paths none; its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/healthz" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer((HOST, 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(("status", "expected"), [(200, 0), (503, 1)])
def test_the_health_check_fails_when_the_relay_is_unhealthy(status: int, expected: int) -> None:
    port = words("CMD")[words("CMD").index("--metrics-port") + 1]
    interpreter, flag, code = check()
    assert (interpreter, flag, code.count(f":{port}/")) == ("python", "-c", 1)
    with answering(status) as ours:
        code = code.replace(f":{port}/", f":{ours}/")
        done = subprocess.run([sys.executable, flag, code], capture_output=True, check=False)
    assert done.returncode == expected


def test_compose_runs_what_the_command_understands_and_outwaits_it() -> None:
    services = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]
    assert set(services) == {"schema", "relay"}
    assert_begins(["-A", APP, *services["schema"]["command"]])
    assert "command" not in services["relay"]
    assert services["relay"]["restart"] == "always"
    assert services["relay"]["depends_on"]["schema"]["condition"] == "service_completed_successfully"
    for service in services.values():
        assert seconds(service["stop_grace_period"]) > STOP_SECONDS
        assert service["mem_limit"]
