"""Groups, chains and chords: their choice reaches the members, and what they store goes together.

A canvas's options of ours never reach Celery, which would merge them over the members' own and write
them into a chord's body. They are remembered beside the dispatch instead, for members without a
choice of their own. Of a chain that is its first task: the others are sent by workers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any

import celery.canvas
from celery import Celery, Task, uuid
from celery.backends.base import Backend
from celery.canvas import Signature, _chain, _chord, chunks, group, maybe_signature

from .batch import Batch, batching
from .choice import OPTIONS, Level, choosing, of_canvas, take, under
from .doors import Outlet, attached, is_republishing, wrap
from .eager import Deferred, DeferredResult, copied, refuse_connection
from .place import Place
from .view import chord_view_of

__all__ = ["first_tasks", "open_canvases"]

#: What is remembered of a chord's choice beside its count in the result backend.
_REMEMBERED = ("via_outbox", "outbox_database", "outbox_broker")
_DAY = 86400  # seconds; where results never expire

#: The options of an eager chain or chord that are not those of its first tasks.
_KEPT = frozenset({"args", "kwargs", "task_id", "link", "link_error"})

# Celery is putting ids on the tasks of a chain that it will send later: on these, and not on copies.
_is_freezing: ContextVar[bool] = ContextVar("celery_outbox_freezing", default=False)


def open_canvases() -> None:
    """Wrap Celery's canvases; again does nothing."""
    for canvas in (group, _chain, _chord):
        wrap(canvas, "apply_async", _apply_async)
    wrap(chunks, "apply_async", _apply_chunks)
    wrap(_chain, "unchain_tasks", _unchain)
    wrap(_chain, "prepare_steps", _prepare_steps)
    wrap(celery.canvas, "maybe_unroll_group", _unroll)
    wrap(_chord, "__init__", _make_chord)
    wrap(_chord, "run", _run_chord)
    wrap(Task, "add_to_chord", _add_to_chord)


