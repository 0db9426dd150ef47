"""Running what was recorded: in this process, or by a worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ..errors import ConfigurationError, OutboxError
from .tasks import RecordedTask

if TYPE_CHECKING:
    from ..message import ClaimedMessage, OutboxMessage

__all__ = ["publish", "run"]


def run(
    app: Any, tasks: Sequence[RecordedTask], begin: Callable[[RecordedTask], None], *, throw: bool
) -> list[Any]:
    """Run tasks in this process, each after ``begin`` of it, as a worker would; their results.

    Raises ConfigurationError when one is not registered here, before any begins.
    """
    from celery import current_app

    current = current_app._get_current_object()
    if missing := {task.name for task in tasks} - set(app.tasks):
        raise ConfigurationError(
            f"drain: expected tasks registered on the app {app.main!r}, found {sorted(missing)}, "
            "which are not. Import their modules, or drain('broker') for a worker that has them."
        )
    process = _EagerRun(app, throw=throw)
    app.set_current()  # as in a worker
    try:
        for task in tasks:
            begin(task)
            process.run(task)
        process.run_bodies_of_chords()
    finally:
        current.set_current()
    return process.results


def publish(
    outbox: Any, tasks: Iterable[RecordedTask], settle: Callable[[RecordedTask], None]
) -> list[Any]:
    """Publish tasks by the relay's own code; call ``settle`` with each that is; their results.

    What a commit has delivered by itself is published already. Raises OutboxError when a broker did
    not take all of its messages.
    """
    results: list[Any] = []
    by_broker: dict[str, list[tuple[RecordedTask, OutboxMessage]]] = {}
    for task in tasks:
        if task.message is None:
            continue
        if _is_delivered(outbox, task.database, task.message):
            settle(task)
            results.append(outbox.app.AsyncResult(task.id))
        else:
            by_broker.setdefault(task.broker, []).append((task, task.message))
    for broker, stored in by_broker.items():
        now = time.monotonic()
        batch = [_claimed(number, message, now) for number, (_, message) in enumerate(stored)]
        publisher = outbox.publisher(broker)
        try:
            publisher.connect()
            outcome = publisher.publish(batch, deadline=now + 60, read_at=now)
        finally:
            publisher.close()
        for number in sorted(outcome.accepted):
            settle(stored[number][0])
            results.append(outbox.app.AsyncResult(stored[number][0].id))
        if left_over := len(batch) - len(outcome.accepted):
            reason = next(iter(outcome.errors.values()), "no time was left")
            raise OutboxError(
                f"drain: expected broker {broker!r} to take {len(batch)} message(s), found that it "
                f"did not take {left_over}: {reason}"
            )
    return results


class _EagerRun:
    """Runs recorded tasks in this process, and after each what a worker would send next."""

    def __init__(self, app: Any, *, throw: bool) -> None:
        self._app = app
        self._throw = throw
        # What chords are made of: body, group, result; in the header's order.
        self._parts: list[tuple[Any, ...]] = []
        self.results: list[Any] = []

    def run(self, task: RecordedTask) -> None:
        from celery.app.task import Context

        if task.name == "celery.chord_unlock":
            return  # it waits for the results of a chord's header, which are known here
        about, after = task.about, task.next
        result = self._app.tasks[task.name].apply(
            task.args,
            task.kwargs,
            task_id=task.id,
            retries=about.get("retries"),
            headers=Context(task.headers).headers,  # those that are not Celery's own
            link_error=after.get("errbacks"),
            throw=False,
            stamped_headers=about.get("stamped_headers") or [],
            **(about.get("stamps") or {}),
        )
        self.results.append(result)
        self._go_on(result, after.get("callbacks"))
        part = [after.get("chord"), about.get("group")]
        for step in reversed(after.get("chain") or ()):  # the next one is the last in it
            part = [step["options"].get("chord"), step["options"].get("group_id")]
            if result.successful():
                result = self._apply(step, result.get())
        self._parts.append((*part, result))

    def run_bodies_of_chords(self) -> None:
        for group, body in {group: body for body, group, _ in self._parts if body}.items():
            header = [result for _, of, result in self._parts if of == group]
            if all(result.successful() for result in header):
                self._apply(body, [result.get() for result in header])

    def _apply(self, signature: Any, value: Any) -> Any:
        from celery.canvas import maybe_signature

        signature = maybe_signature(signature, app=self._app).clone()
        links = signature.options.pop("link", None)
        result = signature.apply((value,), throw=False)
        self._go_on(result, links)
        return result

    def _go_on(self, result: Any, links: Any) -> None:
        """Run the links of a task that succeeded, raise the error of one that failed."""
        if result.successful():
            for each in links or ():
                self._apply(each, result.get())
        elif self._throw:
            result.get()


def _is_delivered(outbox: Any, name: str, message: OutboxMessage) -> bool:
    """Whether the broker's workers see a message already."""
    if message.kombu_queue is None:
        return False
    database = outbox.databases[name]
    found: bool = database.read(lambda connection: database.queues.has(connection, message))
    return found


def _claimed(number: int, message: OutboxMessage, now: float) -> ClaimedMessage:
    """What a relay would be handed, at the monotonic time ``now``."""
    from ..message import ClaimedMessage

    same = ("broker", "task_id", "task_name", "queue", "envelope", "body")
    due_in = None if message.countdown is None else message.made_at + message.countdown - now
    if message.eta is not None:
        due_in = (message.eta - datetime.now(UTC)).total_seconds()
    return ClaimedMessage(
        id=number,
        identity=uuid4().hex,
        attempts=1,
        due_in=due_in,
        expires_in=None if message.expires_in is None else message.made_at + message.expires_in - now,
        **{name: getattr(message, name) for name in same},
    )
