"""Who runs this code: which thread or asyncio task, in which call, for which request.

Transactions are visible to who began them. A thread of a pool works for many, one call after the
other, so the thread alone says little: a *call* is one run of code in one context, and ends with it.
A *request* is put into the context by the ASGI middleware and reaches, through copies of the
context, every thread and task that works for it.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

__all__ = ["Mark", "Request", "current_request", "enter_request", "here", "nowhere"]


class _Identity:
    """Something that is compared by identity and held weakly."""

    __slots__ = ("__weakref__",)


class _Thread(_Identity):
    """A thread; ``call`` is the latest run of code seen in it."""

    __slots__ = ("call", "ident")

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        self.call: weakref.ref[_Call] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether it is a pool's and waits for work, or is just handing over a result."""
        frame = sys._current_frames().get(self.ident)
        if frame is None:
            return False
        is_pooled = False
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if module.partition(".")[0] not in _MACHINERY:
                return False
            is_pooled = is_pooled or module.startswith(_POOLS)
            frame = frame.f_back
        return is_pooled


#: Whose frames alone are on the stack of a pool's thread between two calls.
_MACHINERY = frozenset({"threading", "queue", "selectors", "asyncio", "anyio", "concurrent", "logging"})
_POOLS = ("anyio.", "concurrent.futures.")


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.owner = _Thread()


class _Call(_Identity):
    """One run of code; the context that holds it may be gone before or after its end."""

    __slots__ = ("mark", "owner")

    def __init__(self, owner: _Thread) -> None:
        self.owner = owner
        #: What ``here`` gave last, to be given again.
        self.mark: Mark | None = None


class Request:
    """One web request, shared by everything that works for it."""

    __slots__ = ("is_over",)

    def __init__(self) -> None:
        self.is_over = False


_thread = _ThreadState()
_call: ContextVar[_Call | None] = ContextVar("celery_outbox_call", default=None)
# What ``here`` gave last in an asyncio task; a task begun by that one has inherited it.
_task_mark: ContextVar[Mark | None] = ContextVar("celery_outbox_task_mark", default=None)
_request: ContextVar[Request | None] = ContextVar("celery_outbox_request", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A place in the program, to be compared with a later one; keeps nothing alive."""

    owner: weakref.ref[Any]
    call: weakref.ref[_Call] | None
    request: Request | None
    is_task: bool

    def is_same_owner(self, other: Mark) -> bool:
        """Whether the same thread or asyncio task stands at both."""
        owner = self.owner()
        return owner is not None and owner is other.owner()

    def is_same_call(self, other: Mark) -> bool:
        """Whether it is one run of code: always true of one task, and of a plain thread."""
        if not self.is_same_owner(other):
            return False
        if self.is_task or self.call is None or other.call is None:
            return True
        call = self.call()
        return call is not None and call is other.call()

    @property
    def has_ended(self) -> bool:
        """Whether the run of code that stood here is over."""
        owner = self.owner()
        if owner is None:
            return True
        if self.is_task:
            return bool(owner.done())
        call = None if self.call is None else self.call()
        return call is None or owner.call is None or owner.call() is not call or owner.is_idle


def nowhere() -> Mark:
    """The mark of what was begun before anybody looked."""
    return Mark(owner=weakref.ref(_Identity()), call=None, request=None, is_task=False)


def here() -> Mark:
    """Mark the place that is running now."""
    task, request = _current_task(), current_request()
    if task is not None:
        mark = _task_mark.get()
        if mark is None or mark.owner() is not task or mark.request is not request:
            mark = Mark(owner=weakref.ref(task), call=None, request=request, is_task=True)
            _task_mark.set(mark)
        return mark
    owner = _thread.owner
    call = _call.get()
    if call is None or call.owner is not owner:
        call = _Call(owner)
        _call.set(call)
    mark = call.mark
    if mark is None or mark.request is not request:
        mark = call.mark = Mark(
            owner=weakref.ref(owner), call=weakref.ref(call), request=request, is_task=False
        )
    owner.call = mark.call
    return mark


def is_served_by_loop() -> bool:
    """Whether this code runs in an event loop, or in a thread to which anyio hands calls from one.

    Such code may have come here from another thread, without anything in its context to tell.
    """
    if _current_task() is not None:
        return True
    return type(threading.current_thread()).__module__.partition(".")[0] == "anyio"


def current_request() -> Request | None:
    """The request that this code works for, None without the middleware and once it is over."""
    request = _request.get()
    return None if request is None or request.is_over else request


def enter_request() -> Any:
    """Begin a request in this context; returns the token that ``leave_request`` takes."""
    return _request.set(Request())


def leave_request(token: Any) -> None:
    """End the request begun with ``token``; what it leaves behind works for itself."""
    if (request := _request.get()) is not None:
        request.is_over = True
    _request.reset(token)


def _current_task() -> asyncio.Task[Any] | None:
    # asyncio's own question raises where no loop runs, which costs more than all the rest of ``here``.
    return None if asyncio._get_running_loop() is None else asyncio.current_task()
