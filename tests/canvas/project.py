"""A project as users have one, for the workers of these tests: all it is told is in the environment.

Its worker is a stock one: only ``CANVAS_DATABASE`` gives the app an Outbox.
"""

import os
from typing import Any

import sqlalchemy as sa
from celery import Celery, Task, group
from sqlalchemy.orm import Session

from celery_outbox import Outbox
from tests.canvas.stall import add_tasks


def make_app(broker: str, backend: str) -> Celery:
    """Make an app with the tasks of a stall and those that only a worker runs."""
    app = Celery("project", broker=broker, set_as_current=False)
    app.conf.update(
        result_backend=backend,
        # A chord on a polling backend is looked after this often.
        result_chord_retry_interval=0.1,
    )
    add_tasks(app)
    app.task(again, name="project.again", bind=True, shared=False, default_retry_delay=0)
    app.task(instead, name="project.instead", bind=True, shared=False)
    app.task(family, name="project.family", bind=True, shared=False)
    app.task(about, name="project.about", bind=True, shared=False)
    app.task(record, name="project.record", bind=True, shared=False)
    app.task(grow, name="project.grow", bind=True, shared=False)
    return app


def engine_of(app: Celery) -> sa.Engine:
    """The engine of the app's outbox, for tasks that open transactions."""
    engine: sa.Engine = app.conf.canvas_engine
    return engine


def again(task: Task, via_outbox: bool | None) -> dict[str, Any]:
    """Fail inside a transaction at first, and retry."""
    if task.request.retries == 0:
        with Session(engine_of(task.app)) as session, session.begin():
            session.execute(sa.text("INSERT INTO runs VALUES ('rolled back')"))
            raise task.retry(**({} if via_outbox is None else {"via_outbox": via_outbox}))
    return about(task)


def instead(task: Task, via_outbox: bool | None) -> None:
    """Be replaced by a group, inside a transaction."""
    new = group(task.app.tasks["stall.add"].s(number, number) for number in range(3))
    if via_outbox is not None:
        new.set(via_outbox=via_outbox)
    with Session(engine_of(task.app)) as session, session.begin():
        session.execute(sa.text("INSERT INTO runs VALUES ('rolled back')"))
        raise task.replace(new)


def family(task: Task) -> list[str]:
    """Store a child in a transaction of the worker's, and return its id and one's own."""
    with Session(engine_of(task.app)) as session, session.begin():
        child = task.app.tasks["project.about"].apply_async(via_outbox=True)
    return [task.request.id, child.id]


def record(task: Task, value: Any, what: str) -> Any:
    """Leave a row behind, and return the value."""
    with engine_of(task.app).begin() as connection:
        connection.execute(sa.text("INSERT INTO runs VALUES (:what)"), {"what": what})
    return value


def grow(task: Task, end: str) -> int:
    """Add a task to the chord that this one is a member of, in a transaction of the worker's."""
    with Session(engine_of(task.app)) as session:
        session.begin()
        task.add_to_chord(task.app.tasks["stall.add"].s(5, 5))
        session.commit() if end == "commit" else session.rollback()
    return 1


def about(task: Task) -> dict[str, Any]:
    """What the request of a task says."""
    request = task.request
    return {
        "id": request.id,
        "parent_id": request.parent_id,
        "root_id": request.root_id,
        "retries": request.retries,
        "stamps": request.stamps,
        "headers": {key: value for key, value in (request.headers or {}).items() if key == "tenant"},
    }


if "CANVAS_BROKER" in os.environ:
    app = make_app(os.environ["CANVAS_BROKER"], os.environ["CANVAS_BACKEND"])
    if database := os.environ.get("CANVAS_DATABASE"):
        app.conf.canvas_engine = sa.create_engine(database)
        outbox = Outbox(app, databases={"default": app.conf.canvas_engine})
