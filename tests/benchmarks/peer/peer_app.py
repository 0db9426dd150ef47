"""The peer's Celery app; run with a number, it stores so many tasks."""

import json
import os
import sys

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "peer_settings")
django.setup()

from django.db import transaction  # noqa: E402 - after the setup
from django_celery_outbox.app import OutboxCelery  # noqa: E402

app = OutboxCelery("peer", broker=os.environ["PEER_BROKER"])


def store(count: int) -> None:
    """Store tasks, a thousand in a transaction."""
    args, kwargs = json.loads(os.environ["PEER_ARGUMENTS"])
    while count > 0:
        with transaction.atomic():
            for _ in range(min(count, 1000)):
                app.send_task("shop.send_receipt", args, kwargs)
        count -= 1000


if __name__ == "__main__":
    store(int(sys.argv[1]))
