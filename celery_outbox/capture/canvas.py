"""Groups, chains and chords: their choice reaches the members, and what they store goes together.

A canvas's options of ours never reach Celery, which would merge them over the members' own and write
them into a chord's body. They are remembered beside the dispatch instead, for members without a
choice of their own. Of a chain that is its first task: the others are sent by workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from celery import Celery, uuid
from celery.canvas import Signature, _chain, _chord, group, maybe_signature

from .batch import batching
from .choice import OPTIONS, Level, choosing, of_canvas, take, under
from .doors import attached, wrap
from .eager import DeferredResult
from .place import Place
from .view import chord_view_of

__all__ = ["first_tasks", "open_canvases"]


def open_canvases() -> None:
    """Wrap Celery's canvases; again does nothing."""
    for canvas in (group, _chain, _chord):
        wrap(canvas, "apply_async", _apply_async)
    wrap(_chord, "run", _run_chord)


def _apply_async(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_async(self: Any, *args: Any, **options: Any) -> Any:
        own = {option: self.options[option] for option in OPTIONS if option in self.options}
        said = {**own, **{key: value for key, value in take(options).items() if value is not None}}
        if own:
            self = self.clone()
            take(self.options)
        level = under(of_canvas(), said)
        outlet = attached(self.app)
        if outlet is not None and self.app.conf.task_always_eager:
            place = outlet.place_of(first_tasks(self, level))
            if place is not None:
                return _apply_eagerly(original, self, level, place, args, options)
        with choosing(level), batching():
            return original(self, *args, **options)

    return apply_async


def _apply_eagerly(
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
        group_id = options.pop("task_id", None) or canvas.options.get("task_id") or uuid()
        with choosing(level):
            results = [
                maybe_signature(task, app=canvas.app).clone().apply_async(*args, **options)
                for task in canvas.tasks
            ]
        return canvas.app.GroupResult(group_id, results)
    frozen = canvas.clone()
    result = DeferredResult(options.get("task_id") or uuid(), canvas.task)

    def apply() -> Any:
        with choosing({}):
            return original(frozen, *args, **options)

    place.call_after_commit(canvas.task, lambda: result.run(apply))
    return result


def _run_chord(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(
        self: Any, header: Any, body: Any, partial_args: Any, app: Any = None, **options: Any
    ) -> Any:
        app = app or self._get_app(body)
        outlet = attached(app)
        place = None if outlet is None else outlet.place_of(first_tasks(header, of_canvas()))
        if place is None:
            return original(self, header, body, partial_args, app=app, **options)
        # What Celery writes to the result backend waits for the commit.
        view = chord_view_of(app, _ChordBackend(app, place))
        header._app = view
        return original(self, header, body, partial_args, app=view, **options)

    return run


def first_tasks(canvas: Any, said: Level) -> Iterator[tuple[Any, Level]]:
    """The signatures that dispatching ``canvas`` sends, each with what the canvases around it say."""
    if isinstance(canvas, dict) and not isinstance(canvas, Signature):
        canvas = Signature.from_dict(canvas)
    inside = under(said, {key: canvas.options[key] for key in OPTIONS if key in canvas.options})
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

    def __init__(self, app: Celery, place: Place) -> None:
        self._app = app
        self._place = place

    def apply_chord(self, *args: Any, **kwargs: Any) -> None:
        """Prepare the backend; one that cannot count sends ``celery.chord_unlock`` instead."""
        backend = self._app.backend
        if getattr(backend, "implements_incr", False):
            self._place.call_before_commit("celery.chord", lambda: backend.apply_chord(*args, **kwargs))
            return
        with choosing({"via_outbox": True, "outbox_database": self._place.database.name}):
            backend.apply_chord(*args, **kwargs)

    def set_chord_size(self, group_id: str, chord_size: int) -> None:
        """Tell the backend how many results to wait for."""
        self._place.call_before_commit(
            "celery.chord", lambda: self._app.backend.set_chord_size(group_id, chord_size)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app.backend, name)
