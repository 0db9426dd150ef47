"""The pictures of the documentation: each is shown on a page, and none tells of this machine."""

import re
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT
from tests.pictures.drawing import PICTURES, draw

DRAWN = sorted(PICTURES.glob("*.svg"))


def test_each_picture_is_on_a_page_and_each_page_has_its_pictures() -> None:
    shown = {name for page in PAGES for name in re.findall(r"\(pictures/(.*?)\)", page.read_text())}
    assert shown == {path.name for path in DRAWN}


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_a_picture_asks_nobody_for_anything_and_tells_no_path(path: Path) -> None:
    text = path.read_text()
    assert "url(http" not in text
    assert "@import" not in text
    assert "Traceback" not in text
    for place in (str(ROOT), str(Path.home()), "/tmp/", "127.0.0.1"):
        assert place not in text


def test_drawing_the_same_screen_again_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.pictures.drawing.PICTURES", tmp_path)
    texts = set()
    for time in ("11:22:33", "23:59:59"):
        draw("page", "title", f"{time} UTC, every 2 s, q quits", 45)
        texts.add((tmp_path / "page.svg").read_text())
    (text,) = texts
    assert "every&#160;2&#160;s" in text
