"""The table that is printed."""

import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tests.benchmarks.measuring import Ratio, Report


def show(console: Console, report: Report) -> None:
    """Print one benchmark's ratios and notes."""
    table = Table(title=report.title, title_justify="left", expand=False)
    table.add_column("name")
    for heading in ("ours", "theirs", "ratio (min–max)", "target", "met"):
        table.add_column(heading, justify="right", no_wrap=True)
    for ratio in report.ratios:
        table.add_row(*_cells(ratio))
    console.print(table)
    for note in report.notes:
        console.print(note)
    console.print()


def _cells(ratio: Ratio) -> Sequence[str]:
    met = {True: "yes", False: "[bold]NO[/bold]", None: ""}[ratio.is_met]
    return (
        ratio.name,
        _duration(statistics.median(ratio.ours)),
        _duration(statistics.median(ratio.theirs)),
        f"{ratio.value:.2f} ({min(ratio.each):.2f}–{max(ratio.each):.2f})",
        _target(ratio),
        met,
    )


def _target(ratio: Ratio) -> str:
    if ratio.times_faster:
        return f"≥ {ratio.times_faster:g} times faster"
    return "" if ratio.target is None else f"≤ {ratio.target:g}"


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms" if abs(seconds) >= 1e-3 else f"{seconds * 1e6:,.0f} µs"
