"""The synchronous object behind one of SQLAlchemy's asyncio extension.

The extension is never imported here: it needs greenlet, which an application without asyncio has not
installed. Whoever hands over one of its objects has imported it.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["is_async_engine", "synchronous"]


def is_async_engine(subject: object) -> bool:
    """Whether ``subject`` is an AsyncEngine."""
    return _is(subject, "AsyncEngine")


def synchronous(subject: Any) -> Any:
    """Return what an AsyncEngine, AsyncSession or AsyncConnection stands for; all else as it is.

    None for an AsyncConnection that is not connected.
    """
    if _is(subject, "async_scoped_session"):
        subject = subject()
    if _is(subject, "AsyncEngine"):
        return subject.sync_engine
    if _is(subject, "AsyncSession"):
        return subject.sync_session
    if _is(subject, "AsyncConnection"):
        return subject.sync_connection
    return subject


def _is(subject: object, name: str) -> bool:
    extension = sys.modules.get("sqlalchemy.ext.asyncio")
    return extension is not None and isinstance(subject, getattr(extension, name))
