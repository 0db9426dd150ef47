"""A context variable's value for the time of a ``with`` block."""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Any, Generic, TypeVar

__all__ = ["scoped"]

T = TypeVar("T")


class scoped(Generic[T]):  # noqa: N801 - used like the functions of contextlib, at every dispatch, and cheaper
    """Set ``variable`` to ``value``, and back at the end."""

    __slots__ = ("_token", "_value", "_variable")

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._variable = variable
        self._value = value

    def __enter__(self) -> None:
        self._token: Token[T] = self._variable.set(self._value)

    def __exit__(self, *error: Any) -> None:
        self._variable.reset(self._token)
