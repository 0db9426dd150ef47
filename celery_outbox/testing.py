"""A pytest plugin: what a test's code stored and what it rolled back, and ways to run it.

A recorder stands between the dispatches of one Outbox and their places. pytest loads this module in
every run: what brings Celery, Kombu or SQLAlchemy is imported inside the functions that need it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import Event
from typing import TYPE_CHECKING, Any, Literal, Self

import pytest

from .errors import ConfigurationError, OptionError, OutboxError

if TYPE_CHECKING:
    from .capture.place import Place
    from .message import ClaimedMessage, OutboxMessage

__all__ = ["OutboxRecorder", "RecordedTask", "outbox", "outbox_app", "outbox_fake"]


@pytest.fixture
def outbox_app() -> Any:
    """The Celery app whose Outbox is recorded, or the Outbox: Celery's current app; to override."""
    from celery import current_app

    return current_app


@pytest.fixture
def outbox(outbox_app: Any) -> Iterator[OutboxRecorder]:
    """Records what this test's code stores, and stores it."""
    with OutboxRecorder(outbox_app) as recorder:
        yield recorder


@pytest.fixture
def outbox_fake(outbox_app: Any) -> Iterator[OutboxRecorder]:
    """Records what this test's code would store, and writes nothing: no table is needed."""
    with OutboxRecorder(outbox_app, is_fake=True) as recorder:
        yield recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTask:
    """One task dispatched through the outbox, as a worker gets it.

    Attributes:
        args: positional arguments; what was a tuple is a list after JSON.
        countdown, eta: the delay asked for, in seconds or as an aware time; None when none was.
        properties: those of the message, such as its priority.
        next: what a worker does afterwards: callbacks, errbacks, chain, chord.
        about: the rest, such as retries and group: the headers or, in protocol 1, the body.
    """

    id: str
    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    queue: str
    broker: str
    database: str
    countdown: float | None
    eta: datetime | None
    headers: Mapping[str, Any]
    properties: Mapping[str, Any]
    next: Mapping[str, Any]
    about: Mapping[str, Any]
    content_type: str
    message: OutboxMessage

    @classmethod
    def of(cls, message: OutboxMessage, database: str) -> RecordedTask | None:
        """Read the message of a task; None for the ``task-sent`` event that is stored beside it."""
        from kombu import compression, serialization

        from .message import Envelope

        envelope, body = Envelope.from_text(message.envelope), message.body
        if (compressed := envelope.headers.get("compression")) is not None:
            body = compression.decompress(body, compressed)
        kind = envelope.content_type
        data = serialization.loads(body, kind, envelope.content_encoding, accept=[kind])
        # Protocol 1 and events have everything in one mapping.
        about = data if isinstance(data, Mapping) else envelope.headers
        if "task" not in about:
            return None
        args, kwargs, after = (data["args"], data["kwargs"], data) if about is data else data
        return cls(
            id=message.task_id,
            name=message.task_name,
            args=list(args),
            kwargs=dict(kwargs),
            database=database,
            headers=envelope.headers,
            properties=envelope.properties,
            next=after,
            about=about,
            content_type=kind,
            message=message,
            **{each: getattr(message, each) for each in ("queue", "broker", "countdown", "eta")},
        )

    def __str__(self) -> str:
        from celery.utils.saferepr import saferepr

        arguments = [saferepr(each, maxlen=200) for each in self.args]
        arguments += [f"{key}={saferepr(each, maxlen=200)}" for key, each in self.kwargs.items()]
        return f"{self.name}({', '.join(arguments)})"


