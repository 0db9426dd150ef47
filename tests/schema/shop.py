"""A project with several databases: ``SHOP_DATABASES``, as JSON, names their URLs."""

import json
import os

from celery import Celery

from celery_outbox import Outbox

app = Celery("shop", broker=os.environ["SHOP_BROKER"])
outbox = Outbox(app, databases=json.loads(os.environ["SHOP_DATABASES"]))
