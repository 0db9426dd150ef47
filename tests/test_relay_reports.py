"""What an operator sees of a relay that cannot work: its exit code and its log."""

import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.waiting import wait_until

COMMAND = [str(Path(sys.executable).with_name("celery-outbox")), "-A", "shop", "relay"]

SHOP = """
from celery import Celery
from celery_outbox import Outbox

app = Celery("shop", broker="sqla+sqlite:///file:broker.db?mode=ro&uri=true")
outbox = Outbox(app, databases={"default": "sqlite:///shop.db"}, retry={"base_delay": 0.05})
"""

STORE = """
import shop, kombu

shop.outbox.install()
shop.app.send_task("pack", via_outbox=True)
kombu.Connection("sqla+sqlite:///broker.db").default_channel.queue_declare("celery")
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """The directory of an application whose broker can be read, and not written."""
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def attempts(directory: Path) -> int:
    engine = sa.create_engine(f"sqlite:///{directory / 'shop.db'}", poolclass=sa.NullPool)
    with engine.connect() as connection:
        return connection.scalar(sa.text("SELECT max(attempts) FROM celery_outbox")) or 0


def test_a_relay_whose_only_database_has_no_table_ends_with_exit_code_1(shop: Path) -> None:
    done = subprocess.run([*COMMAND, "--once"], cwd=shop, timeout=30, check=False)
    assert done.returncode == 1


def test_a_relay_logs_an_outage_once_until_a_message_was_delivered(shop: Path) -> None:
    subprocess.run([sys.executable, "-c", STORE], cwd=shop, timeout=30, check=True)
    log = shop / "relay.log"
    with (
        log.open("wb") as output,
        subprocess.Popen([*COMMAND, "--sleep", "0.05"], cwd=shop, stderr=output) as relay,
    ):
        try:
            wait_until(lambda: attempts(shop) >= 3, timeout=30)
        finally:
            relay.terminate()
    assert log.read_text().count("cannot be used") == 1
    assert "can be used again" not in log.read_text()
