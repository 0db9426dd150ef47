"""What application code asks of the messages of one task: answers instead of outcomes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime, timedelta

from ..errors import ConfigurationError, OptionError
from ..storage.database import Database
from ..storage.desk import StoredMessage
from .acting import Outcomes, forget, reschedule
from .chords import chord_warnings
from .looking import Plan, find, place

__all__ = ["find_one", "forget_one", "reschedule_one"]

logger = logging.getLogger(__name__)


def find_one(databases: Sequence[Database], task_id: str) -> list[StoredMessage]:
    """Find the messages of a task.

    Raises OptionError for what cannot be a task id; SchemaError and DatabaseError when there are none
    where one can look, and a database could not be asked.
    """
    found = find(databases, [_checked(task_id)])
    if not found.messages:
        for error in found.errors.values():
            raise error
    return list(found.messages)


def forget_one(databases: Sequence[Database], task_id: str) -> bool:
    """Delete the messages of a task, and say whether it will not be delivered.

    Raises like ``find_one``, and ConfigurationError when the task is in several databases.
    """
    plan = _plan(databases, task_id)
    warnings = list(chord_warnings(plan))
    outcomes = forget(plan)
    gone = {outcome.row_id for outcome in outcomes.each if outcome.refusal is None}
    for message, warning in warnings:
        if message.id in gone:
            about = {"database": message.database, "task_id": task_id, "task_name": message.task_name}
            logger.warning("A message was forgotten: %s", warning, extra=about)
    return _is_done(outcomes)


def reschedule_one(databases: Sequence[Database], task_id: str, when: datetime | timedelta) -> bool:
    """Move the messages of a task, and say whether it will run then; raises like ``forget_one``."""
    return _is_done(reschedule(_plan(databases, task_id), when))


def _plan(databases: Sequence[Database], task_id: str) -> Plan:
    plan = place(databases, [_checked(task_id)])
    (placed,) = plan.each
    if len(placed.found_in) > 1:
        raise ConfigurationError(
            f"task {task_id!r}: expected it in one database, found it in "
            f"{', '.join(map(repr, placed.found_in))}. Name one with database=."
        )
    if not placed.found_in:
        for error in plan.errors:
            raise error
    return plan


def _checked(task_id: str) -> str:
    # An AsyncResult or a UUID would not be found; lone surrogates are text that no database takes.
    if not isinstance(task_id, str) or any("\ud800" <= each <= "\udfff" for each in task_id):
        raise OptionError(f"task_id: expected the id of a task as text, got {task_id!r}.")
    return task_id


def _is_done(outcomes: Outcomes) -> bool:
    return all(outcome.refusal is None for outcome in outcomes.each)