@dataclass(slots=True, kw_only=True)
class _Dispatch:
    """What was handed to one place at once, and shares its fate."""

    place: Place
    tasks: Sequence[RecordedTask]
    dropped: Event = field(default_factory=Event)

    @property
    def state(self) -> str:
        """What became of it so far: stored, pending or rolled_back."""
        from .capture.records import SessionRecord

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
        self._replaced, self._outbox.sink = self._outbox.sink, self._record
        return self

    def __exit__(self, *error: object) -> None:
        self._outbox.sink = self._replaced

    def _record(self, place: Place, messages: Sequence[OutboxMessage]) -> None:
        # First of all: what cannot be written is not recorded.
        if not self._is_fake:
            place.add(messages)
        read = [RecordedTask.of(each, place.database.name) for each in messages]
        dispatch = _Dispatch(place=place, tasks=[task for task in read if task is not None])
        self._dispatches.append(dispatch)
        place.call_when_dropped(messages[0].task_name, dispatch.dropped.set)

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
        self._refuse_eager()
        name, args = getattr(task, "name", task), None if args is None else list(args)
        found = [each for each in self.stored if each.name == name and _has(each, args, kwargs)]
        if (not found) if count is None else len(found) != count:
            asked = f"{name} to be stored {'at least once' if count is None else f'{count} times'}"
            given = f"with args {args!r} and kwargs {kwargs!r} (None: any)"
            raise AssertionError(f"expected {asked} {given}, found {len(found)}.\n{self}")
        return found

    def assert_nothing_stored(self) -> None:
        """Assert that nothing is stored, and nothing waits for a commit."""
        __tracebackhide__ = True
        self._refuse_eager()
        if self.stored or self.pending:
            raise AssertionError(f"expected nothing to be stored, and nothing pending.\n{self}")

    def drain(self, into: Literal["eager", "broker"] = "eager", *, throw: bool = True) -> list[Any]:
        """Run what is stored and was not drained before, in order; return the results.

        ``"eager"``: in this process, at once whatever its delay, by ``Task.apply``; and what a worker
        would send next: links, the rest of a chain, the body of a chord. ``"broker"``: published as
        by the relay, for a worker. The rows stay, and what tasks store is left to the next call.

        Raises the error of a task that failed here, unless ``throw`` is False; ConfigurationError
        when a task is not registered here; OutboxError when a broker did not take a message.
        """
        self._refuse_eager()
        left = [task for task in self.stored if id(task) not in self._drained]
        if into not in {"eager", "broker"}:
            raise OptionError(f"drain: expected 'eager' or 'broker', got {into!r}.")
        return self._publish(left) if into == "broker" else self._run(left, throw=throw)

    def _run(self, left: Sequence[RecordedTask], *, throw: bool) -> list[Any]:
        from celery import current_app

        app, current = self._outbox.app, current_app._get_current_object()
        if missing := {task.name for task in left} - set(app.tasks):
            raise ConfigurationError(
                f"drain: expected tasks registered on the app {app.main!r}, found {sorted(missing)}, "
                "which are not. Import their modules, or drain('broker') for a worker that has them."
            )
        run = _EagerRun(app, throw=throw)
        app.set_current()  # as in a worker
        try:
            for task in left:
                self._drained.add(id(task))
                run.run(task)
            run.run_bodies_of_chords()
        finally:
            current.set_current()
        return run.results

    def _publish(self, left: Sequence[RecordedTask]) -> list[Any]:
        from .relay.publishers import publisher_for

        results: list[Any] = []
        for broker in dict.fromkeys(task.broker for task in left):
            now, tasks = time.monotonic(), [task for task in left if task.broker == broker]
            batch = [_claimed(number, task.message, now) for number, task in enumerate(tasks)]
            publisher = publisher_for(self._outbox.connection(broker))
            try:
                publisher.connect()
                outcome = publisher.publish(batch, deadline=now + 60, read_at=now)
            finally:
                publisher.close()
            for number in sorted(outcome.accepted):
                self._drained.add(id(tasks[number]))
                results.append(self._outbox.app.AsyncResult(tasks[number].id))
            if left_over := len(batch) - len(outcome.accepted):
                reason = next(iter(outcome.errors.values()), "no time was left")
                raise OutboxError(
                    f"drain: expected broker {broker!r} to take {len(batch)} message(s), found that it "
                    f"did not take {left_over}: {reason}"
                )
        return results

    def _refuse_eager(self) -> None:
        __tracebackhide__ = True
        if self._outbox.app.conf.task_always_eager:
            raise AssertionError(
                "expected task_always_eager to be off, found it on: nothing is stored then. Turn it "
                "off where the outbox is tested, and run what is stored with drain()."
            )

    def __str__(self) -> str:
        states = {state: self._tasks(state) for state in ("stored", "pending", "rolled_back")}
        parts = {state: "".join(f"\n  {task}" for task in tasks) for state, tasks in states.items()}
        return "\n".join(f"{state}:{part or ' nothing'}" for state, part in parts.items())


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


def _outbox_of(app: Any) -> Any:
    """The Outbox itself, untyped: its module stands on the same floor as this one."""
    from celery import Celery

    from .capture.doors import attached

    found = attached(app) if isinstance(app, Celery) else app
    if not hasattr(found, "sink"):
        raise ConfigurationError(
            f"outbox_app: expected a Celery app with an Outbox, or an Outbox, found {app!r}. Define in "
            "conftest.py:\n\n    @pytest.fixture\n    def outbox_app():\n        from your_project "
            "import app  # the Celery app, or its Outbox\n        return app\n"
        )
    return found


def _has(task: RecordedTask, args: list[Any] | None, kwargs: dict[str, Any] | None) -> bool:
    """Whether it has these arguments, or what they become on their way; None stands for any."""
    kind, pairs = task.content_type, ((task.args, args), (task.kwargs, kwargs))
    return all(want is None or want == got or _received(want, kind) == got for got, want in pairs)


def _received(value: Any, content_type: str) -> Any:
    from kombu import serialization
    from kombu.exceptions import EncodeError

    try:
        _, encoding, data = serialization.dumps(
            value, serialization.registry.type_to_name[content_type]
        )
    except EncodeError:
        return value  # such as mock.ANY
    return serialization.loads(data, content_type, encoding, accept=[content_type])


def _claimed(number: int, message: OutboxMessage, now: float) -> ClaimedMessage:
    """What a relay would be handed, at the monotonic time ``now``."""
    from .message import ClaimedMessage

    same = ("broker", "task_id", "task_name", "queue", "envelope", "body")
    due_in = None if message.countdown is None else message.made_at + message.countdown - now
    if message.eta is not None:
        due_in = (message.eta - datetime.now(UTC)).total_seconds()
    return ClaimedMessage(
        id=number,
        attempts=1,
        due_in=due_in,
        expires_in=None if message.expires_in is None else message.made_at + message.expires_in - now,
        **{name: getattr(message, name) for name in same},
    )
