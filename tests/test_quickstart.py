"""The quickstart runs as its reader runs it, and its verdict can fail."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent


def environment(directory: Path) -> dict[str, str]:
    return {
        **os.environ,
        "QUICKSTART_PYTHON": sys.executable,
        "QUICKSTART_DIR": str(directory),
        "PYTHONPATH": str(ROOT),
    }


def quickstart(root: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [root / "examples" / "quickstart.sh"],
        env=environment(directory),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )


def working_in(directory: Path) -> set[str]:
    """The processes that were started in the directory and still run."""
    return {
        process.name
        for process in Path("/proc").glob("[0-9]*")
        if (cwd := current_directory(process)) is not None and cwd.is_relative_to(directory)
    }


def current_directory(process: Path) -> Path | None:
    try:
        return (process / "cwd").readlink()
    except OSError:  # it has just ended, or is not ours
        return None


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkout whose examples a test may spoil."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "examples", root / "examples")
    return root


def spoil(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))


def test_the_quickstart_delivers_the_committed_task_and_says_so(tmp_path: Path) -> None:
    done = quickstart(ROOT, tmp_path)
    assert "VERDICT: stored with its order, delivered after the outage, executed once." in done.stdout
    assert done.returncode == 0
    assert "\033" not in done.stdout
    assert not working_in(tmp_path)


def test_the_quickstart_fails_when_an_order_is_not_rolled_back(copy: Path, tmp_path: Path) -> None:
    shop = copy / "examples" / "quickstart" / "shop"
    spoil(shop / "checkout.py", "raise PaymentDeclinedError", "return")
    done = quickstart(copy, tmp_path)
    assert "FAILED  Expected, but not so: The committed order and its task are stored" in done.stdout
    assert "VERDICT: FAILED." in done.stdout
    assert done.returncode == 1


def test_the_quickstart_fails_when_the_task_leaves_two_receipts(copy: Path, tmp_path: Path) -> None:
    shop = copy / "examples" / "quickstart" / "shop"
    receipt = "session.add(Receipt(order_id=order.id, task_id=self.request.id, text=text))"
    spoil(shop / "tasks.py", receipt, f"{receipt}\n        {receipt}")
    done = quickstart(copy, tmp_path)
    assert "FAILED  Expected, but not so: The worker ran the task once" in done.stdout
    assert done.returncode == 1
    assert not working_in(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_quickstart_takes_its_processes_along_when_it_is_stopped(
    number: signal.Signals, tmp_path: Path
) -> None:
    log = tmp_path / "data" / "relay.log"
    # A shell cannot trap what it was started to ignore, as CI may have these tests ignore SIGINT.
    command = ["env", "--default-signal", ROOT / "examples" / "quickstart.sh"]
    with subprocess.Popen(
        command,
        env=environment(tmp_path),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as tour:
        try:
            wait_until(lambda: log.exists() and "cannot be used" in log.read_text(), timeout=30)
            assert working_in(tmp_path)
            tour.send_signal(number)
            assert tour.wait(timeout=30) == 128 + number
        finally:
            tour.kill()
    assert not working_in(tmp_path)
