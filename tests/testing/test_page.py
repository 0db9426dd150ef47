"""docs/testing.md: its conftest.py and its tests, put together, are a project that passes."""

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

DOCS = Path(__file__).parents[2] / "docs"

# The page's first test stands before the fixture that makes the tables.
TABLES = """
@pytest.fixture(autouse=True)
def installed(tables):
    pass
"""


def test_the_examples_of_the_page_pass(pytester: pytest.Pytester) -> None:
    readme = (DOCS.parent / "README.md").read_text()
    shop = re.search(r"^```python\n(.*?)^```$", readme, flags=re.MULTILINE | re.DOTALL)
    assert shop is not None
    text = shop[1].replace("postgresql+psycopg://localhost/shop", "sqlite:///shop.db")
    text = text.replace('broker="redis://localhost/0"', 'broker="memory://", backend="cache+memory://"')
    page = (DOCS / "testing.md").read_text()
    blocks = re.findall(r"^```py\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    conftest = [block for block in blocks if block.startswith("# conftest.py")]
    tests = [block for block in blocks if "def test_" in block]
    assert len(conftest) + len(tests) == len(blocks)
    pytester.makepyfile(
        shop=text,
        conftest="".join(conftest) + TABLES,
        test_orders="import shop\n" + "".join(tests),
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "error", timeout=60)
    result.assert_outcomes(passed=len(re.findall("def test_", "".join(tests))))
