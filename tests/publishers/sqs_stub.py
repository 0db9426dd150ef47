"""A small server that speaks SQS and goes wrong when it is told to.

It knows what the publisher's tests need: queues, batches, FIFO groups and deduplication. It records
every request, and counts how many of one group, and altogether, are under way at once. Run as a module,
`python -m tests.publishers.sqs_stub SECONDS`, it prints its URL and serves until its input ends.
"""

import contextlib
import json
import random
import re
import socket
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from tests.processes import HOST

Json = dict[str, Any]
_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")
#: Beside what was asked stands the access key that asked it.
KEY = "the access key"
Cut = Literal["before reading", "before doing", "before replying", "within the reply"]


@dataclass(slots=True, kw_only=True)
class Fault:
    """What goes wrong with requests; the first that fits one is taken.

    Attributes:
        operation: of which requests.
        times: with how many of them.
        only: with which, by what they ask.
        code: refuse with this code and status, for this reason.
        cut: close the connection at this moment.
        until: do not answer before.
        after: called when it has been done.
        refuse: entries that are refused.
        omit: entries of which nothing is said, and nothing is done.
        reorders: whether the entries are told in another order than they were asked in.
    """

    operation: str = "SendMessageBatch"
    times: int = 1_000_000
    only: Callable[[Json], bool] = field(default=lambda asked: True)
    code: str | None = None
    status: int = 400
    reason: str = "because of a test"
    cut: Cut | None = None
    until: threading.Event | None = None
    after: Callable[[], None] = field(default=lambda: None)
    refuse: Callable[[Json], bool] = field(default=lambda entry: False)
    omit: Callable[[Json], bool] = field(default=lambda entry: False)
    reorders: bool = False


class RefusalError(Exception):
    """An error of SQS."""

    def __init__(self, code: str, reason: str, status: int = 400) -> None:
        super().__init__(code)
        self.code, self.reason, self.status = code, reason, status


