"""A worker's app without the outbox: nothing here imports the package."""

import os
import sys

from celery import Celery

from tests.end_to_end import tasks

app = Celery("shop", broker=os.environ["SHOP_BROKER"], backend=os.environ["SHOP_RESULTS"])
app.conf.task_ignore_result = False
for task in (tasks.note, tasks.add, tasks.total):
    app.task(task, name=f"shop.{task.__name__}")


@app.task(name="shop.loaded_modules")
def loaded_modules() -> list[str]:
    """Name what the worker has imported."""
    return sorted(sys.modules)
