"""docs/testing.md: its conftest.py and its tests, put together, are a project that passes."""

import re

import pytest

from tests.pages import README, ROOT, SERVERS, blocks

pytest_plugins = ["pytester"]

IN_MEMORY = {
    'broker="redis://localhost/0"': 'broker="memory://", backend="cache+memory://"',
}

# The page's first test stands before the fixture that makes the tables.
TABLES = """
@pytest.fixture(autouse=True)
def installed(tables):
    pass
"""


def test_the_examples_of_the_page_pass(pytester: pytest.Pytester) -> None:
    page = ROOT / "docs" / "testing.md"
    shop, found = (
        blocks(each, pytester.path, language, IN_MEMORY | SERVERS)
        for each, language in ((README, "python"), (page, "py"))
    )
    conftest = [block for block in found if block.startswith("# conftest.py")]
    tests = [block for block in found if "def test_" in block]
    assert len(conftest) + len(tests) == len(found)
    pytester.makepyfile(
        shop=shop[0],
        conftest="".join(conftest) + TABLES,
        test_orders="import shop\n" + "".join(tests),
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "error", timeout=60)
    result.assert_outcomes(passed=len(re.findall("def test_", "".join(tests))))
