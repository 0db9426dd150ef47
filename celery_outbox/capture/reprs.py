"""The readable form of a task's arguments that Celery writes into a message's headers, in less time.

Celery's ``saferepr`` walks every value as a stream of tokens, which takes longer than all the rest of
a dispatch. This writes the same text for the types that JSON tasks use, and leaves others to Celery.
Where Celery's own form is another than the one known here (Celery 5.7's), nothing is written at all.
"""

from __future__ import annotations

import uuid
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Any

from celery.utils.saferepr import saferepr
from celery.utils.text import truncate

__all__ = ["represent"]

_SCALARS = frozenset(
    {int, float, bool, type(None), Decimal, datetime, date, time, timedelta, uuid.UUID}
)
_ENDS: dict[type[Any], tuple[str, str]] = {dict: ("{", "}"), list: ("[", "]"), tuple: ("(", ")")}
_SAMPLES: list[Any] = [
    (1, None, True, 2.5, "it's"),
    {"a": [{"b": {"c": (1,)}}], 2: "x" * 30, "d": ((),)},
    [
        Decimal("1.50"),
        datetime(2026, 1, 2),
        date(2026, 1, 2),
        time(3),
        timedelta(4),
        uuid.UUID(int=5),
    ],
    (["y" * 50, [1, 2, [3, [4]]]], {"e": {}}),
    [[[[1], 2], 3], 4, "two words"],
]
_CUT = ", ..."
#: Deeper than anybody reads; below it, recursion needs no limit of its own.
_MAX_LEVELS = 50


class _UnknownTypeError(Exception):
    """A value of a type that only Celery knows how to write."""


def represent(value: Any, maxlen: int | None, maxlevels: int | None) -> str | None:
    """What ``saferepr(value, maxlen, maxlevels)`` gives, or None when it has to be asked."""
    if not maxlen or not maxlevels or maxlevels > _MAX_LEVELS or not _is_celerys_form_known():
        return None
    return _represent(value, maxlen, maxlevels)


def _represent(value: Any, maxlen: int, maxlevels: int) -> str | None:
    writer = _Writer(maxlen, maxlevels)
    try:
        text = _whole(value, maxlevels, ())
        if len(text) < maxlen:
            return text
        writer.write(value, ())
    except _UnknownTypeError:
        return None
    return "".join(writer.parts)


def _whole(value: Any, levels: int, above: tuple[Any, ...]) -> str:
    """The text as if there were room for all of it, which there is for most arguments."""
    kind = type(value)
    if kind is str:
        text: str = "'" + value.replace("'", "\\'") + "'"
        return text
    if kind in _SCALARS:
        return repr(value)
    if kind not in _ENDS:
        raise _UnknownTypeError
    begin, end = _ENDS[kind] if kind is not tuple or len(value) != 1 else ("(", ",)")
    if not levels:
        return f"{begin}...{end}"
    if any(value is each for each in above):
        raise _UnknownTypeError  # it contains itself
    inside, levels = (*above, value), levels - 1
    if kind is not dict:
        return begin + ", ".join([_whole(each, levels, inside) for each in value]) + end
    items: list[str] = []
    for key, each in value.items():
        if type(key) is str and "'" not in key:
            name = f"'{key}'"
        elif type(key) is str or type(key) in _SCALARS:
            name = _whole(key, levels, inside)
        else:
            raise _UnknownTypeError
        # Texts are the most frequent of values, and calls the most expensive of steps.
        plain = type(each) is str and "'" not in each
        items.append(f"{name}: '{each}'" if plain else f"{name}: {_whole(each, levels, inside)}")
    return "{" + ", ".join(items) + "}"


class _Writer:
    """Collects the text's parts until there is no room left; what is open then is closed."""

    __slots__ = ("_left", "_maxlevels", "parts")

    def __init__(self, maxlen: int, maxlevels: int) -> None:
        self.parts: list[str] = []
        self._left = maxlen
        self._maxlevels = maxlevels

    def write(self, value: Any, above: tuple[Any, ...]) -> bool:
        """Write a value inside of those ``above``; False when there was no more room."""
        kind = type(value)
        if kind is str:
            return self._put(_quoted(value, self._left))
        if kind in _SCALARS:
            text = repr(value)
            return self._put(text if len(text) < self._left else truncate(text, self._left))
        if kind is dict:
            return self._write_container("{", "}", value, above)
        if kind is list:
            return self._write_container("[", "]", value, above)
        if kind is tuple:
            return self._write_container("(", ",)" if len(value) == 1 else ")", value, above)
        raise _UnknownTypeError

    def _write_container(self, begin: str, end: str, value: Any, above: tuple[Any, ...]) -> bool:
        if len(above) >= self._maxlevels:
            return self._put(f"{begin}...{end}")
        if any(value is each for each in above):
            raise _UnknownTypeError  # it contains itself
        if not self._put(begin):
            return False
        inside = (*above, value)
        items = self._write_items if type(value) is dict else self._write_values
        is_whole = items(value, inside)
        self.parts.append(end)
        if self._left > 0:
            self._left -= len(end)
        return is_whole

    def _write_values(self, values: Any, inside: tuple[Any, ...]) -> bool:
        separator = ""
        for value in values:
            if separator and not self._put(separator):
                return False
            separator = ", "
            if not self.write(value, inside):
                return False
        return True

    def _write_items(self, values: Any, inside: tuple[Any, ...]) -> bool:
        separator = ""
        for key, value in values.items():
            if separator and not self._put(separator):
                return False
            separator = ", "
            if type(key) is not str and type(key) not in _SCALARS:
                raise _UnknownTypeError
            if not (self.write(key, inside) and self._put(": ") and self.write(value, inside)):
                return False
        return True

    def _put(self, text: str) -> bool:
        if self._left <= 0:
            self.parts.append(_CUT)
            return False
        self.parts.append(text)
        self._left -= len(text)
        return True


def _quoted(value: str, room: int) -> str:
    text = value if len(value) < room else truncate(value, room)
    return "'" + text.replace("'", "\\'") + "'"


@lru_cache(maxsize=1)
def _is_celerys_form_known() -> bool:
    """Whether the installed Celery writes what is written here."""
    try:
        return all(
            _represent(sample, maxlen, maxlevels) == saferepr(sample, maxlen, maxlevels=maxlevels)
            for sample in _SAMPLES
            for maxlen in (*range(1, 70, 3), 1024)
            for maxlevels in (1, 3)
        )
    except (TypeError, ValueError, AttributeError):
        return False  # its saferepr takes other arguments
