"""A market stall: an app with an outbox, its tasks, and what lies in the table and on the broker.

What is stored is read by a connection that nobody else uses; what was sent directly is taken off a
broker in memory.
"""

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from celery import Celery, Signature, Task, _state
from sqlalchemy import event
from sqlalchemy.orm import Session

from celery_outbox import Outbox

#: Our options: none of them may be seen in a message.
OPTIONS = ("via_outbox", "outbox_database", "outbox_broker", "outbox_retry")

OpenStall = Callable[..., "Stall"]


class SoldOutError(Exception):
    """Raised to leave a transaction without committing it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message, stored or sent: what a worker will read of it."""

    id: str
    name: str
    broker: str | None
    headers: Mapping[str, Any]
    properties: Mapping[str, Any]
    body: Any

    @property
    def args(self) -> list[Any]:
        args: list[Any] = self.body[0]
        return args

    @property
    def embedded(self) -> Mapping[str, Any]:
        """The callbacks, errbacks, chain and chord of protocol 2."""
        embedded: Mapping[str, Any] = self.body[2]
        return embedded

    @property
    def text(self) -> str:
        """All of it, to look for words in."""
        return json.dumps([self.headers, self.properties, self.body], default=str)


def add(x: Any, y: Any) -> Any:
    return x + y


def total(numbers: list[Any]) -> Any:
    return sum(numbers)


def echo(value: Any) -> Any:
    return value


def add_tasks(app: Celery) -> None:
    """Give ``app`` the tasks of a stall; ``charge`` always uses the outbox."""
    for task in (add, total, echo):
        app.task(task, name=f"stall.{task.__name__}", shared=False)
    app.task(add, name="stall.charge", via_outbox=True, shared=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """An app with an installed outbox; `engine` is that of the first database."""

    app: Celery
    outbox: Outbox
    engines: Mapping[str, sa.Engine]

    @property
    def engine(self) -> sa.Engine:
        return next(iter(self.engines.values()))

    @property
    def add(self) -> Task:
        return self.app.tasks["stall.add"]

    @property
    def total(self) -> Task:
        return self.app.tasks["stall.total"]

    @property
    def echo(self) -> Task:
        return self.app.tasks["stall.echo"]

    @property
    def charge(self) -> Task:
        """A task that is stored by its own default."""
        return self.app.tasks["stall.charge"]

    def adds(self, count: int) -> list[Signature]:
        """Make signatures that tell each other apart by their first argument."""
        return [self.add.s(number, 1) for number in range(count)]

    @contextmanager
    def transaction(self, name: str | None = None) -> Iterator[Session]:
        """A Session's transaction on the first database, or a named one."""
        engine = self.engine if name is None else self.engines[name]
        with Session(engine) as session, session.begin():
            yield session

    def stored(self, database: str | None = None) -> list[Message]:
        """What the table holds, in the order in which it was stored."""
        engine = self.engine if database is None else self.engines[database]
        return stored(engine)

    @property
    def names(self) -> list[str]:
        """The names of the stored tasks, without the stall's own prefix."""
        return [each.name.removeprefix("stall.") for each in self.stored()]

    @property
    def sent(self) -> list[Message]:
        """Take off what was sent directly to the broker in memory."""
        return take_sent(self.app)

    @property
    def sent_names(self) -> list[str]:
        return [each.name.removeprefix("stall.") for each in self.sent]


def stored(engine: sa.Engine, table: str = "celery_outbox") -> list[Message]:
    """Read every row of the table, whose bodies are JSON."""
    witness = sa.create_engine(engine.url, poolclass=sa.NullPool)
    query = sa.text(f"SELECT task_id, task_name, broker, message, body FROM {table} ORDER BY id")
    with witness.connect() as connection:
        rows = connection.execute(query).all()
    return [_stored(row) for row in rows]


def _stored(row: Sequence[Any]) -> Message:
    envelope, body = json.loads(row[3]), json.loads(row[4])
    return Message(
        id=row[0],
        name=row[1],
        broker=row[2],
        headers=envelope["headers"],
        properties=envelope["properties"],
        body=body,
    )


def take_sent(app: Celery) -> list[Message]:
    """Take every message off the default queue of a broker in memory."""
    sent = []
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        queue = app.amqp.queues[app.conf.task_default_queue](channel)
        queue.declare()
        while (message := queue.get(no_ack=True)) is not None:
            body = json.loads(message.body)
            sent.append(
                Message(
                    id=message.headers.get("id") or body["id"],
                    name=message.headers.get("task") or body["task"],
                    broker=None,
                    headers=message.headers,
                    properties=message.properties,
                    body=body,
                )
            )
    return sent


def memory_config() -> dict[str, Any]:
    """Celery's settings for a broker in memory with a queue that no other test has."""
    return {"broker_url": "memory://", "task_default_queue": f"stall-{uuid.uuid4().hex}"}


@contextmanager
def counted_inserts(engine: sa.Engine) -> Iterator[list[str]]:
    """Collect the INSERT statements that run on ``engine``."""
    statements: list[str] = []

    def listen(_: Any, __: Any, statement: str, *rest: Any) -> None:
        if statement.startswith("INSERT"):
            statements.append(statement)

    event.listen(engine, "before_cursor_execute", listen)
    try:
        yield statements
    finally:
        event.remove(engine, "before_cursor_execute", listen)


@contextmanager
def running(task: Task, **request: Any) -> Iterator[Task]:
    """Be inside ``task``, as a worker would be, with a request that says ``request``."""
    given = {"is_eager": False, "called_directly": False, "delivery_info": {}, "children": []}
    task.push_request(**given | {"id": uuid.uuid4().hex, "args": (), "kwargs": {}} | request)
    _state._task_stack.push(task)
    try:
        yield task
    finally:
        _state._task_stack.pop()
        task.pop_request()
