"""The recorder: it stands between the dispatches of one Outbox and their places."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Any, Literal, Self

from ..errors import ConfigurationError, OptionError
from .drain import publish, run
from .tasks import RecordedTask

if TYPE_CHECKING:
    from ..capture.eager import Deferred, EagerTask
    from ..capture.place import Place
    from ..message import OutboxMessage

__all__ = ["OutboxRecorder"]


@dataclass(slots=True, kw_only=True)
class _Dispatch:
    """What was handed to one place at once, and shares its fate."""

    place: Place
    tasks: Sequence[RecordedTask]
    deferred: Deferred | None = None  # in eager mode
    dropped: Event = field(default_factory=Event)

    @property
    def state(self) -> str:
        """What became of it so far: stored, pending or rolled_back."""
        from ..capture.records import SessionRecord

        if self.dropped.is_set():
            return "rolled_back"
        record = getattr(self.place, "record", None)
        # A Connection writes at the call; its owner, who alone can commit, may be the test.
        return "pending" if isinstance(record, SessionRecord) and record.is_open else "stored"


class OutboxRecorder:
    """Records what an Outbox stores, from entering it as a context to leaving it.

    ``app`` is a Celery app with an Outbox, or the Outbox; with ``is_fake`` nothing is written. Raises
    ConfigurationError when there is no Outbox.
    """

    def __init__(self, app: Any, *, is_fake: bool = False) -> None:
        self._outbox = _outbox_of(app)
        self._is_fake = is_fake
        self._dispatches: list[_Dispatch] = []
        self._drained: set[int] = set()  # by id()

    def __enter__(self) -> Self:
        outbox = self._outbox
        self._replaced = outbox.sink, outbox.eager_sink
        outbox.sink, outbox.eager_sink = self._record, self._record_eager
        return self

    def __exit__(self, *error: object) -> None:
        self._outbox.sink, self._outbox.eager_sink = self._replaced

    def _record(self, place: Place, messages: Sequence[OutboxMessage]) -> None:
        # First of all: what cannot be written is not recorded.
        if not self._is_fake:
            place.add(messages)
        read = [RecordedTask.of(each, place.database.name) for each in messages]
        self._follow(_Dispatch(place=place, tasks=[task for task in read if task is not None]))

    def _record_eager(self, place: Place, tasks: Sequence[EagerTask], deferred: Deferred) -> None:
        read = [RecordedTask.of_eager(each, place.database.name) for each in tasks]
        self._follow(_Dispatch(place=place, tasks=read, deferred=deferred))

    def _follow(self, dispatch: _Dispatch) -> None:
        self._dispatches.append(dispatch)
        dispatch.place.call_when_dropped("celery_outbox.testing", dispatch.dropped.set)

    @property
    def stored(self) -> list[RecordedTask]:
        """What was committed, or written by a Connection, and not rolled back since."""
        return self._tasks("stored")

    @property
    def pending(self) -> list[RecordedTask]:
        """What was dispatched in Sessions that have neither committed nor rolled back."""
        return self._tasks("pending")

    @property
    def rolled_back(self) -> list[RecordedTask]:
        """What went without a commit: with a transaction, or with a savepoint of it."""
        return self._tasks("rolled_back")

    def _tasks(self, state: str) -> list[RecordedTask]:
        return [task for each in self._dispatches if each.state == state for task in each.tasks]

    def assert_stored(
        self,
        task: Any,
        args: Iterable[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        *,
        count: int | None = None,
    ) -> list[RecordedTask]:
        """Assert that a task, given as such or by its name, is stored; return those that match.

        Arguments are compared as a worker gets them; None stands for any. ``count`` is how many must
        match, None for at least one.
        """
        __tracebackhide__ = True
        name, args = getattr(task, "name", task), None if args is None else list(args)
        found = [each for each in self.stored if each.name == name and each.has(args, kwargs)]
        if (not found) if count is None else len(found) != count:
            asked = f"{name} to be stored {'at least once' if count is None else f'{count} times'}"
            given = f"with args {args!r} and kwargs {kwargs!r} (None: any)"
            raise AssertionError(f"expected {asked} {given}, found {len(found)}.\n{self}")
        return found

    def assert_nothing_stored(self) -> None:
        """Assert that nothing is stored, and nothing waits for a commit."""
        __tracebackhide__ = True
        if self.stored or self.pending:
            raise AssertionError(f"expected nothing to be stored, and nothing pending.\n{self}")

    def drain(self, into: Literal["eager", "broker"] = "eager", *, throw: bool = True) -> list[Any]:
        """Run what is stored and was not drained before, in order; return the results.

        ``"eager"``: in this process, at once whatever its delay, by ``Task.apply``; and what a worker
        would send next: links, the rest of a chain, the body of a chord. ``"broker"``: published as
        by the relay, for a worker. The rows stay, and what tasks store is left to the next call.

        With ``task_always_eager`` tasks run by themselves after the commit; what still waits, in a
        test's own transaction, runs here.

        Raises the error of a task that failed here, unless ``throw`` is False; ConfigurationError
        when a task is not registered here; OutboxError when a broker did not take a message.
        """
        if into not in {"eager", "broker"}:
            raise OptionError(f"drain: expected 'eager' or 'broker', got {into!r}.")
        stored = [each for each in self._dispatches if each.state == "stored"]
        eager = [each.deferred for each in stored if each.deferred is not None]
        if eager and into == "broker":
            raise ConfigurationError(
                "drain: expected messages to publish, found task_always_eager, which makes none. Turn "
                "it off, or run the tasks here with drain()."
            )
        left = [each for each in self.stored if each.message and id(each) not in self._drained]
        if into == "broker":
            return publish(self._outbox, left, self._note_drained)
        results = [_run_deferred(each, throw=throw) for each in eager if not each.result.ready()]
        return results + run(self._outbox.app, left, self._note_drained, throw=throw)

    def _note_drained(self, task: RecordedTask) -> None:
        self._drained.add(id(task))

    def __str__(self) -> str:
        states = {state: self._tasks(state) for state in ("stored", "pending", "rolled_back")}
        parts = {state: "".join(f"\n  {task}" for task in tasks) for state, tasks in states.items()}
        return "\n".join(f"{state}:{part or ' nothing'}" for state, part in parts.items())


def _outbox_of(app: Any) -> Any:
    """The Outbox itself, untyped: its module stands on the same floor as this one."""
    from celery import Celery

    from ..capture.doors import attached

    found = attached(app) if isinstance(app, Celery) else app
    if not hasattr(found, "sink"):
        raise ConfigurationError(
            f"outbox_app: expected a Celery app with an Outbox, or an Outbox, found {app!r}. Define in "
            "conftest.py:\n\n    @pytest.fixture\n    def outbox_app():\n        from your_project "
            "import app  # the Celery app, or its Outbox\n        return app\n"
        )
    return found


def _run_deferred(deferred: Deferred, *, throw: bool) -> Any:
    # With task_eager_propagates the error comes out; the result has it in any case.
    with suppress(Exception):
        deferred.run()
    if throw:
        deferred.result.get()
    return deferred.result
