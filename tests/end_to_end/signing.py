"""A project whose messages are signed; only with a database does its app have an Outbox."""

import os
from pathlib import Path

import sqlalchemy as sa
from celery import Celery
from sqlalchemy.orm import Session

from celery_outbox import Outbox
from tests.end_to_end import tasks

app = Celery("shop", broker=os.environ["SHOP_BROKER"], backend=os.environ["SHOP_RESULTS"])
keys = Path(os.environ["SHOP_KEYS"])
app.conf.update(
    task_serializer="auth",
    accept_content=["auth"],
    result_serializer="json",
    result_accept_content=["json"],
    security_key=str(keys / "key.pem"),
    security_certificate=str(keys / "certificate.pem"),
    security_cert_store=str(keys / "cert*.pem"),
)
app.setup_security()
add = app.task(tasks.add, name="shop.add")


def store(database: str) -> str:
    """Store a task in a transaction; its id."""
    engine = sa.create_engine(database)
    Outbox(app, databases={"default": engine})
    with Session(engine) as session, session.begin():
        session.execute(sa.text("SELECT 1"))
        task_id = add.apply_async((2, 3), via_outbox=True).id
    engine.dispose()
    return str(task_id)
