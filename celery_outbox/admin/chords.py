"""Which messages are parts of a chord: without one of them, the chord can never finish.

Celery writes a member's chord into the body, of which only JSON is read here: to read other forms
may run what is in them. The header of a group alone leaves open whether it is a chord's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from functools import partial
from typing import Any

from ..errors import OutboxError
from ..storage.desk import FORGETTABLE_STATES, Contents, Desk, StoredMessage
from .looking import Plan

__all__ = ["Bond", "bond_of", "chord_warnings"]

#: Celery's own task that waits for a chord's members and then sends its body.
_UNLOCK = "celery.chord_unlock"


class Bond(Enum):
    """What is lost with a message, beside its own task."""

    CHORD = "its chord can no longer finish"
    GROUP = "it belongs to a group; if that is a chord's, the chord can no longer finish"


def chord_warnings(plan: Plan) -> Iterator[tuple[StoredMessage, str]]:
    """Say of each message that can be forgotten what else would be lost with it.

    A database that cannot be used any more has nothing to say.
    """
    for placed in plan.each:
        if placed.database is None:
            continue
        desk = Desk(placed.database)
        ids = [each.id for each in placed.messages if each.state in FORGETTABLE_STATES]
        try:
            found = placed.database.read(partial(desk.contents, ids=ids))
        except OutboxError:
            continue
        for message in placed.messages:
            bond = message.id in found and bond_of(found[message.id])
            if bond:
                yield message, bond.value


def bond_of(contents: Contents) -> Bond | None:
    """What else would be lost with a message; None: nothing that can be seen."""
    envelope = _object(_parsed(contents.envelope))
    headers = _object(envelope.get("headers"))
    if headers.get("task") == _UNLOCK:
        return Bond.CHORD
    is_json = envelope.get("content_type") == "application/json" and not headers.get("compression")
    body = _parsed(contents.body) if is_json else None
    if body is not None:
        return Bond.CHORD if any(_chords(body)) else None
    return Bond.GROUP if headers.get("group") else None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _parsed(text: str | bytes | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None


def _chords(body: Any) -> Iterator[Any]:
    """The chord of a message, and of the tasks that follow it in its chain."""
    embedded = _object(body[2] if isinstance(body, list) and len(body) == 3 else body)
    yield embedded.get("chord")
    # The second protocol has a chain, the first one has callbacks.
    for name in ("chain", "callbacks"):
        following = embedded.get(name)
        for each in following if isinstance(following, list) else ():
            yield _object(_object(each).get("options")).get("chord")
