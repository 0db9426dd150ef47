"""How a screen becomes a picture."""

import io
import re

from rich.console import Console, RenderableType

from tests.pages import ROOT

PICTURES = ROOT / "docs" / "pictures"


def draw(name: str, title: str, screen: RenderableType, columns: int) -> None:
    """Write what a terminal of so many columns shows to a file."""
    console = Console(record=True, width=columns, highlight=False, file=io.StringIO())
    console.print(screen)
    # Without an id of its own it would differ from time to time.
    svg = console.export_svg(title=title, unique_id=name)
    # The fonts would come from another host.
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    # The time of day at which the page was drawn.
    svg = re.sub(r"\d\d:\d\d:\d\d(?=&#160;UTC,&#160;every)", "12:02:18", svg)
    lines = [line.rstrip() for line in svg.splitlines() if line.strip()]
    (PICTURES / f"{name}.svg").write_text("\n".join(lines) + "\n")
