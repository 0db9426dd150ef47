"""A project whose tasks dispatch tasks through the outbox, inside a worker."""

import os
from typing import Any

import sqlalchemy as sa
from celery import Celery
from sqlalchemy.orm import Session

from celery_outbox import Outbox
from tests.end_to_end import tasks

app = Celery("shop", broker=os.environ["SHOP_BROKER"], backend=os.environ["SHOP_RESULTS"])
engine = sa.create_engine(os.environ["SHOP_DATABASE"])
outbox = Outbox(app, databases={"default": engine})
note, add, total = (
    app.task(task, name=f"shop.{task.__name__}") for task in (tasks.note, tasks.add, tasks.total)
)


class RefusedError(Exception):
    """What rolls a transaction back."""


@app.task(name="shop.passes_on")
def passes_on(what: str) -> str:
    """Dispatch without a transaction."""
    return str(note.apply_async((what,), via_outbox=True).id)


@app.task(name="shop.passes_on_in_a_transaction")
def passes_on_in_a_transaction(what: str, end: str) -> str:
    """Dispatch in a transaction that ends in a commit or a rollback."""
    try:
        with Session(engine) as session, session.begin():
            session.execute(sa.text("SELECT 1"))
            result = note.apply_async((what,), via_outbox=True)
            if end == "rollback":
                raise RefusedError
    except RefusedError:
        return "refused"
    return str(result.id)


@app.task(name="shop.retries", bind=True, via_outbox=True, max_retries=3)
def retries(self: Any, what: str) -> int:
    """Fail twice, by ``retry``, which the task's own choice of the outbox does not concern."""
    tasks.note(f"{what} {self.request.retries}")
    if self.request.retries < 2:
        raise self.retry(countdown=0)
    return int(self.request.retries)
