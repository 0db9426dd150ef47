"""A Celery project as users have one, for the tests that run real commands on it.

Everything comes from the environment: ``SHOP_BROKER``, ``SHOP_DATABASE``, and as JSON what else the
Outbox and Celery are to be told, ``SHOP_SETTINGS`` and ``SHOP_CONFIG``. In the packages that
``SHOP_PACKAGES`` names, workers look for more tasks.
"""

import json
import os

from celery import Celery

from celery_outbox import Outbox

app = Celery("shop", broker=os.environ["SHOP_BROKER"])
app.conf.update(json.loads(os.environ.get("SHOP_CONFIG", "{}")))
app.autodiscover_tasks(os.environ.get("SHOP_PACKAGES", "").split())
outbox = Outbox(
    app,
    databases={"default": os.environ["SHOP_DATABASE"]},
    **json.loads(os.environ.get("SHOP_SETTINGS", "{}")),
)


@app.task(name="shop.add")
def add(x: int, y: int) -> int:
    return x + y
