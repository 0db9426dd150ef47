"""The signals that celery_outbox sends (Celery's own ``Signal`` class).

A receiver that raises is logged by Celery and changes nothing. None of them is stored, and none is sent
twice on purpose: count on the rows and on the broker, use these to measure and to report.
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

__all__ = ["outbox_busy", "outbox_failed", "outbox_published", "outbox_stored"]

#: Messages were written to a database, inside a transaction that has not committed yet:
#: a rollback may still follow. Sender: the database's name; ``task_ids``: list of str.
outbox_stored = Signal(name="outbox_stored", providing_args={"task_ids"})

#: A broker accepted messages and their rows were settled. Sender: the broker's name;
#: ``database``: str, ``messages``: list of ClaimedMessage. In the relay's process and threads.
#: Not sent, though the messages did leave, when the relay dies or leaves the batch behind, or the
#: database is lost, between the broker's answer and the settling: they leave again after their lease,
#: and are told then. Nor for what the commit itself delivers, with a broker in the same database. Sent
#: also when the lease had ended meanwhile: another relay may tell of the same messages.
outbox_published = Signal(name="outbox_published", providing_args={"database", "messages"})

#: Deliveries failed; the rows stay. Sender: the broker's name; ``database``: str,
#: ``errors``: dict of row id to error text. In the relay's process and threads, after the settling.
#: Not sent when the relay dies or leaves the batch behind, or the database is lost, before that. Nor
#: when the broker cannot be reached at all: nothing is taken then, and the log tells of the outage.
outbox_failed = Signal(name="outbox_failed", providing_args={"database", "errors"})

#: A threshold given to ``celery-outbox monitor`` was reached. Sender: the database's name;
#: ``pending``: int, undelivered messages, all of them or at least ``--max``; ``age``: float seconds for
#: which the oldest message has been due, None when none is. Sent in the process of the command.
outbox_busy = Signal(name="outbox_busy", providing_args={"pending", "age"})
