"""Eager mode: a task that would have been stored runs when its transaction has committed.

Celery's own ``apply_async`` checks, merges and serializes everything at the call, as ever; only the
last step, ``Task.apply``, is put off. What a stored dispatch refuses at the call is refused here, too.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from celery import Celery, states
from celery.result import EagerResult, GroupResult, denied_join_result
from celery.utils.functional import maybe_list
from kombu import serialization
from kombu.common import Broadcast

from ..errors import DispatchError, OptionError
from .batch import current_batch
from .place import Place
from .producer import tidied
from .times import read_eta

__all__ = [
    "Deferred",
    "DeferredResult",
    "EagerCall",
    "EagerSink",
    "EagerTask",
    "apply_last",
    "copied",
    "refuse_connection",
    "unheard",
]

_LINKS = ("link", "link_error")


class DeferredResult(EagerResult):  # type: ignore[misc]  # Celery has no types
    """The result of a task that runs after the commit; pending until then."""

    def __init__(self, id: str, name: str | None = None) -> None:  # noqa: A002 - Celery's name
        super().__init__(id, None, states.PENDING, name=name)

    def run(self, apply: Callable[[], Any]) -> None:
        """Run the task, or what a canvas runs last, and take its result over, if it has not run."""
        if self.ready():
            return
        try:
            result = apply()
        except Exception as error:
            self._state, self._result = states.FAILURE, error
            raise
        if isinstance(result, GroupResult):
            self._take_group(result)
        else:
            self._state, self._result = result.state, result.result
            self._traceback = result.traceback

    def _take_group(self, group: GroupResult) -> None:
        failed = [each for each in group.results if each.state in states.PROPAGATE_STATES]
        self._state = failed[0].state if failed else states.SUCCESS
        self._result = failed[0].result if failed else group.join(disable_sync_subtasks=False)

    def __reduce__(self) -> Any:
        # What is pickled stays as it is now.
        return EagerResult, self.__reduce_args__()

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """The task's value. Raises DispatchError before the commit: waiting would be in vain."""
        if not self.ready():
            raise DispatchError(
                f"expected the task {self.id} to have run, found that its transaction has not "
                "committed. In eager mode it runs after the commit: ask for its result then."
            )
        return super().get(*args, **kwargs)

    wait = get

    def ready(self) -> bool:
        """Whether the task has run."""
        return self._state in states.READY_STATES


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerTask:
    """What a worker would have been sent, for who wants to know what an eager dispatch was.

    Attributes:
        countdown, eta: the delay asked for; None when none was.
        next: callbacks and errbacks.
    """

    id: str
    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    content_type: str
    queue: str
    broker: str
    countdown: float | None
    eta: datetime | None
    headers: Mapping[str, Any]
    properties: Mapping[str, Any]
    next: Mapping[str, Any]

    @classmethod
    def of_signature(cls, app: Celery, signature: Any, broker: str) -> EagerTask:
        """Build it of a signature that has its id."""
        task = app._tasks.get(signature.task)
        options = {**signature.options, "args": signature.args, "kwargs": signature.kwargs}
        own = {} if task is None else task._get_exec_options()
        return cls.of(app, signature.task, broker, {**own, **options})

    @classmethod
    def of(cls, app: Celery, name: str, broker: str, options: Mapping[str, Any]) -> EagerTask:
        """Build it of the options, arguments among them; raises what a stored dispatch would."""
        given = dict(options)
        args, kwargs = given.pop("args", None) or (), given.pop("kwargs", None) or {}
        links = [maybe_list(given.pop(each, None)) for each in _LINKS]
        route = app.amqp.router.route(dict(given), name, args, kwargs, app._tasks.get(name))
        given["reply_to"] = given.get("reply_to") or app.thread_oid
        headers, properties, body, _ = app.amqp.as_task_v2(
            given.pop("task_id"), name, args, kwargs, callbacks=links[0], errbacks=links[1], **given
        )
        countdown, eta = given.get("countdown"), read_eta(headers["eta"], app.timezone)
        return cls(
            id=headers["id"],
            name=name,
            args=args,
            kwargs=kwargs,
            content_type=serialization.registry.name_to_type[_serializer(app, given)],
            queue=_destination(route),
            broker=broker,
            countdown=countdown if countdown or eta is None else None,
            eta=None if countdown else eta,
            headers=headers | (given.get("headers") or {}),
            properties=tidied(properties | _properties(app, route)),
            next=body[2],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferred:
    """What runs after the commit, unless somebody runs it before."""

    result: DeferredResult
    apply: Callable[[], Any]

    def run(self) -> None:
        """Run it now; again does nothing."""
        self.result.run(self.apply)

    def run_in(self, place: Place, tasks: Sequence[EagerTask], sink: EagerSink) -> None:
        """Run it when the transaction has committed, or at once; tell ``sink`` now."""

        def dispatch() -> None:
            sink(place, tasks, self)
            place.call_after_commit(self.result.name, self.run)

        batch = current_batch()
        if batch is None:
            dispatch()
        else:
            batch.send_later(dispatch)


#: Hears of what is deferred: where it would have been stored, and its tasks.
EagerSink = Callable[[Place, Sequence[EagerTask], Deferred], None]


def unheard(place: Place, tasks: Sequence[EagerTask], deferred: Deferred) -> None:
    """The sink of every day: nobody listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerCall:
    """One call of ``apply_async``, up to the moment at which the task would run.

    Attributes:
        options: those of ``Task.apply``, arguments among them.
    """

    task: Any
    options: Mapping[str, Any]

    @classmethod
    def of(cls, apply_async: Callable[..., Any], task: Any, options: Mapping[str, Any]) -> EagerCall:
        """Take what ``apply_async(task, **options)`` would run; its errors are raised here."""
        taken: dict[str, Any] = {}

        def take(args: Any, kwargs: Any, **others: Any) -> None:
            taken.update(others, args=args, kwargs=kwargs)

        # The same task, but for its last step.
        stand_in: Any = object.__new__(type(task))
        stand_in.__dict__.update(task.__dict__, apply=take)
        apply_async(stand_in, **options)
        return cls(task=task, options=_frozen(task, taken))

    def run(self) -> Any:
        """Run the task, as ``apply_async`` does."""
        with denied_join_result():
            return self.task.apply(**self.options)


def apply_last(apply_async: Callable[..., Any], task: Any, options: Mapping[str, Any]) -> Any:
    """Run a task that is not stored: at once, but as a member of ``outbox.bulk`` last."""
    batch = current_batch()
    if batch is None or not batch.holds_direct:
        return apply_async(task, **options)
    call = EagerCall.of(apply_async, task, options)
    result = DeferredResult(call.options["task_id"], task.name)
    batch.send_later(lambda: result.run(call.run))
    return result


def refuse_connection(options: Mapping[str, Any]) -> None:
    """Raise OptionError for the option that Celery does not look at in eager mode."""
    if options.get("connection") is not None:
        raise OptionError(
            "connection: expected none for a dispatch through the outbox, which contacts no broker, "
            "got one. Leave it out, or add via_outbox=False."
        )


def copied(value: Any, serializer: str) -> Any:
    """The value as it is now, through the serializer, whose errors show at the call."""
    content_type, content_encoding, data = serialization.dumps(value, serializer)
    return serialization.loads(data, content_type, content_encoding, accept=[content_type])


def _serializer(app: Celery, options: Mapping[str, Any]) -> str:
    return options.get("serializer") or str(app.conf.task_serializer)


def _frozen(task: Any, options: dict[str, Any]) -> dict[str, Any]:
    """``options`` that the caller cannot change any more; Celery has copied the arguments."""
    for name in _LINKS:
        if options.get(name):
            options[name] = copied(maybe_list(options[name]), _serializer(task.app, options))
    for name in options.keys() - {"args", "kwargs", *_LINKS}:
        if type(options[name]) in {dict, list}:
            options[name] = copy.deepcopy(options[name])
    return options


def _properties(app: Celery, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that Celery makes properties of the message: those that it has no name for."""
    named = {*(options.get("stamped_headers") or ())}
    for function in (app.send_task, app.amqp.as_task_v2, app.amqp.send_task_message):
        named.update(inspect.signature(function).parameters)
    return {name: value for name, value in options.items() if name not in named}


def _destination(route: Mapping[str, Any]) -> str:
    queue = route.get("queue")
    if any(isinstance(each, Broadcast) for each in [queue, *(route.get("declare") or ())]):
        raise OptionError(
            "expected a queue that a relay can declare, got a Broadcast queue, whose name belongs to "
            "one consumer. Dispatch it with via_outbox=False."
        )
    return str(queue.name if queue is not None else route.get("routing_key") or route.get("exchange"))
