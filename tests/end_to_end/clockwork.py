"""A project whose entries ``celery beat`` sends through the outbox."""

import os

import sqlalchemy as sa
from celery import Celery

from celery_outbox import Outbox
from tests.end_to_end import tasks

app = Celery("shop", broker=os.environ["SHOP_BROKER"])
outbox = Outbox(app, databases={"default": sa.create_engine(os.environ["SHOP_DATABASE"])})
app.task(tasks.add, name="shop.add")
app.task(tasks.note, name="shop.note", via_outbox=True)
app.conf.beat_schedule = {
    "by an option": {
        "task": "shop.add",
        "schedule": 0.1,
        "args": (1, 2),
        "options": {"via_outbox": True},
    },
    "by the task": {"task": "shop.note", "schedule": 0.1, "args": ("nightly",)},
    "of a name": {"task": "other.run", "schedule": 0.1, "options": {"outbox_database": "default"}},
    "directly": {"task": "shop.add", "schedule": 0.1, "args": (3, 4)},
}
