"""One batch on its way to SQS: which messages share a request, and what became of each.

Requests are made in threads; everything else happens in the caller's own. A message is accepted only
when SQS has named it as successful, in each of its queues.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from ...publishing import Outcome
from ...transports import SQS_BYTES
from .sqs_errors import NOT_KNOWN, Verdict, said, verdict_of

__all__ = ["Entry", "Line", "Sending"]

#: Messages that one request takes.
MAX_ENTRIES = 10


@dataclass(slots=True, eq=False)
class Entry:
    """One message for one queue.

    Attributes:
        row: whose message it is.
        line: the queue's.
        wire: the entry of the request.
        size: bytes that count against the limit.
        is_alone: to be sent in a request of its own, so that it is known which one is refused.
    """

    row: int
    line: Line
    wire: dict[str, Any]
    size: int
    is_alone: bool = False

    @property
    def group(self) -> Any:
        """What keeps its order; on a standard queue each message is a group of its own."""
        return str(self.wire["MessageGroupId"]) if self.line.is_fifo else self


@dataclass(slots=True, eq=False)
class Line:
    """What waits for one queue; of each group at most one message is under way.

    Attributes:
        queue: its name as Kombu knows it.
        canonical: its name as SQS knows it.
        url: where it is sent.
        is_fifo: whether groups have an order.
        is_stopped: nothing more is sent from here.
        declarations: how often the queue was found missing and made again.
        groups: what waits of each group, in order; a group is here as long as it is under way.
        ready: the groups of which a message may be sent.
        held: the groups of which none may be sent any more.
    """

    queue: str
    canonical: str
    url: str
    is_fifo: bool
    is_stopped: bool = False
    declarations: int = 0
    groups: dict[Any, deque[Entry]] = field(default_factory=dict)
    ready: deque[Any] = field(default_factory=deque)
    held: set[Any] = field(default_factory=set)

    @property
    def is_full(self) -> bool:
        """Whether there is enough for a request."""
        return len(self.ready) >= MAX_ENTRIES

    def add(self, entry: Entry) -> bool:
        """Let an entry wait, unless it must not be sent."""
        group = entry.group
        if self.is_stopped or group in self.held:
            return False
        if (waiting := self.groups.get(group)) is not None:
            waiting.append(entry)
        else:
            self.groups[group] = deque((entry,))
            self.ready.append(group)
        return True

    def take(self) -> list[Entry]:
        """What the next request carries."""
        taken: list[Entry] = []
        size = 0
        while self.ready and len(taken) < MAX_ENTRIES:
            entry = self.groups[self.ready[0]][0]
            size += entry.size
            if taken and (size > SQS_BYTES or entry.is_alone or taken[0].is_alone):
                break
            self.groups[self.ready.popleft()].popleft()
            taken.append(entry)
        return taken

    def put_back(self, entries: Iterable[Entry]) -> None:
        """Let entries of an ended request wait again, before all others."""
        for entry in entries:
            self.groups[entry.group].appendleft(entry)
            self.ready.appendleft(entry.group)

    def go_on(self, entry: Entry) -> None:
        """The next of the group may follow."""
        if self.groups[entry.group]:
            self.ready.append(entry.group)
        else:
            del self.groups[entry.group]

    def hold(self, entry: Entry) -> Iterable[Entry]:
        """No more of the group may follow: give back what waited."""
        self.held.add(entry.group)
        return self.groups.pop(entry.group, ())

    def stop(self) -> Iterable[Entry]:
        """Nothing more is sent: give back what waited."""
        self.is_stopped = True
        self.ready.clear()
        waiting = [entry for group in self.groups.values() for entry in group]
        self.groups.clear()
        return waiting


@dataclass(slots=True, eq=False)
class _Request:
    """Messages on their way together."""

    line: Line
    client: Any
    entries: list[Entry]
    declarations: int

    def send(self, answers: SimpleQueue[tuple[_Request, Any]]) -> None:
        """Run in a thread: ``answers`` gets the response, or what was raised."""
        answer: Any
        wires = [{"Id": str(index), **entry.wire} for index, entry in enumerate(self.entries)]
        try:
            answer = self.client.send_message_batch(QueueUrl=self.line.url, Entries=wires)
        except BaseException as error:  # noqa: BLE001 - it is for the publishing thread to judge
            answer = error
        answers.put((self, answer))


class Sending:
    """The messages of one batch.

    Args:
        channel: Kombu's.
        pool: where requests are made.
        threads: how many of them at once.
        deadline: ``time.monotonic()`` value after which none is begun.

    Attributes:
        deferred: rows that are offered too early.
        errors: by row.
        refusals: by destination, why nothing can be sent there; None when it is nobody's fault.
        trouble: why the clients are of no use any more.
    """

    def __init__(self, channel: Any, pool: ThreadPoolExecutor, threads: int, deadline: float) -> None:
        self.deferred: set[int] = set()
        self.errors: dict[int, str] = {}
        self.refusals: dict[str, str | None] = {}
        self.trouble: str | None = None
        self._channel = channel
        self._pool = pool
        self._threads = threads
        self._deadline = deadline
        self._lines: dict[str, Line] = {}
        self._by_queue: dict[str, Line] = {}
        self._answers: SimpleQueue[tuple[_Request, Any]] = SimpleQueue()
        self._under_way = 0
        self._unsent: set[int] = set()
        self._wanted: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._useful: set[Any] = set()
        self._useless: set[Any] = set()
        self._unreached: list[tuple[Any, int, str]] = []

    @property
    def is_over(self) -> bool:
        """Whether nothing more may be begun."""
        is_lost = self.trouble is not None and not self._channel.predefined_queues
        return is_lost or time.monotonic() >= self._deadline

    def line(self, queue: str) -> Line:
        """The line of a queue, which is made where Kombu would make it."""
        line = self._by_queue.get(queue)
        if line is None:
            url = self._channel._new_queue(queue)
            canonical = self._channel.canonical_queue_name(queue)
            # Two names may mean one queue.
            line = self._lines.setdefault(url, Line(queue, canonical, url, queue.endswith(".fifo")))
            self._by_queue[queue] = line
        return line

    def is_refused(self, destination: str, row: int) -> bool:
        """Whether nothing can be sent to a destination; the row's answer is then given."""
        if destination not in self.refusals:
            return False
        reason = self.refusals[destination]
        if reason is None:
            self._unsent.add(row)
        else:
            self.errors[row] = reason
        return True

    def leave(self, row: int) -> None:
        """Do not send it."""
        self._unsent.add(row)

    def not_reached(self, client: Any, rows: Iterable[int], reason: str) -> None:
        """Of no fault of theirs, messages have certainly not been sent; ``client`` is of no use."""
        self.trouble = reason
        if client is not None:
            self._useless.add(client)
        self._unreached += [(client, row, reason) for row in rows]

    def add(self, row: int, entries: list[Entry]) -> None:
        """Put a message on its way; there are no entries when it has gone already."""
        self._wanted[row] = len(entries)
        for entry in entries:
            if entry.size > SQS_BYTES:
                # What waits of its group came before it.
                entry.line.held.add(entry.group)
                self.errors[row] = (
                    f"expected a size of at most {SQS_BYTES:,} bytes, the limit of SQS, found "
                    f"{entry.size:,} as it is sent. Put the data elsewhere and pass where it is."
                )
            elif not entry.line.add(entry):
                self._unsent.add(row)
            elif entry.line.is_full:
                self._harvest()
                self._begin_all(is_last=False)

    def finish(self) -> None:
        """Send what waits, and wait for all answers."""
        self._begin_all(is_last=True)
        while self._under_way:
            self._end(*self._answers.get())
            self._begin_all(is_last=True)

    def outcome(self) -> Outcome:
        """What became of each message."""
        unsent, errors = set(self._unsent), dict(self.errors)
        for client, row, reason in self._unreached:
            # Where other clients get through, it is this queue that cannot be used.
            if self._useful - {client}:
                errors.setdefault(row, reason)
            else:
                unsent.add(row)
        unsent -= errors.keys()
        for row in unsent & self._taken.keys():
            errors[row] = "not sent to one of its queues, while another has it"
        return Outcome(
            accepted={
                row
                for row, count in self._wanted.items()
                if count == self._taken.get(row, 0) and row not in errors
            },
            deferred=self.deferred,
            errors=errors,
            unsent=unsent - errors.keys(),
            is_connection_lost=self.trouble is not None,
        )

    def _begin_all(self, *, is_last: bool) -> None:
        """Begin as many requests as may be."""
        for line in self._lines.values():
            while self._under_way < self._threads and (line.is_full or (is_last and line.ready)):
                if time.monotonic() >= self._deadline:
                    self._stop(line)
                else:
                    self._begin(line)

    def _begin(self, line: Line) -> None:
        try:
            # Asked each time: Kombu renews a role's credentials here.
            client = self._channel.sqs(queue=line.canonical)
        except Exception as error:  # noqa: BLE001 - transports raise what they like
            entries = line.take()
            self._judge(_Request(line, None, entries, line.declarations), error, is_begun=False)
            self._stop(line)
            return
        if client in self._useless:
            self._stop(line)
            return
        request = _Request(line, client, line.take(), line.declarations)
        self._under_way += 1
        self._pool.submit(request.send, self._answers)

    def _harvest(self) -> None:
        while not self._answers.empty():
            self._end(*self._answers.get())

    def _end(self, request: _Request, answer: Any) -> None:
        """Take an answer."""
        self._under_way -= 1
        if isinstance(answer, Exception):
            self._judge(request, answer)
            return
        if isinstance(answer, BaseException):
            raise answer
        failed = {each.get("Id"): each for each in answer.get("Failed", ())}
        taken = {each.get("Id") for each in answer.get("Successful", ())}
        for index, entry in enumerate(request.entries):
            if (fault := failed.get(str(index))) is not None:
                self._fail(entry, f"{fault.get('Code')}: {fault.get('Message')}")
            elif str(index) not in taken:
                self._fail(entry, f"SQS said nothing of it{NOT_KNOWN}")
            else:
                self._taken[entry.row] = self._taken.get(entry.row, 0) + 1
                self._useful.add(request.client)
                if not request.line.is_stopped:
                    request.line.go_on(entry)

    def _judge(self, request: _Request, error: Exception, *, is_begun: bool = True) -> None:
        """After a request failed as a whole."""
        line, entries, text = request.line, request.entries, said(error)
        verdict = verdict_of(error, is_begun=is_begun)
        if verdict is Verdict.UNUSABLE:
            self.not_reached(request.client, [entry.row for entry in entries], text)
            self._stop(line)
            return
        if is_begun and not line.is_stopped:
            if verdict is Verdict.SUSPECT and len(entries) > 1:
                for entry in entries:
                    entry.is_alone = True
                line.put_back(entries)
                return
            if verdict is Verdict.MISSING and self._can_declare_again(request):
                self._declare_again(request)
                return
        if verdict in {Verdict.UNKNOWN, Verdict.BROKEN} and is_begun:
            text += NOT_KNOWN
        for entry in entries:
            self._fail(entry, text)
        if verdict is Verdict.UNKNOWN:
            self.trouble = text
            self._useless.add(request.client)
            self._stop(line)

    def _can_declare_again(self, request: _Request) -> bool:
        """Once, and where it has been done meanwhile."""
        return request.declarations < request.line.declarations or not request.line.declarations

    def _declare_again(self, request: _Request) -> None:
        """The queue was deleted: make it, as Kombu would have done if it had known."""
        line = request.line
        if request.declarations == line.declarations:
            line.declarations += 1
            self._channel._queue_cache.pop(line.canonical, None)
            try:
                line.url = self._channel._new_queue(line.queue)
            except Exception as error:  # noqa: BLE001 - transports raise what they like
                self._judge(request, error, is_begun=False)
                return
        line.put_back(request.entries)

    def _fail(self, entry: Entry, text: str) -> None:
        """A message was not taken, or perhaps not: none of its group may overtake it."""
        self.errors.setdefault(entry.row, text)
        self._unsent.update(each.row for each in entry.line.hold(entry))

    def _stop(self, line: Line) -> None:
        self._unsent.update(entry.row for entry in line.stop())
