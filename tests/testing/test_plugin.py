"""The plugin in a user's project: found by pytest, told of an app, and out of the way otherwise.

Each project runs in a process of its own, as a user's would.
"""

import subprocess
import sys
from importlib import metadata

import pytest

pytest_plugins = ["pytester"]

SHOP = """
from celery import Celery
from celery_outbox import Outbox

app = Celery("shop", broker="memory://", set_as_current={current})
outbox = Outbox(app, databases={{"default": "sqlite:///shop.db"}})

@app.task(name="shop.receipt")
def receipt(number):
    return number
"""

CONFTEST = """
import pytest
from celery import Celery, current_app
import shop

@pytest.fixture{scope}
def outbox_app():
    return {returned}
"""

TEST = """
import shop

def test_receipt(outbox_fake):
    shop.receipt.apply_async((7,), via_outbox=True)
    outbox_fake.assert_stored(shop.receipt, args=[{expected}])
"""


def make_project(pytester: pytest.Pytester, *, current: bool = False) -> None:
    pytester.makepyfile(shop=SHOP.format(current=current))


def add_tests(
    pytester: pytest.Pytester, directory: str, returned: str, scope: str = "", expected: int = 7
) -> None:
    """Add a directory of tests, whose conftest.py returns that."""
    pytester.mkpydir(directory)
    pytester.makepyfile(
        **{
            f"{directory}/conftest": CONFTEST.format(scope=scope, returned=returned),
            f"{directory}/test_{directory}": TEST.format(expected=expected),
        }
    )


def run(pytester: pytest.Pytester) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "error", timeout=100)


def test_the_package_announces_its_plugin() -> None:
    [plugin] = metadata.entry_points(group="pytest11", name="celery_outbox")
    assert plugin.value == "celery_outbox.testing"


def test_a_project_names_its_app_or_its_outbox(pytester: pytest.Pytester) -> None:
    make_project(pytester)
    add_tests(pytester, "with_app", "shop.app")
    add_tests(pytester, "with_outbox", "shop.outbox", scope='(scope="session")')
    run(pytester).assert_outcomes(passed=2)


def test_without_being_told_the_plugin_takes_the_current_app(pytester: pytest.Pytester) -> None:
    make_project(pytester, current=True)
    pytester.makepyfile(test_shop=TEST.format(expected=7))
    run(pytester).assert_outcomes(passed=1)


def test_without_an_outbox_an_error_tells_what_to_define(pytester: pytest.Pytester) -> None:
    make_project(pytester)
    pytester.makepyfile(test_shop=TEST.format(expected=7))
    add_tests(pytester, "with_bare_app", "Celery('bare')")
    add_tests(pytester, "with_text", "'shop.app'")
    result = run(pytester)
    result.assert_outcomes(errors=3)
    for found in ("<Celery default at *>", "<Celery bare at *>", "'shop.app'"):
        result.stdout.fnmatch_lines_random(
            [f"E *ConfigurationError: outbox_app: expected a Celery app with an Outbox*found {found}.*"]
        )
    result.stdout.fnmatch_lines(["E *@pytest.fixture", "E *def outbox_app():", "E *return app"])


def test_a_failure_points_at_the_line_of_the_test(pytester: pytest.Pytester) -> None:
    make_project(pytester)
    add_tests(pytester, "with_app", "shop.app", expected=8)
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            ">*outbox_fake.assert_stored(shop.receipt, args=[[]8[]])",
            "E *expected shop.receipt to be stored at least once with args [[]8[]]*",
            "E *stored:",
            "E *shop.receipt(7)",
            "with_app/test_with_app.py:*: AssertionError",
        ]
    )
    result.stdout.no_fnmatch_line("*celery_outbox/testing/*")


def test_a_project_that_asks_for_no_fixture_meets_nothing_of_the_outbox(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_nothing():
            loaded = {name.partition(".")[0] for name in sys.modules}
            assert not loaded & {"celery", "kombu", "sqlalchemy"}
        """
    )
    run(pytester).assert_outcomes(passed=1)


def test_loading_the_plugin_wraps_nothing_of_celery() -> None:
    code = """
import celery_outbox.testing
from celery import Celery
from celery.app.task import Task

for function in (Celery.send_task, Task.apply_async, Task.retry):
    assert function.__module__.startswith("celery."), function
    assert not hasattr(function, "__wrapped__"), function
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], timeout=60, check=True)
