"""The project of these tests with receivers that raise, and that note what they were told.

They note it in the file that ``SHOP_TOLD`` names, one JSON line for each call.
"""

import json
import os
from pathlib import Path
from typing import Any

from celery_outbox.signals import outbox_failed, outbox_published
from tests.relay.shop import app as app

TOLD = Path(os.environ["SHOP_TOLD"])


def _note(*what: Any) -> None:
    with TOLD.open("a") as file:
        file.write(json.dumps(what) + "\n")


@outbox_published.connect
def published(sender: str, database: str, messages: Any, **_: Any) -> None:
    """Note the ids of the tasks, and raise."""
    _note("published", sender, database, sorted(each.task_id for each in messages))
    raise RuntimeError("this receiver is out of order")


@outbox_failed.connect
def failed(sender: str, database: str, errors: dict[int, str], **_: Any) -> None:
    """Note the ids of the rows, and raise."""
    _note("failed", sender, database, sorted(errors))
    raise RuntimeError("this one, too")