class SQSStub:
    """Queues by name, each a list of the entries that it has taken."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.queues: dict[str, list[Json]] = {}
        self.requests: list[tuple[str, Json]] = []
        self.faults: list[Fault] = []
        self.most_at_once = 0
        self.most_of_one_group = 0
        self._groups: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._under_way = 0
        self._lock = threading.Lock()
        self._server = _Server(self)
        self.port = self._server.server_address[1]
        self.url = f"sqs://key:secret@{HOST}:{self.port}//"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving, and close every connection."""
        self._server.shutdown()
        self._thread.join()
        self._server.hang_up()
        self._server.server_close()

    @property
    def connections(self) -> int:
        """How many are open."""
        return self._server.connections

    def queue_url(self, queue: str) -> str:
        """Where a queue is."""
        return f"http://{HOST}:{self.port}/123456789012/{queue}"

    def asked(self, operation: str = "SendMessageBatch") -> list[Json]:
        """What was asked of an operation, in order."""
        return [asked for name, asked in self.requests if name == operation]

    def batches(self) -> list[list[Json]]:
        """The entries of each batch that was asked for."""
        return [asked["Entries"] for asked in self.asked()]

    def bodies(self, queue: str = "celery") -> list[str]:
        """What a queue has taken."""
        return [entry["MessageBody"] for entry in self.queues.get(queue, ())]

    def hangs_up_on(self, operation: str) -> bool:
        """Whether to close the connection before the request has been read."""
        with self._lock:
            for fault in self.faults:
                if (fault.operation, fault.cut) == (operation, "before reading") and fault.times > 0:
                    fault.times -= 1
                    return True
        return False

    def answer(self, operation: str, asked: Json) -> tuple[Json, Cut | None]:
        """Do what a request asks, and what is to go wrong with it. Raises RefusalError."""
        with self._lock:
            self.requests.append((operation, asked))
            fault = self._fault(operation, asked)
        if fault.cut == "before doing":
            return {}, fault.cut
        if fault.code is not None:
            raise RefusalError(fault.code, fault.reason, fault.status)
        with self._counted(operation, asked):
            if self.seconds:
                time.sleep(self.seconds)
            if fault.until is not None:
                fault.until.wait(60)
            with self._lock:
                doing = getattr(self, f"_{_CAPITAL.sub('_', operation).lower()}")
                answer: Json = doing(asked, fault)
            fault.after()
            return answer, fault.cut

    def _fault(self, operation: str, asked: Json) -> Fault:
        for fault in self.faults:
            if fault.operation == operation and fault.times > 0 and fault.only(asked):
                fault.times -= 1
                return fault
        return Fault()

    @contextlib.contextmanager
    def _counted(self, operation: str, asked: Json) -> Iterator[None]:
        groups = [
            (asked["QueueUrl"], entry.get("MessageGroupId"))
            for entry in (asked["Entries"] if operation == "SendMessageBatch" else [])
            if asked["QueueUrl"].endswith(".fifo")
        ]
        with self._lock:
            self._under_way += 1
            self.most_at_once = max(self.most_at_once, self._under_way)
            for group in groups:
                self._groups[group] += 1
                self.most_of_one_group = max(self.most_of_one_group, self._groups[group])
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                for group in groups:
                    self._groups[group] -= 1

    def _queue(self, asked: Json) -> list[Json]:
        name = asked["QueueUrl"].rpartition("/")[2]
        if name not in self.queues:
            raise RefusalError("AWS.SimpleQueueService.NonExistentQueue", "The queue does not exist.")
        return self.queues[name]

    def _list_queues(self, asked: Json, fault: Fault) -> Json:
        prefix = asked.get("QueueNamePrefix", "")
        return {"QueueUrls": [self.queue_url(name) for name in self.queues if name.startswith(prefix)]}

    def _create_queue(self, asked: Json, fault: Fault) -> Json:
        self.queues.setdefault(asked["QueueName"], [])
        return {"QueueUrl": self.queue_url(asked["QueueName"])}

    def _get_queue_url(self, asked: Json, fault: Fault) -> Json:
        self._queue({"QueueUrl": asked["QueueName"]})
        return {"QueueUrl": self.queue_url(asked["QueueName"])}

    def _get_queue_attributes(self, asked: Json, fault: Fault) -> Json:
        return {"Attributes": {"ApproximateNumberOfMessages": str(len(self._queue(asked)))}}

    def _send_message(self, asked: Json, fault: Fault) -> Json:
        self._take(self._queue(asked), asked)
        return {"MessageId": str(uuid.uuid4())}

    def _send_message_batch(self, asked: Json, fault: Fault) -> Json:
        queue = self._queue(asked)
        if len(asked["Entries"]) > 10:
            raise RefusalError("TooManyEntriesInBatchRequest", "More than ten.")
        answer: Json = {"Successful": [], "Failed": []}
        for entry in asked["Entries"]:
            if fault.omit(entry):
                continue
            if fault.refuse(entry):
                answer["Failed"].append(
                    {"Id": entry["Id"], "Code": "Odd", "Message": fault.reason, "SenderFault": True}
                )
                continue
            self._take(queue, entry)
            answer["Successful"].append({"Id": entry["Id"], "MessageId": str(uuid.uuid4())})
        if fault.reorders:
            for told in answer.values():
                random.shuffle(told)
        return answer

    def _take(self, queue: list[Json], entry: Json) -> None:
        name = entry.get("MessageDeduplicationId")
        if name is None or all(each.get("MessageDeduplicationId") != name for each in queue):
            queue.append(entry)


def _key_in(authorization: str) -> str:
    return authorization.partition("Credential=")[2].partition("/")[0]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, stub: SQSStub) -> None:
        self.stub = stub
        self._sockets: set[socket.socket] = set()
        super().__init__((HOST, 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._sockets.discard(request)
        super().shutdown_request(request)

    @property
    def connections(self) -> int:
        """How many clients keep one open."""
        return len(self._sockets)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Be silent of clients that did not wait for their answer."""

    def hang_up(self) -> None:
        """Close the connections that clients keep open."""
        for each in list(self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        operation = self.headers["X-Amz-Target"].rpartition(".")[2]
        if self.server.stub.hangs_up_on(operation):
            self._hang_up()
            return
        data = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            asked = json.loads(data) | {KEY: _key_in(self.headers["Authorization"])}
            answer, cut = self.server.stub.answer(operation, asked)
        except RefusalError as refusal:
            answer = {"__type__": refusal.code, "message": refusal.reason}
            self._reply(refusal.status, answer, {"x-amzn-query-error": f"{refusal.code};Sender"})
            return
        if cut is None:
            self._reply(200, answer, {})
            return
        if cut == "within the reply":
            text = json.dumps(answer)
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n"
            self.wfile.write((head + text[: len(text) // 2]).encode())
        self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _reply(self, status: int, answer: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        data = json.dumps(answer).encode()
        lines = [f"HTTP/1.1 {status} -", "Content-Type: application/x-amz-json-1.0"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines.append(f"Content-Length: {len(data)}")
        self.wfile.write("\r\n".join([*lines, "", ""]).encode() + data)

    def log_message(self, *args: Any) -> None:
        """Be silent."""


if __name__ == "__main__":
    stub = SQSStub(float(sys.argv[1]))
    print(stub.url, flush=True)
    sys.stdin.read()
    stub.close()
