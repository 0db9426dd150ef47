"""What dispatches say about the outbox: the four options, and how levels of saying add up.

A call beats the canvas that it is part of, which beats the task, which beats the app. Naming a
database or a broker says "store". A None given at one level clears what lower levels say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ..config import read_retry
from ..errors import ConfigurationError, OptionError
from ..policy import RetryPolicy
from .scoped import scoped

__all__ = ["OPTIONS", "Choice", "Level", "choose", "choosing", "of_canvas", "of_task", "take", "under"]

#: The options of ours: taken out at the doors, never on the wire.
OPTIONS = ("via_outbox", "outbox_database", "outbox_broker", "outbox_retry")

Level = Mapping[str, Any]

_of_canvas: ContextVar[Level] = ContextVar("celery_outbox_of_canvas", default={})  # noqa: B039 - never changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """That a dispatch is stored, and what it asked for; None stands for "choose for me"."""

    database: str | None = None
    broker: str | None = None
    retry: RetryPolicy | None = None


def take(options: dict[str, Any]) -> dict[str, Any]:
    """Take our options out of ``options``."""
    return {option: options.pop(option) for option in OPTIONS if option in options}


def of_task(task: Any) -> Level:
    """What a task says by its attributes."""
    return {option: value for option in OPTIONS if (value := getattr(task, option, None)) is not None}


def of_canvas() -> Level:
    """What the canvas that is being dispatched says to members that say nothing."""
    return _of_canvas.get()


def choosing(level: Level) -> scoped[Level]:
    """Make ``level`` what the canvas says, for the dispatches inside."""
    return scoped(_of_canvas, level)


def under(outer: Level, inner: Level) -> Level:
    """What holds inside ``inner``: its own words, else those around it."""
    said = {option: value for option, value in inner.items() if value is not None}
    # A canvas that is sent directly has no use for a database named outside it.
    return said if _wish(said) is False else {**outer, **said}


def choose(levels: Sequence[Level], *, default: bool, retry: RetryPolicy) -> Choice | None:
    """Add levels up, the one that beats the others first; None: the dispatch is sent directly.

    Raises OptionError for values and combinations that make no sense.
    """
    wish: bool | None = None
    merged: dict[str, Any] = {}
    for level in filter(None, levels):
        said = {option: value for option, value in level.items() if option not in merged}
        if wish is None:
            wish = _wish(said)
        merged |= said
    if not (default if wish is None else wish):
        return None
    return Choice(
        database=merged.get("outbox_database"),
        broker=merged.get("outbox_broker"),
        retry=_retry(merged.get("outbox_retry"), retry),
    )


def _retry(asked: Any, of_app: RetryPolicy) -> RetryPolicy | None:
    try:
        return None if asked is None else read_retry("outbox_retry", asked, of_app)
    except ConfigurationError as error:
        raise OptionError(str(error)) from error


def _wish(said: Level) -> bool | None:
    """What one level says: True to store, False to send, None for nothing."""
    via = said.get("via_outbox")
    if via is not None and not isinstance(via, bool):
        raise OptionError(f"via_outbox: expected True, False or None, got {via!r}.")
    named = [each for each in ("outbox_database", "outbox_broker") if said.get(each) is not None]
    if via is False and named:
        raise OptionError(
            f"expected via_outbox=False alone, found it together with {', '.join(named)}. Clear an "
            f"earlier choice with .set({named[0]}=None), or leave via_outbox=False away."
        )
    return True if named else via
