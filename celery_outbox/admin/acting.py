"""Retry, forget or reschedule the messages of some tasks; what became of each row is told.

Each change is one conditional statement: a row that a relay has reserved meanwhile stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial

from sqlalchemy.engine import Connection

from ..errors import OptionError, OutboxError
from ..message import Envelope
from ..storage.database import Database
from ..storage.desk import FORGETTABLE_STATES, MOVABLE_STATES, Desk, StoredMessage
from ..storage.schema import FAR_FUTURE
from .looking import Placed, Plan

__all__ = ["Outcome", "Outcomes", "forget", "reschedule", "retry", "unforgettable"]

#: Says why nothing was done to a row, None when something was; called in a transaction.
_Act = Callable[[Connection, Desk, StoredMessage], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one row that somebody wanted to act on, or of a task id that is not there.

    Attributes:
        database: where the row is.
        row_id: of the row.
        message: the row as it is now; None when it is gone.
        refusal: why nothing was done; None when it was.
    """

    task_id: str
    database: str | None = None
    row_id: int | None = None
    message: StoredMessage | None = None
    refusal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """What became of each row, in the order of the ids; and of databases that could not be used."""

    each: Sequence[Outcome]
    errors: Sequence[OutboxError]

    @property
    def has_failed(self) -> bool:
        """Whether anything that was asked for was not done."""
        return bool(self.errors) or any(outcome.refusal is not None for outcome in self.each)


def retry(plan: Plan) -> Outcomes:
    """Make messages due now, or at their intended time if that is later.

    Only those that a relay has tried and none has reserved. The attempts stay, the error goes.
    """
    return _act(plan, _revive)


def forget(plan: Plan) -> Outcomes:
    """Delete messages before their delivery: neither reserved nor delivered ones."""
    return _act(plan, _forget)


def unforgettable(plan: Plan) -> Outcomes:
    """What ``forget`` would have refused when the plan was made; nothing is done."""
    each = [
        Outcome(task_id=placed.task_id, refusal=placed.refusal)
        for placed in plan.each
        if placed.database is None
    ]
    each += [
        Outcome(
            task_id=message.task_id,
            database=message.database,
            row_id=message.id,
            message=message,
            refusal=_reason(message, _CHANGED),
        )
        for placed in plan.each
        for message in placed.messages
        if message.state not in FORGETTABLE_STATES
    ]
    return Outcomes(each=each, errors=plan.errors)


def reschedule(plan: Plan, when: datetime | timedelta) -> Outcomes:
    """Move messages that wait to another time; an aware one, or counted from the database's now.

    They stay in the outbox until that time. What has passed means now. Raises OptionError for a time
    that no database can hold.
    """
    _instant(when, datetime.now(UTC))
    moved = [replace(placed, messages=_without_events(placed.messages)) for placed in plan.each]
    return _act(replace(plan, each=moved), partial(_move, when=when))


def _without_events(messages: Sequence[StoredMessage]) -> Sequence[StoredMessage]:
    """Leave out that a task was sent, which is told at once, and has the task's id."""
    return [each for each in messages if each.task_name != "task-sent"] or messages


def _act(plan: Plan, act: _Act) -> Outcomes:
    outcomes: list[Outcome] = []
    for placed in plan.each:
        if placed.database is None:
            outcomes.append(Outcome(task_id=placed.task_id, refusal=placed.refusal))
            continue
        try:
            outcomes += _act_on(placed, placed.database, act)
        except OutboxError as error:
            outcomes.append(Outcome(task_id=placed.task_id, refusal=str(error)))
    return Outcomes(each=outcomes, errors=plan.errors)


def _act_on(placed: Placed, database: Database, act: _Act) -> Sequence[Outcome]:
    desk = Desk(database)

    def work(
        connection: Connection,
    ) -> tuple[Mapping[int, str | None], Mapping[int, StoredMessage]]:
        refusals = {message.id: act(connection, desk, message) for message in placed.messages}
        return refusals, {each.id: each for each in desk.find(connection, [placed.task_id])}

    refusals, now = database.run(work)
    return [
        Outcome(
            task_id=placed.task_id,
            database=database.name,
            row_id=row_id,
            message=now.get(row_id),
            refusal=refusal and _reason(now.get(row_id), refusal),
        )
        for row_id, refusal in refusals.items()
    ]


def _reason(message: StoredMessage | None, refusal: str) -> str:
    """Why nothing was done: what the row is now says more than what it was."""
    if message is None:
        return "it has just been delivered"
    reasons = {
        "reserved": "a relay has reserved it",
        "delivered": "it has been delivered",
    }
    return reasons.get(message.state, refusal)


_CHANGED = "it has just changed; look again"


def _revive(connection: Connection, desk: Desk, message: StoredMessage) -> str | None:
    if desk.revive(connection, [message.id]):
        return None
    return _CHANGED if message.attempts else "no relay has tried it yet"


def _forget(connection: Connection, desk: Desk, message: StoredMessage) -> str | None:
    return None if desk.forget(connection, [message.id]) else _CHANGED


def _move(
    connection: Connection, desk: Desk, message: StoredMessage, *, when: datetime | timedelta
) -> str | None:
    contents = desk.contents(connection, [message.id]).get(message.id)
    if message.state == "failed":
        return "it has failed: retry it first"
    if message.state not in MOVABLE_STATES or contents is None:
        return _CHANGED
    eta = _instant(when, message.read_at)
    if message.expires_at is not None and message.expires_at <= eta:
        return f"it expires before that, at {message.expires_at:%Y-%m-%d %H:%M:%S} UTC"
    try:
        envelope = Envelope.from_text(contents.envelope)
    except ValueError:
        return "its stored envelope cannot be read"
    if "task" not in envelope.headers:
        # Events, and tasks of Celery's first protocol: a body is never touched.
        return "its time is no header, but part of its body"
    moved = replace(envelope, headers={**envelope.headers, "eta": eta.isoformat()})
    return None if desk.reschedule(connection, message.id, eta, moved.to_text()) else _CHANGED


def _instant(when: datetime | timedelta, now: datetime) -> datetime:
    try:
        instant = now + when if isinstance(when, timedelta) else when.astimezone(UTC)
    except OverflowError:
        instant = FAR_FUTURE
    if instant >= FAR_FUTURE:
        raise OptionError(f"eta: expected a time before the year {FAR_FUTURE.year}, got {when}.")
    return max(instant, now)
