"""The units of systemd: read by systemd itself, by the command, and run."""

import shutil
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

from celery_outbox.commands.relay import OUT_OF_MEMORY
from celery_outbox.relay.loop import STOP_SECONDS
from tests.deploy.conftest import DEPLOY, PROGRAM, assert_begins, exec_start, seconds, unit, variables
from tests.processes import HOST, unused_port
from tests.relay.apps import make_outbox, rows, send
from tests.relay.commands import environment, program, running
from tests.relay.wire import task_ids
from tests.waiting import wait_until

UNITS = ["celery-outbox-relay.service", "celery-outbox-relay@.service"]
EXAMPLE = variables((DEPLOY / "systemd" / "relay.env").read_text())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
@pytest.mark.parametrize("name", UNITS)
def test_systemd_has_nothing_to_say_against_a_unit(name: str, tmp_path: Path) -> None:
    copy = tmp_path / name.replace("@", "@9808")
    copy.write_text((DEPLOY / "systemd" / name).read_text().replace(PROGRAM, program("celery-outbox")))
    command = ["systemd-analyze", "verify", "--man=no", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    ours = [line for line in done.stderr.splitlines() if "celery-outbox" in line]
    assert (done.returncode, ours) == (0, [])


@pytest.mark.parametrize("name", UNITS)
def test_the_relay_understands_the_command_line_of_a_unit(name: str) -> None:
    command = exec_start(name, EXAMPLE, instance="9809")
    assert command[0] == PROGRAM
    assert_begins(command[1:])


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_outwaits_the_relay_and_always_starts_it_again(name: str) -> None:
    read = unit(name)
    service = read["Service"]
    assert seconds(service["TimeoutStopSec"]) > STOP_SECONDS
    assert service["KillSignal"] == "SIGTERM"
    assert service["Restart"] == "always"
    assert "RestartPreventExitStatus" not in service
    assert service["SuccessExitStatus"] == str(OUT_OF_MEMORY)
    assert read["Unit"]["StartLimitIntervalSec"] == "0"
    assert "MemoryMax" in service


def test_the_template_is_the_unit_with_a_port_of_its_own() -> None:
    one, template = (dict(unit(name)["Service"]) for name in UNITS)
    assert template.pop("ExecStart") == f"{one.pop('ExecStart')} --metrics-port %i"
    assert template == one


@pytest.mark.parametrize("name", UNITS)
def test_what_a_unit_starts_delivers_and_ends_in_time_with_exit_code_0(
    name: str, sqlite_url: str, tmp_path: Path
) -> None:
    broker = f"sqla+sqlite:///{tmp_path / 'broker.db'}"
    engine = sa.create_engine(sqlite_url)
    shop = make_outbox(broker, engine)
    port = str(unused_port())
    told = EXAMPLE | {"RELAY_OPTIONS": EXAMPLE["RELAY_OPTIONS"].replace("9808", port)}
    command = exec_start(name, told, instance=port)
    command[0] = program("celery-outbox")
    command[command.index("-A") + 1] = "tests.relay.shop"
    with running(command, tmp_path, environment(broker=broker, database=sqlite_url)) as relay:
        relay.wait_for("Relaying from")
        stored = send(shop)
        wait_until(lambda: not rows(shop), 30, "the delivery")
        for path in ("healthz", "readyz", "metrics"):
            assert httpx.get(f"http://{HOST}:{port}/{path}").status_code == 200
        relay.send(signal.SIGTERM)
        assert relay.wait(seconds(unit(name)["Service"]["TimeoutStopSec"])) == 0, relay.output
        assert "Traceback" not in relay.output
    assert task_ids(broker) == [stored]
    engine.dispose()