def _apply_async(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_async(self: Any, *args: Any, **options: Any) -> Any:
        own = _own(self)
        said = {**own, **{key: value for key, value in take(options).items() if value is not None}}
        if own:
            self = self.clone()
            take(self.options)
        level = under(of_canvas(), said)
        outlet = attached(self.app)
        if outlet is not None and isinstance(self, group):
            self = _telling(self)
        elif isinstance(self, _chain):
            level = _of_beginning(self, level)
        is_eager = outlet is not None and self.app.conf.task_always_eager
        # Celery itself passes it to no member of a chord, and looks at none in eager mode.
        if outlet is not None and (is_eager or options.get("connection") is not None):
            place = outlet.place_of(first_tasks(self, level), is_republished=is_republishing())
            if place is not None:
                refuse_connection(options)
                if is_eager:
                    return _apply_eagerly(outlet, original, self, level, place, args, options)
        with choosing(level), batching():
            return original(self, *args, **options)

    return apply_async


def _own(canvas: Any) -> dict[str, Any]:
    """What a signature or canvas says by its own options."""
    return {option: canvas.options[option] for option in OPTIONS if option in canvas.options}


def _signature(task: Any) -> Any:
    return task if isinstance(task, Signature) else Signature.from_dict(task)


def _apply_chunks(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_async(self: Any, *args: Any, **options: Any) -> Any:
        # Celery makes a group of them and forgets the options that were set on them.
        own = {key: value for key, value in _own(self).items() if options.get(key) is None}
        return original(self, *args, **options | own)

    return apply_async


def _unchain(original: Callable[..., Any]) -> Callable[..., Any]:
    def unchain_tasks(self: Any) -> Any:
        # Celery makes a longer chain of them and forgets the options that were set on this one.
        tasks = original(self)
        if tasks and (own := _own(self)):
            tasks[0].options.update(under(own, _own(tasks[0])))
        return tasks

    return unchain_tasks


def _unroll(original: Callable[..., Any]) -> Callable[..., Any]:
    def maybe_unroll_group(group: Any) -> Any:
        # Celery takes the member of a group of one, and forgets the options that were set on the group.
        task = original(group)
        own = {} if task is group or _is_freezing.get() else _own(group)
        if own:
            task = _signature(task).clone()
            task.options.update(under(own, _own(task)))
        return task

    return maybe_unroll_group


def _prepare_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    def prepare_steps(self: Any, *args: Any, **options: Any) -> Any:
        token = _is_freezing.set(not options.get("clone", True))
        try:
            return original(self, *args, **options)
        finally:
            _is_freezing.reset(token)

    return prepare_steps


def _make_chord(original: Callable[..., Any]) -> Callable[..., Any]:
    def make_chord(self: Any, header: Any, *args: Any, **options: Any) -> None:
        original(self, header, *args, **options)
        # Celery keeps the members of a group, and forgets the options that were set on it.
        if isinstance(header, group):
            self.options.update(under(_own(header), _own(self)))

    return make_chord


def _of_beginning(chain: Any, level: Level) -> Level:
    """What is said for the first task of ``chain``.

    A chain at its beginning, or a group of one, is taken apart by Celery with no regard to options.
    """
    first = next(map(_signature, chain.tasks), None)
    while isinstance(first, _chain) or (isinstance(first, group) and len(first.tasks) == 1):
        level = under(level, _own(first))
        first = next(map(_signature, first.tasks), None)
    return level


def _telling(canvas: Any) -> Any:
    """``canvas``, whose members say what groups among them say: Celery takes those apart, too."""
    tasks = list(canvas.tasks)
    if any(isinstance(each, group) and _says_something(each) for each in map(_signature, tasks)):
        canvas = canvas.clone()
        canvas.tasks = _told(tasks, {})
    return canvas


def _says_something(canvas: Any) -> bool:
    return bool(_own(canvas)) or any(
        isinstance(each, group) and _says_something(each) for each in map(_signature, canvas.tasks)
    )


def _told(tasks: Iterable[Any], said: Level) -> list[Any]:
    told = []
    for task in map(_signature, tasks):
        member = task.clone()
        if isinstance(member, group):
            member.tasks = _told(member.tasks, under(said, take(member.options)))
        else:
            member.options.update({**under(said, own), **own} if (own := _own(member)) else said)
        told.append(member)
    return told


def _apply_eagerly(
    outlet: Outlet,
    original: Callable[..., Any],
    canvas: Any,
    level: Level,
    place: Place,
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    """Run a canvas in eager mode when the transaction of its stored tasks has committed.

    Members of a group go each by its own choice; of a chain and a chord Celery itself runs the rest.
    """
    if isinstance(canvas, group):
        if {"link", "link_error"} & options.keys():
            return original(canvas, *args, **options)  # refuses them
        group_id = options.pop("task_id", None) or canvas.options.get("task_id") or uuid()
        with choosing(level), batching():
            results = [each.apply_async(*args, **options) for each in _members(canvas)]
        return canvas.app.GroupResult(group_id, results)
    for signature, _ in first_tasks(canvas, level):
        refuse_connection(signature.options)
    # As it is now, with the ids that its first tasks will have.
    frozen = Signature.from_dict(copied(canvas, canvas.app.conf.task_serializer), app=canvas.app)
    partial, first = args[0] if args else options.get("args"), []
    others = {name: each for name, each in (canvas.options | options).items() if name not in _KEPT}
    for signature, said in first_tasks(frozen, level):
        signature.options.setdefault("task_id", uuid())
        first.append((signature.clone(partial, **others), said))
    result = DeferredResult(options.get("task_id") or uuid(), canvas.task)

    def apply() -> Any:
        with choosing({}):
            return original(frozen, *args, **options)

    tasks = outlet.described(first, is_republished=is_republishing())
    Deferred(result=result, apply=apply).run_in(place, tasks, outlet.eager_sink)
    return result


def _members(canvas: Any) -> Iterator[Any]:
    """The members of a group and of the groups among them, which Celery puts in one row."""
    for task in canvas.tasks:
        member = maybe_signature(task, app=canvas.app).clone()
        if isinstance(member, group):
            yield from _members(member)
        else:
            yield member


def _run_chord(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(
        self: Any, header: Any, body: Any, partial_args: Any, app: Any = None, **options: Any
    ) -> Any:
        app = app or self._get_app(body)
        outlet = attached(app)
        place = None
        if outlet is not None:
            tasks = first_tasks(header, of_canvas())
            place = outlet.place_of(tasks, is_republished=is_republishing())
        if place is None:
            return original(self, header, body, partial_args, app=app, **options)
        header = _telling(header)
        with batching() as batch:
            # What Celery writes to the result backend waits for the commit.
            view = chord_view_of(app, _ChordBackend(app, place, batch, of_canvas()))
            header._app = view
            return original(self, header, body, partial_args, app=view, **options)

    return run


def _add_to_chord(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_to_chord(self: Any, sig: Any, lazy: bool = False) -> Any:
        app = self._get_app()
        outlet = attached(app)
        if outlet is None or not self.request.chord:
            return original(self, sig, lazy)
        level = _choice_of_chord(self.backend, self.request.group)
        if lazy:
            sig.options.update(under(level, _own(sig)))
        place = None if lazy else outlet.place_of(first_tasks(sig, level), is_republished=False)
        with choosing(level), batching() as batch:
            if place is None:
                return original(self, sig, lazy)
            # The count of the chord's tasks grows with the commit. Celery asks for nothing else.
            backend = _ChordBackend(app, place, batch, level)
            return original(SimpleNamespace(request=self.request, backend=backend), sig, lazy)

    return add_to_chord


def _choice_of_chord(backend: Any, group_id: str) -> Level:
    """What was said for the header of a chord when it was dispatched; of one sent directly nothing."""
    if not _can_grow(backend):
        return {}
    said: Level = json.loads(backend.get(_key_of_choice(backend, group_id)) or "{}")
    return said


def _can_grow(backend: Any) -> bool:
    """Whether a task of a chord's header may add others to it: of Celery's own only Redis lets it."""
    # Importing it needs redis, which is not installed everywhere; who has such a backend has done so.
    module = sys.modules.get("celery.backends.redis")
    return module is not None and isinstance(backend, module.RedisBackend)


def _key_of_choice(backend: Any, group_id: str) -> Any:
    return backend.get_key_for_group(group_id, ".outbox")


def first_tasks(canvas: Any, said: Level) -> Iterator[tuple[Any, Level]]:
    """The signatures that dispatching ``canvas`` sends, each with what the canvases around it say."""
    canvas = _signature(canvas)
    inside = under(said, _own(canvas))
    if isinstance(canvas, _chord | group):
        for task in getattr(canvas.tasks, "tasks", canvas.tasks):
            yield from first_tasks(task, inside)
    elif isinstance(canvas, _chain):
        if canvas.tasks:
            yield from first_tasks(canvas.tasks[0], inside)
    else:
        yield canvas, said


class _ChordBackend:
    """The result backend as a chord sees it at its dispatch.

    Writes are made just before COMMIT: not before, for a rollback would leave them behind; and not
    after, for a crash in between would leave a chord whose body never runs.
    """

    def __init__(self, app: Celery, place: Place, batch: Batch, said: Level) -> None:
        self._app = app
        self._place = place
        self._batch = batch
        self._said = {name: said[name] for name in _REMEMBERED if said.get(name) is not None}

    def apply_chord(self, *args: Any, **kwargs: Any) -> None:
        """Prepare the backend; for one that has to be polled, Celery sends ``celery.chord_unlock``."""
        backend = self._backend
        backend.ensure_chords_allowed()
        if getattr(backend.apply_chord, "__func__", None) is not Backend.apply_chord:
            self._write(lambda: backend.apply_chord(*args, **kwargs))
            return
        here = {"via_outbox": True, "outbox_database": self._place.database.name}
        with choosing({**of_canvas(), **here}):
            backend.apply_chord(*args, **kwargs)

    def set_chord_size(self, group_id: str, chord_size: int) -> None:
        """Tell the backend how many results to wait for."""
        if self._said and _can_grow(self._backend):
            self._write(lambda: self._remember(group_id))
        self._write(lambda: self._backend.set_chord_size(group_id, chord_size))

    def add_to_chord(self, group_id: str, result: Any) -> None:
        """Tell the backend to wait for one result more."""
        backend = self._backend
        if getattr(backend.add_to_chord, "__func__", None) is Backend.add_to_chord:
            backend.add_to_chord(group_id, result)  # refuses it
        self._write(lambda: backend.add_to_chord(group_id, result))

    def _remember(self, group_id: str) -> None:
        # For Task.add_to_chord, in a worker: no message tells it.
        backend = self._backend
        write = partial(backend.client.set, ex=backend.expires or _DAY)
        backend.ensure(write, (_key_of_choice(backend, group_id), json.dumps(self._said)))

    def _write(self, write: Callable[[], None]) -> None:
        def write_only() -> None:
            # Celery makes a result of the whole header, and would subscribe to every member.
            with batching(subscribes=False):
                write()

        self._batch.call_before_commit(self._place, "celery.chord", write_only)

    @property
    def _backend(self) -> Any:
        """The app's; a chord inside another one is given the other's view of the app."""
        backend = self._app.backend
        return backend._backend if isinstance(backend, _ChordBackend) else backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)
