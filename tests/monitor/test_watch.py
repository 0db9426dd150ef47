"""``monitor --watch``: a page on a terminal, blocks of lines elsewhere; and how it ends."""

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from celery_outbox.storage.database import Database
from celery_outbox.storage.install import install
from tests.monitor.terminal import FIRST_SCREEN, OTHER_SCREEN, SHOWN_CURSOR, terminal
from tests.proxy import TcpProxy
from tests.relay.commands import outbox_command, running
from tests.schema.test_check import PROJECT, environment
from tests.storage.rows import add, change, make_message
from tests.waiting import wait_until

WATCH = ("monitor", "--watch", "--interval", "0.2")


@pytest.fixture
def engine(sqlite_url: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(sqlite_url)
    yield engine
    engine.dispose()


@pytest.fixture
def shop(engine: sa.Engine) -> Database:
    database = Database("shop", engine, "celery_outbox")
    install(database)
    return database


def fail_a_message(database: Database) -> None:
    add(database, make_message("bad", queue="receipts"))
    error = "ConnectionRefusedError: [Errno 111] nobody listens at broker.example.org, tried 3 times"
    change(database, "bad", attempts=3, error=error)


def test_the_page_follows_what_happens(shop: Database, sqlite_url: str) -> None:
    with terminal(100, *WATCH, shop=sqlite_url) as it:
        assert "no relay is running" in it.wait_for("waiting", "0 ▁▁", "oldest due")
        add(shop, make_message("a"), make_message("b"))
        it.wait_for("waiting               2 ▁", "▁█", "NO RELAY is running")
        page = it.wait_for("stored            0.0/s")
        assert re.search(r"^stored .*[▂-█]", page, re.MULTILINE)


def test_what_fails_stands_on_top(shop: Database, sqlite_url: str) -> None:
    fail_a_message(shop)
    with terminal(100, *WATCH, shop=sqlite_url) as it:
        page = it.wait_for("failing shop, receipts: 1 message, 3 attempts: ConnectionRefusedError")
        assert page.index("failing") < page.index("waiting")


@pytest.mark.parametrize("keys", ["q", "Q", "\x1b", "\x03"], ids=["q", "Q", "Esc", "Ctrl-C"])
def test_a_key_quits_and_leaves_the_terminal_as_it_was(
    keys: str, shop: Database, sqlite_url: str
) -> None:
    with terminal(80, *WATCH, shop=sqlite_url) as it:
        it.wait_for("waiting")
        assert OTHER_SCREEN in it.written
        assert it.settings != it.settings_before
        it.type(keys)
        assert it.wait() == 0
        wait_until(lambda: FIRST_SCREEN in it.written)
        assert it.written.rindex(SHOWN_CURSOR) > it.written.rindex("\x1b[?25l")
        assert it.settings == it.settings_before
        assert "Traceback" not in it.written


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_quits_and_leaves_the_terminal_as_it_was(
    number: signal.Signals, shop: Database, sqlite_url: str
) -> None:
    with terminal(80, *WATCH, shop=sqlite_url) as it:
        it.wait_for("waiting")
        it.process.send_signal(number)
        assert it.wait() == 0
        wait_until(lambda: FIRST_SCREEN in it.written)
        assert it.settings == it.settings_before
        assert "Traceback" not in it.written


def test_other_keys_do_nothing(shop: Database, sqlite_url: str) -> None:
    with terminal(80, *WATCH, shop=sqlite_url) as it:
        it.wait_for("waiting")
        it.type("x\x1b[A \n")
        add(shop, make_message())
        it.wait_for("waiting               1")


def test_the_page_fits_after_a_resize(shop: Database, sqlite_url: str) -> None:
    fail_a_message(shop)
    add(shop, make_message(broker="warehouse"))
    with terminal(120, *WATCH, shop=sqlite_url) as it:
        wide = it.wait_for("broker     ready  delayed  retrying")
        assert max(map(len, wide.splitlines())) <= 120
        it.resize(40, 60)

        def is_narrow() -> str:
            page = it.page
            fits = max(map(len, page.splitlines()), default=99) <= 40
            return page if fits and "no relay is running" in page else ""

        page = wait_until(is_narrow, 20, "a page of forty columns")
        for part in ("waiting", "2 ", "broker      warehouse", "failing shop, receipts"):
            assert part in page


def test_a_stopped_page_gives_the_terminal_back_until_it_goes_on(
    shop: Database, sqlite_url: str
) -> None:
    with terminal(80, *WATCH, shop=sqlite_url) as it:
        it.wait_for("waiting")
        it.process.send_signal(signal.SIGTSTP)
        wait_until(lambda: FIRST_SCREEN in it.written and it.settings == it.settings_before)
        wait_until(lambda: state_of(it.process.pid) == "T", message="a stopped process")
        it.process.send_signal(signal.SIGCONT)
        add(shop, make_message())
        it.wait_for("waiting               1")
        assert it.settings != it.settings_before
        assert it.written.count(OTHER_SCREEN) == 2


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_database_that_goes_away_is_told_of_until_it_is_back(
    postgresql_url: str, sqlite_url: str, shop: Database, tcp_proxy: Callable[[str, int], TcpProxy]
) -> None:
    url = sa.make_url(postgresql_url)
    proxy = tcp_proxy(url.host or "", url.port or 0)
    engine = sa.create_engine(postgresql_url)
    billing = Database("billing", engine, "celery_outbox")
    install(billing)
    urls = {"shop": sqlite_url, "billing": proxy.through(postgresql_url)}
    with terminal(100, *WATCH, **urls) as it:
        wait_until(lambda: it.page.count("waiting") == 2)
        proxy.refuse()
        proxy.cut()
        it.wait_for("DOWN: database 'billing'", "as of ")
        add(shop, make_message())
        add(billing, make_message("x"), make_message("y"))
        it.wait_for("waiting               1", "DOWN")
        proxy.listen()
        page = wait_until(lambda: it.page if "DOWN" not in it.page else "", 20)
        assert re.search(r"waiting +2 .*▁ +█", page), page  # a gap while it was away
        it.type("q")
        assert it.wait() == 0
    engine.dispose()


def test_a_database_that_hangs_holds_up_neither_the_page_nor_its_end(
    postgresql_url: str, sqlite_url: str, shop: Database, tcp_proxy: Callable[[str, int], TcpProxy]
) -> None:
    url = sa.make_url(postgresql_url)
    proxy = tcp_proxy(url.host or "", url.port or 0)
    engine = sa.create_engine(postgresql_url)
    install(Database("billing", engine, "celery_outbox"))
    engine.dispose()
    urls = {"billing": proxy.through(postgresql_url), "shop": sqlite_url}
    with terminal(100, *WATCH, **urls) as it:
        wait_until(lambda: it.page.count("waiting") == 2)
        proxy.stall()
        it.wait_for("DOWN: database 'billing': expected an answer within")
        add(shop, make_message())
        it.wait_for("waiting               1")
        it.type("q")
        assert it.wait() == 0
        proxy.resume()


def test_without_a_terminal_each_round_is_a_block_of_lines(
    shop: Database, sqlite_url: str, tmp_path: Path
) -> None:
    fail_a_message(shop)
    command = outbox_command(*WATCH, app=PROJECT)
    with running(command, tmp_path, environment(shop=sqlite_url)) as process:
        block = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\nshop: 1 message waits[^\n]*\n(?:[^\n]+\n)+\n"
        wait_until(lambda: len(re.findall(block, process.output)) >= 2, 20)
        add(shop, make_message("next"))
        process.wait_for("shop: 2 messages wait")
        assert "\x1b" not in process.output
        process.send(signal.SIGTERM)
        assert process.wait() == 0
        assert "Traceback" not in process.output


def test_a_block_names_a_database_that_is_down(shop: Database, sqlite_url: str, tmp_path: Path) -> None:
    down = "postgresql+psycopg://shop:hunter2@127.0.0.1:1/shop"
    command = outbox_command(*WATCH, app=PROJECT)
    with running(command, tmp_path, environment(down=down, shop=sqlite_url)) as process:
        process.wait_for("Error: database 'down': OperationalError")
        process.wait_for("shop: nothing waits")
        assert "hunter2" not in process.output
        process.send(signal.SIGINT)
        assert process.wait() == 0
