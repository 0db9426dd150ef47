"""Every statement that adds, reserves, delivers or reads messages.

A store works on the connection that it is handed and never commits. Each statement of a relay names
the claim token of its batch, so what a relay does after it lost its lease touches nothing.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from operator import itemgetter
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Delete,
    Float,
    Select,
    Update,
    bindparam,
    case,
    delete,
    func,
    null,
    select,
    update,
)
from sqlalchemy.engine import Connection

from ..message import ClaimedMessage, OutboxMessage
from ..policy import RetryPolicy
from .dialects import Dialect
from .dialects.default import ClaimPlan, D
from .insert import InsertMessages
from .schema import FAR_FUTURE, Tables, storable

__all__ = ["Claim", "Failure", "OutboxStore"]

#: Characters of an error that are kept; a broker's answer may be megabytes long.
MAX_ERROR = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A batch that one relay has reserved.

    Attributes:
        token: random; every later write names it.
        messages: in the order in which they fell due.
        latest: when the last of them fell due; None when there is none.
        expires: ``time.monotonic()`` value after which nothing of the batch may be published.
        read_at: ``time.monotonic()`` value from which the messages' relative times count.
    """

    token: str
    messages: Sequence[ClaimedMessage]
    latest: datetime | None
    expires: float
    read_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a delivery failed, and how long to wait before the next; None when it was the last."""

    error: str
    delay: timedelta | None


class OutboxStore:
    """The message table of one database, as statements.

    With ``notify``, what is added wakes the relays when it is committed, where the database can do so.
    """

    def __init__(self, tables: Tables, dialect: Dialect, *, notify: bool = True) -> None:
        self.tables = tables
        self.dialect = dialect
        self._claim_plans: dict[bool, ClaimPlan] = {}
        self._insert = InsertMessages(tables, dialect, notifies=notify)

    def add(self, connection: Connection, messages: Sequence[OutboxMessage]) -> None:
        """Write messages, all in the transaction that ``connection`` is in."""
        self._insert(connection, messages)

    def claim(
        self,
        connection: Connection,
        *,
        broker: str,
        limit: int,
        lease: timedelta,
        since: datetime | None = None,
    ) -> Claim:
        """Reserve up to ``limit`` ready messages of ``broker`` for ``lease``.

        With ``since``, only those that fell due then or later: what was due before is not even read.
        """
        token = secrets.token_hex(16)
        started = time.monotonic()
        parameters = _range(broker, since) | {
            "new_token": token,
            "claim_lease": lease.total_seconds(),
        }
        plan = self._claim_plan(is_bounded=since is not None)
        rows = self.dialect.claim(connection, plan, limit, parameters)
        # RETURNING promises no order.
        rows = sorted(rows, key=_DUE_ORDER)
        return Claim(
            token=token,
            messages=[_claimed(row) for row in rows],
            latest=rows[-1].scheduled_at if rows else None,
            # Counted from before the statement: never later than what the database holds.
            expires=started + lease.total_seconds(),
            read_at=started,
        )

    def accept(self, connection: Connection, token: str, ids: Sequence[int], *, keep: bool) -> int:
        """Delete delivered messages, or keep them as delivered; return how many were still ours."""
        statement = self._keeping if keep else self._deleting
        return self._settle(connection, statement, token, ids)

    def defer(self, connection: Connection, token: str, ids: Sequence[int]) -> int:
        """Put messages back until their intended time, the attempt not counted."""
        return self._settle(connection, self._deferring, token, ids)

    def release(self, connection: Connection, token: str, ids: Sequence[int]) -> int:
        """Put messages back as they were before the claim."""
        return self._settle(connection, self._releasing, token, ids)

    def postpone(self, connection: Connection, token: str, delays: Mapping[int, timedelta]) -> int:
        """Put messages back until later, the attempt not counted; in the order of ``delays``."""
        t, clock = self.tables.messages, self.dialect.clock()
        later = self.dialect.shifted(clock, bindparam("delay", type_=Float(53)))
        return connection.execute(
            update(t)
            .where(t.c.id == bindparam("row"), t.c.claim_token == token)
            .values(_FREE | {"attempts": self._one_less(), "scheduled_at": later}),
            [{"row": id_, "delay": delay.total_seconds()} for id_, delay in delays.items()],
        ).rowcount

    def fail(self, connection: Connection, token: str, failures: Mapping[int, Failure]) -> int:
        """Record errors; schedule the next attempts, or keep the messages as failed."""
        count = 0
        last = [(id_, failure) for id_, failure in failures.items() if failure.delay is None]
        again = [(id_, failure) for id_, failure in failures.items() if failure.delay is not None]
        clock = self.dialect.clock()
        if again:
            later = self.dialect.shifted(clock, bindparam("delay", type_=Float(53)))
            count += self._update_each(
                connection,
                token,
                {"scheduled_at": later},
                [
                    {
                        "row": id_,
                        "text": storable(it.error, MAX_ERROR),
                        "delay": it.delay.total_seconds(),
                    }
                    for id_, it in again
                    if it.delay is not None
                ],
            )
        if last:
            count += self._update_each(
                connection,
                token,
                {"scheduled_at": FAR_FUTURE, "finished_at": clock},
                [{"row": id_, "text": storable(failure.error, MAX_ERROR)} for id_, failure in last],
            )
        return count

    def count(self, connection: Connection) -> Mapping[str, int]:
        """Count the rows of each state."""
        states = self.tables.states(self.dialect.now())
        columns = [
            func.coalesce(func.sum(case((where, 1), else_=0)), 0).label(state)
            for state, where in states.items()
        ]
        row = connection.execute(select(*columns)).one()
        return {state: int(getattr(row, state)) for state in states}

    def is_empty(self, connection: Connection, broker: str, since: datetime | None = None) -> bool:
        """Whether no message of ``broker`` is ready, of those that fell due at ``since`` or later."""
        plan = self._claim_plan(is_bounded=since is not None)
        return connection.execute(plan.look, _range(broker, since)).first() is None

    def ready_for(self, connection: Connection, broker: str) -> float | None:
        """For how many seconds the first message of ``broker`` has been ready; None when none is."""
        c = self.tables.messages.c
        since: list[Any] = [
            self.dialect.seconds_until(each) for each in (c.scheduled_at, c.lease_until)
        ]
        ready: Select[Any] = select(*since).where(*self._ready(broker, None))
        first = connection.execute(self.dialect.in_due_order(ready, self.tables).limit(1)).first()
        return None if first is None else -max(float(each) for each in first if each is not None)

    def undelivered(self, connection: Connection, *, ids: Sequence[int]) -> Sequence[int]:
        """Which of these rows are still to be delivered, whoever has them now."""
        c = self.tables.messages.c
        found = select(c.id).where(c.id.in_(ids), c.finished_at.is_(None))
        return connection.execute(found).scalars().all()

    def _claim_plan(self, *, is_bounded: bool) -> ClaimPlan:
        plan = self._claim_plans.get(is_bounded)
        if plan is None:
            since = bindparam("claim_since", type_=self.tables.messages.c.scheduled_at.type)
            ready = self._ready(bindparam("claim_broker"), since if is_bounded else None)
            look: Select[Any] = select(self.tables.messages.c.id).where(*ready)
            plan = self._claim_plans[is_bounded] = ClaimPlan(
                tables=self.tables,
                ready=ready,
                look=self.dialect.in_due_order(look, self.tables).limit(1),
                values=self.dialect.claim_values(self.tables),
                columns=self._claimed_columns(),
            )
        return plan

    def _ready(self, broker: Any, since: Any) -> Sequence[ColumnElement[bool]]:
        c = self.tables.messages.c
        ready = [c.broker == broker, self.tables.is_ready(self.dialect.now())]
        return ready if since is None else [*ready, c.scheduled_at >= since]

    def _claimed_columns(self) -> Sequence[ColumnElement[Any]]:
        c = self.tables.messages.c
        return [
            c.scheduled_at,
            c.id,
            c.created_at,
            c.broker,
            c.task_id,
            c.task_name,
            c.queue,
            c.message,
            c.body,
            c.attempts,
            c.max_attempts,
            c.base_delay,
            c.max_delay,
            self.dialect.seconds_until(c.deliver_at).label("due_in"),
            self.dialect.seconds_until(c.expires_at).label("expires_in"),
            self.dialect.seconds_until(c.created_at).label("created_in"),
        ]

    # The statements that end most batches are made once: making one costs as much as running it.

    @cached_property
    def _deleting(self) -> Delete:
        return self._ours(delete(self.tables.messages))

    @cached_property
    def _keeping(self) -> Update:
        finished = {"finished_at": self.dialect.clock(), "scheduled_at": FAR_FUTURE, "error": None}
        return self._freeing(finished)

    @cached_property
    def _deferring(self) -> Update:
        intended = func.coalesce(self.tables.messages.c.deliver_at, self.dialect.clock())
        return self._freeing({"attempts": self._one_less(), "scheduled_at": intended})

    @cached_property
    def _releasing(self) -> Update:
        return self._freeing({"attempts": self._one_less()})

    def _freeing(self, values: dict[str, Any]) -> Update:
        return self._ours(update(self.tables.messages).values(_FREE | values))

    def _ours(self, statement: D) -> D:
        mine = statement.where(self.tables.messages.c.claim_token == bindparam("token"))
        return self.dialect.only(mine, self.tables)

    def _settle(
        self, connection: Connection, statement: Delete | Update, token: str, ids: Sequence[int]
    ) -> int:
        given = {"token": token, "rows": self.dialect.rows(ids)}
        return connection.execute(statement, given).rowcount

    def _one_less(self) -> ColumnElement[int]:
        attempts = self.tables.messages.c.attempts
        return case((attempts > 0, attempts - 1), else_=0)

    def _update_each(
        self,
        connection: Connection,
        token: str,
        values: dict[str, Any],
        parameters: Sequence[dict[str, Any]],
    ) -> int:
        t = self.tables.messages
        return connection.execute(
            update(t)
            .where(t.c.id == bindparam("row"), t.c.claim_token == token)
            .values(_FREE | values | {"error": bindparam("text")}),
            parameters,
        ).rowcount


#: What every settled row has in common: no lease.
_FREE: dict[str, Any] = {"claim_token": null(), "lease_until": null()}


def _range(broker: str, since: datetime | None) -> dict[str, Any]:
    """The parameters of ``_ready``."""
    bounds = {} if since is None else {"claim_since": since}
    return {"claim_broker": broker, **bounds}


#: By the first two of the columns below.
_DUE_ORDER = itemgetter(0, 1)


def _claimed(row: Sequence[Any]) -> ClaimedMessage:
    # In the order of _claimed_columns(): by their names it would take three times as long.
    _, id_, created_at, broker, task_id, task_name, queue, message, body, attempts, *policy = row
    max_attempts, base_delay, max_delay, due_in, expires_in, created_in = policy
    return ClaimedMessage(
        id=id_,
        # Tables of several databases count from 1, and callers may choose the task id.
        identity=f"{id_}/{created_at.timestamp()}/{task_id}",
        broker=broker,
        task_id=task_id,
        task_name=task_name,
        queue=queue,
        envelope=message,
        body=body if type(body) is bytes else _bytes(body),
        attempts=attempts,
        due_in=None if due_in is None else float(due_in),
        expires_in=None if expires_in is None else float(expires_in),
        retry=None if base_delay is None else _retry(max_attempts, base_delay, max_delay),
        waited=-float(created_in if due_in is None or due_in < created_in else due_in),
    )


def _bytes(stored: Any) -> bytes:
    # SQLite keeps what it is given, whatever the type of the column.
    return str(stored).encode() if isinstance(stored, str | int | float) else bytes(stored)


def _retry(
    max_attempts: int | None, base_delay: int | None, max_delay: int | None
) -> RetryPolicy | None:
    if base_delay is None or max_delay is None:
        return None
    policy = RetryPolicy(
        max_attempts=max_attempts,
        base_delay=timedelta(microseconds=base_delay),
        max_delay=timedelta(microseconds=max_delay),
    )
    # Numbers that somebody has written by hand must block neither the claim nor what comes after it.
    return policy if policy.is_sound else None
