"""Outbox: attaches to a Celery app; says of each dispatch whether it is stored, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from celery import Celery, Signature
from celery.utils.time import maybe_make_aware
from sqlalchemy import MetaData

from .admin import StoredMessage, find_one, forget_one, reschedule_one
from .brokers import Brokers
from .capture import doors
from .capture.batch import Batch, batching, current_batch
from .capture.canvas import open_canvases
from .capture.choice import Choice, Level, choose, choosing, of_canvas, under
from .capture.eager import (
    Deferred,
    DeferredResult,
    EagerCall,
    EagerSink,
    EagerTask,
    apply_last,
    refuse_connection,
    unheard,
)
from .capture.held import HeldProducer
from .capture.place import Place, Sink, add_to
from .capture.producer import OutboxProducer, Request
from .capture.results import attach_results
from .capture.tracking import tracker
from .capture.transaction import Transactions
from .capture.view import view_of
from .config import Settings, check_names, read_settings
from .errors import ConfigurationError, OptionError
from .publishing import Publisher
from .relay.bootstep import attach_bootstep
from .relay.publishers import publisher_for
from .storage.database import Database
from .storage.install import install

__all__ = ["Outbox"]

_FIXUP = "celery_outbox.capture.doors:open_doors"

# From here on, and not only when there is an Outbox: transactions are seen that begin before its
# first dispatch, and our options are refused by apps that have none.
doors.open_doors()
open_canvases()
tracker.listen()


class Outbox:
    """The transactional outbox of one Celery app.

    Args:
        app: the Celery app; None when ``init_app`` gives it later.
        settings: every ``outbox_*`` setting without its prefix, above all ``databases``: a mapping
            of names to SQLAlchemy engines, AsyncEngines or URLs, of which the first is the default.

    Settings not given here come from Celery's configuration. They are read at the first need, and
    validated then, once; wrong names are refused here.

    Raises ConfigurationError.
    """

    def __init__(self, app: Celery | None = None, **settings: Any) -> None:
        check_names(settings)
        self._given = settings
        self._app: Celery | None = None
        #: Takes each finished dispatch to its place; the testing plugin puts itself in between.
        self.sink: Sink = add_to
        #: Hears of what would be stored, in eager mode; the testing plugin listens here, too.
        self.eager_sink: EagerSink = unheard
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Celery) -> None:
        """Attach to ``app``: from now on its dispatches may be stored.

        Raises ConfigurationError when one of the two is attached to another already.
        """
        if self._app not in {None, app} or doors.attached(app) not in {None, self}:
            raise ConfigurationError(
                f"expected a Celery app and an Outbox that are not attached yet, found that {app!r} "
                "or this Outbox is. Create one Outbox for each app."
            )
        self._app = app
        doors.attach(app, self)
        attach_results(app)
        attach_bootstep(app, self)
        # A pickled app loses its Outbox: where it is unpickled, our options shall be refused.
        app.fixups = {*app.fixups, _FIXUP}

    @property
    def app(self) -> Celery:
        """The Celery app. Raises ConfigurationError before ``init_app``."""
        if self._app is None:
            raise ConfigurationError(
                "expected an Outbox with a Celery app, found one without. Call outbox.init_app(app)."
            )
        return self._app

    @cached_property
    def settings(self) -> Settings:
        """The validated settings, read at the first need."""
        conf = self.app.conf
        return read_settings(self._given, lambda key: conf.get(key), self.app.main)

    @cached_property
    def databases(self) -> Mapping[str, Database]:
        """The configured databases by name; the first is the default."""
        settings = self.settings
        databases: dict[str, Database] = {}
        for name, source in settings.databases.items():
            database = Database(name, source, settings.table, notify=settings.notify)
            for other in databases.values():
                if other.identity == database.identity:
                    raise ConfigurationError(
                        f"outbox_databases: expected one name for each table, found that "
                        f"{other.name!r} and {name!r} are the same. Leave one of them out."
                    )
            databases[name] = database
        return databases

    @property
    def metadata(self) -> MetaData:
        """The tables' metadata, for Alembic's ``target_metadata``; named as on the default database."""
        return next(iter(self.databases.values())).tables.metadata

    def install(self) -> None:
        """Create the tables and indexes on every configured database; again changes nothing.

        Raises SchemaError and DatabaseError.
        """
        for database in self.databases.values():
            install(database)

    def bulk(
        self,
        signatures: Iterable[Any],
        *,
        via_outbox: bool | None = True,
        outbox_database: str | None = None,
        outbox_broker: str | None = None,
    ) -> list[Any]:
        """Dispatch many signatures or canvases, stored together; their results in the same order.

        The options hold for members that have no choice of their own; ``via_outbox=None`` leaves it to
        each task. What is stored in one database is stored all or not at all. When a member cannot be
        built, nothing of any is stored or sent. Members sent directly go last, after everything is
        stored, and are outside that guarantee.
        """
        members = list(signatures)
        for member in members:
            if not isinstance(member, Signature):
                raise OptionError(
                    f"outbox.bulk: expected signatures such as task.s(...), got {member!r}."
                )
        said = {
            "via_outbox": via_outbox,
            "outbox_database": outbox_database,
            "outbox_broker": outbox_broker,
        }
        with choosing(under(of_canvas(), said)), batching(holds_direct=True):
            return [member.apply_async() for member in members]

    def find(self, task_id: str, database: str | None = None) -> list[StoredMessage]:
        """Every message with this task id that is stored, in all databases or in one.

        Empty when the task was delivered or never stored; a ``state`` of "reserved" means that a relay
        is delivering it. What another transaction has not committed is not seen. Like ``forget`` and
        ``reschedule`` it works in short transactions of its own, and blocks while it does. Raises
        ConfigurationError for an unknown database; SchemaError and DatabaseError when nothing is found
        and a database could not be read.
        """
        return find_one(self._chosen(database), task_id)

    def forget(self, task_id: str, database: str | None = None) -> bool:
        """Delete the messages with this task id before their delivery; whether there is none left.

        False: a relay has reserved one, or there was none, because it was delivered or never stored.
        For a part of a chord a warning is logged: the chord can no longer finish. Raises like ``find``,
        and ConfigurationError when the id is in several databases and none is named.
        """
        return forget_one(self._chosen(database), task_id)

    def reschedule(self, task_id: str, eta: datetime | timedelta, database: str | None = None) -> bool:
        """Let the messages with this task id be delivered at another time; whether they will be.

        Args:
            task_id: of the task.
            eta: the new time, or how long from now on; what has passed means now. A naive datetime is
                UTC, as Celery takes it.
            database: needed when the id is in several.

        False as for ``forget``; also for a message that has failed, that expires before the new time,
        or whose time is in its body (Celery's first protocol). Raises like ``forget``, and OptionError
        for what is no time.
        """
        if not isinstance(eta, datetime | timedelta):
            raise OptionError(f"eta: expected a datetime or a timedelta, got {eta!r}.")
        if isinstance(eta, datetime):
            eta = maybe_make_aware(eta, self.app.timezone)
        return reschedule_one(self._chosen(database), task_id, eta)

    def _chosen(self, database: str | None) -> Sequence[Database]:
        if database is None:
            return list(self.databases.values())
        if database not in self.databases:
            raise ConfigurationError(
                f"expected one of the databases {', '.join(map(repr, self.databases))}, got "
                f"{database!r}."
            )
        return [self.databases[database]]

    def using(self, transaction: object) -> AbstractContextManager[None]:
        """Store every dispatch of the ``with`` block in this transaction.

        ``transaction`` is a Session, AsyncSession, scoped_session, Connection or AsyncConnection.
        Raises TransactionError when it is something else.
        """
        return self._transactions.using(transaction)

    def send(
        self,
        send_task: Callable[..., Any],
        name: str,
        options: dict[str, Any],
        levels: Sequence[Level],
        *,
        is_republished: bool,
    ) -> Any:
        """Store a dispatch, or send it by calling ``send_task``; what the door calls."""
        choice = self._choose(levels, is_republished=is_republished)
        batch = current_batch()
        if choice is None and batch is not None and batch.holds_direct:
            return self._send_later(batch, send_task, name, options)
        if choice is None:
            return send_task(self.app, name, **options)
        if options.get("connection") is not None:
            raise OptionError(
                "connection: expected none for a dispatch through the outbox, which contacts no "
                "broker, got one. Leave it out, or add via_outbox=False."
            )
        place = self._place(choice, is_republished=is_republished)
        request = self._request(choice, place.database, name, options)
        producer = OutboxProducer(self.app, request)
        result = send_task(view_of(self.app, producer), name, **options)
        if batch is None:
            self.sink(place, producer.messages)
        else:
            batch.add(place, producer.messages, self.sink)
        return result

    def _send_later(
        self, batch: Batch, send_task: Callable[..., Any], name: str, options: dict[str, Any]
    ) -> Any:
        """Build a direct dispatch now, so that its errors show, and send it after the batch."""
        held, connection = HeldProducer(), options.get("connection")
        result = send_task(view_of(self.app, held), name, **options)
        task_id = None if result.ignored else result.id
        batch.send_later(lambda: held.release(self.app, task_id, connection))
        return result

    def apply_eagerly(
        self,
        apply: Callable[..., Any],
        task: Any,
        options: dict[str, Any],
        levels: Sequence[Level],
    ) -> Any:
        """Run an eager dispatch when its transaction has committed, or at once; what the door calls."""
        choice = self._choose(levels, is_republished=False)
        if choice is None:
            return apply_last(apply, task, options)
        refuse_connection(options)
        place = self._place(choice, is_republished=False)
        call = EagerCall.of(apply, task, options)
        broker = self.brokers.check(choice.broker)
        described = EagerTask.of(self.app, task.name, broker, call.options)
        result = DeferredResult(described.id, task.name)
        Deferred(result=result, apply=call.run).run_in(place, [described], self.eager_sink)
        return result

    def described(
        self, signatures: Iterable[tuple[Any, Level]], *, is_republished: bool
    ) -> list[EagerTask]:
        """What would be stored of ``signatures``; what canvases ask in eager mode."""
        return [
            EagerTask.of_signature(self.app, signature, self.brokers.check(choice.broker))
            for signature, choice in self._stored(signatures, is_republished=is_republished)
        ]

    def place_of(
        self, signatures: Iterable[tuple[Any, Level]], *, is_republished: bool
    ) -> Place | None:
        """Where the stored ones of ``signatures`` go; None when none is stored; what canvases ask.

        Raises OptionError when they name different databases.
        """
        places: dict[str, Place] = {}
        for _, choice in self._stored(signatures, is_republished=is_republished):
            place = self._place(choice, is_republished=is_republished)
            places[place.database.name] = place
        if len(places) > 1:
            raise OptionError(
                "expected the stored members of a chord (of any canvas in eager mode) to go to one "
                f"database, found {', '.join(map(repr, sorted(places)))}. Give outbox_database= to the "
                "canvas instead."
            )
        return next(iter(places.values()), None)

    def _stored(
        self, signatures: Iterable[tuple[Any, Level]], *, is_republished: bool
    ) -> Iterator[tuple[Any, Choice]]:
        """Those of ``signatures`` that are stored, and what they ask for."""
        for signature, canvas in signatures:
            levels = [signature.options, canvas]
            if not is_republished:
                levels += doors.task_levels(self.app, signature.task, {"kwargs": signature.kwargs})
            choice = self._choose(levels, is_republished=is_republished)
            if choice is not None:
                yield signature, choice

    @cached_property
    def _transactions(self) -> Transactions:
        return Transactions(self.databases, require=self.settings.require_transaction)

    def _place(self, choice: Choice, *, is_republished: bool) -> Place:
        # retry() and replace() end by raising: the transaction around them will be rolled back.
        if is_republished:
            return self._transactions.alone(choice.database)
        return self._transactions.find(choice.database)

    def _choose(self, levels: Sequence[Level], *, is_republished: bool) -> Choice | None:
        settings = self.settings
        choice = choose(levels, default=settings.default and not is_republished, retry=settings.retry)
        return None if choice is None else replace(choice, broker=self.brokers.check(choice.broker))

    def _request(
        self, choice: Choice, database: Database, name: str, options: Mapping[str, Any]
    ) -> Request:
        broker = self.brokers.check(choice.broker)
        transport = self.brokers.transport(broker)
        return Request(
            broker=broker,
            transport=transport,
            is_beside=database.is_at(transport.database),
            task_name=name,
            queue=options.get("queue"),
            countdown=options.get("countdown"),
            retry=choice.retry,
        )

    @cached_property
    def brokers(self) -> Brokers:
        """The brokers that this app knows."""
        return Brokers(self.app, self.settings)

    def publisher(self, broker: str) -> Publisher:
        """A publisher, not yet connected, for a broker by its name; what a relay uses."""
        brokers = self.brokers
        return publisher_for(
            brokers.connection(broker), brokers.transport(broker), self.app.amqp.queues
        )
