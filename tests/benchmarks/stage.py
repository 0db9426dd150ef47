"""What the benchmarks run on: private servers, and a small shop that sends tasks."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
import sqlalchemy as sa
from celery import Celery
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from celery_outbox import Outbox
from tests.servers import DatabaseServer, RabbitServer, RedisServer, SQSServer

TASK = "shop.send_receipt"
QUEUE = "celery"


class Base(DeclarativeBase):
    pass


class Order(Base):
    """The business work of a transaction: one row."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    note: Mapped[str] = mapped_column(sa.String(100))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The servers that the chosen benchmarks need, and a directory for SQLite's files.

    ``sqs_stub`` is the URL of a stub that answers late.
    """

    directory: Path
    redis: RedisServer
    postgresql: DatabaseServer | None = None
    mariadb: DatabaseServer | None = None
    rabbitmq: RabbitServer | None = None
    sqs: SQSServer | None = None
    sqs_stub: str | None = None

    def database_url(self, kind: str) -> str:
        """The URL of an empty database."""
        if kind == "sqlite":
            return f"sqlite:///{self.directory / uuid.uuid4().hex}.db"
        server: DatabaseServer = getattr(self, kind)
        return server.create_database()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shop:
    """Two Celery apps with the same task on the same Redis: one with an Outbox, one without."""

    engine: sa.Engine
    outbox: Outbox
    stored: Any
    plain: Any
    redis: Callable[[], redis.Redis]

    @classmethod
    def open(cls, stage: Stage, kind: str) -> "Shop":
        """Set the shop up on an empty database of this kind."""
        engine = _engine(stage.database_url(kind))
        Base.metadata.create_all(engine)
        url = stage.redis.empty_database()
        with_outbox, without = (
            Celery("shop", broker=url, set_as_current=False),
            Celery("plain", broker=url, set_as_current=False),
        )
        outbox = Outbox(with_outbox, databases={"default": engine})
        outbox.install()
        client = redis.Redis.from_url(url)
        return cls(
            engine=engine,
            outbox=outbox,
            stored=with_outbox.task(name=TASK)(_send_receipt),
            plain=without.task(name=TASK)(_send_receipt),
            redis=lambda: client,
        )

    def close(self) -> None:
        """Let go of every connection."""
        self.redis().close()
        for app in (self.stored.app, self.plain.app):
            app.pool.force_close_all()
            app.close()
        self.engine.dispose()


def _engine(url: str) -> sa.Engine:
    """An engine whose commits do not wait for the disk.

    That wait is long, varies widely, and would hide what the benchmarks compare.
    """
    if url.startswith("postgresql"):
        return sa.create_engine(url, connect_args={"options": "-c synchronous_commit=off"})
    engine = sa.create_engine(url)
    if engine.dialect.name == "sqlite":

        @sa.event.listens_for(engine, "connect")
        def no_wait(connection: Any, record: object) -> None:
            connection.execute("PRAGMA synchronous = OFF")

    return engine


def _send_receipt(*args: Any, **kwargs: Any) -> None:
    """Never runs: no worker is part of the benchmarks."""
