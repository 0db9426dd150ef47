"""The time at which a task shall run, read as its worker will read it."""

from __future__ import annotations

from datetime import datetime, tzinfo

from celery.utils.time import maybe_iso8601, maybe_make_aware

from ..errors import OptionError

__all__ = ["read_eta"]


def read_eta(eta: datetime | str | None, timezone: tzinfo) -> datetime | None:
    """Read an ``eta`` or the header of that name; what is naive is in ``timezone``, "" is none.

    Raises OptionError for text that is no time: a worker drops such a task.
    """
    found = _read(eta) if isinstance(eta, str) else eta
    aware: datetime | None = found and maybe_make_aware(found, timezone)
    return aware


def _read(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        pass
    try:
        # The parser of Celery's workers, much slower, takes other forms, too: 2030-01, T24:00.
        found: datetime | None = maybe_iso8601(text)
    except ValueError as error:
        raise OptionError(
            f"eta: expected a datetime, or text such as 2030-01-31T12:00:00+00:00, got {text!r}. "
            "Write countdown= for a number of seconds."
        ) from error
    return found
