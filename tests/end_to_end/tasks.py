"""What the tasks of the end-to-end tests do; plain functions that know no app.

Each run leaves a line in the file that ``SHOP_RUNS`` names.
"""

import os
from pathlib import Path


def note(what: str) -> str:
    """Leave a line behind."""
    with Path(os.environ["SHOP_RUNS"]).open("a") as runs:
        runs.write(f"{what}\n")
    return what


def add(x: int, y: int) -> int:
    """Add, and leave a line behind."""
    note(f"add {x} {y}")
    return x + y


def total(numbers: list[int]) -> int:
    """Sum up a chord's header, and leave a line behind."""
    note(f"total {sorted(numbers)}")
    return sum(numbers)
