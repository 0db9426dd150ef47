"""A transport of one's own: Kombu's `filesystem://`, in whole batches that survive a power failure.

Kombu writes a file and moves on. This publisher writes the files of a batch where no worker looks, has
the disk confirm all of them, and then puts them in place at once. Workers are stock Celery workers.

    Outbox(app, databases=..., transports={"filesystem": "custom_transport:Spool"})
"""

import base64
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from kombu import Connection

from celery_outbox import ClaimedMessage, Dispatch, Envelope, Outcome, Publisher, Transport


class Spool(Transport):
    """What a dispatch is told of it, while the task object is at hand."""

    def prepare(self, dispatch: Dispatch) -> Dispatch:
        """Send tasks that say `region = "..."` to the queue of their region."""
        region = getattr(dispatch.task, "region", None)
        if region is None:
            return dispatch
        envelope = replace(dispatch.envelope, exchange="", routing_key=region, declare=())
        return replace(dispatch, queue=region, envelope=envelope)

    def publisher(self, connection: Connection) -> Publisher:
        """The relay asks for one by each connection that it makes."""
        return SpoolPublisher(Path(connection.transport_options["data_folder_out"]))


class SpoolPublisher(Publisher):
    """Writes batches of files into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written = folder / f".outbox-{uuid4()}"

    @property
    def is_connected(self) -> bool:
        return self._written.is_dir()

    def connect(self) -> None:
        self._written.mkdir(parents=True)

    def publish(
        self, messages: Sequence[ClaimedMessage], *, deadline: float, read_at: float
    ) -> Outcome:
        errors: dict[int, str] = {}
        files: dict[int, Path] = {}
        unsent: set[int] = set()
        for message in messages:
            if time.monotonic() >= deadline:
                unsent.add(message.id)
                continue
            try:
                files[message.id] = self._write(message)
            except (OSError, ValueError) as error:  # of this message alone
                errors[message.id] = f"{type(error).__name__}: {error}"
        for file in files.values():
            file.rename(self._folder / file.name)
        _confirm(self._folder)
        return Outcome(accepted=set(files), errors=errors, unsent=unsent)

    def close(self) -> None:
        if self.is_connected:
            for left in self._written.iterdir():
                left.unlink()
            self._written.rmdir()

    def _write(self, message: ClaimedMessage) -> Path:
        """What Kombu would write, confirmed by the disk."""
        envelope = Envelope.from_text(message.envelope)
        exchange = getattr(envelope.exchange, "name", envelope.exchange)
        properties = {
            **envelope.properties,
            "body_encoding": "base64",
            "delivery_info": {"exchange": exchange, "routing_key": envelope.routing_key},
            "delivery_tag": str(uuid4()),
            "priority": 0,
        }
        document = {
            "body": base64.b64encode(message.body).decode(),
            "content-encoding": envelope.content_encoding,
            "content-type": envelope.content_type,
            "headers": envelope.headers,
            "properties": properties,
        }
        file = self._written / f"{int(time.monotonic() * 1000)}_{uuid4()}.{message.queue}.msg"
        with file.open("x") as opened:
            json.dump(document, opened)
            opened.flush()
            os.fsync(opened.fileno())
        return file


def _confirm(folder: Path) -> None:
    """Have the disk confirm the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
