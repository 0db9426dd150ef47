"""Outbox: attaches to a Celery app; says of each dispatch whether it is stored, and where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from celery import Celery, uuid
from kombu import Connection
from sqlalchemy import MetaData

from .capture import doors
from .capture.eager import DeferredResult, copied
from .capture.place import Place
from .capture.producer import OutboxProducer, Request
from .capture.results import attach_results, note_stored
from .capture.transaction import Transactions
from .capture.view import view_of
from .config import BrokerSpec, Settings, check_names, read_retry, read_settings
from .errors import ConfigurationError, OptionError
from .policy import RetryPolicy
from .storage.database import Database
from .storage.install import install
from .storage.schema import Tables
from .transports import Transport, describe

__all__ = ["Outbox"]

_FIXUP = "celery_outbox.capture.doors:open_doors"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """That a dispatch is stored, and what it asked for; None stands for "choose for me"."""

    database: str | None
    broker: str | None
    retry: RetryPolicy | None


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
        doors.open_doors()
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
        # A pickled app loses its Outbox: where it is unpickled, our options shall be refused.
        app.fixups.add(_FIXUP)

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
            database = Database(name, source, settings.table)
            for other in databases.values():
                if other.identity == database.identity:
                    raise ConfigurationError(
                        f"outbox_databases: expected one name for each table, found that "
                        f"{other.name!r} and {name!r} are the same. Leave one of them out."
                    )
            databases[name] = database
        return databases

    @cached_property
    def metadata(self) -> MetaData:
        """The tables' metadata, for Alembic's ``target_metadata``."""
        return Tables.build(self.settings.table).metadata

    def install(self) -> None:
        """Create the tables and indexes on every configured database; again changes nothing.

        Raises SchemaError and DatabaseError.
        """
        for database in self.databases.values():
            install(database)

    def using(self, transaction: object) -> AbstractContextManager[None]:
        """Store every dispatch of the ``with`` block in this transaction.

        ``transaction`` is a Session, AsyncSession, scoped_session, Connection or AsyncConnection.
        Raises TransactionError when it is something else.
        """
        return self._transactions.using(transaction)

    def send(
        self,
        send_task: Callable[..., Any],
        task: Any,
        name: str,
        options: dict[str, Any],
        asked: dict[str, Any],
        *,
        is_republished: bool,
    ) -> Any:
        """Store a dispatch, or send it by calling ``send_task``; what the door calls."""
        choice = self._choose(task, asked, is_republished=is_republished)
        if choice is None:
            return send_task(self.app, name, **options)
        if options.get("connection") is not None:
            raise OptionError(
                "connection: expected none for a dispatch through the outbox, which contacts no "
                "broker, got one. Leave it out, or add via_outbox=False."
            )
        broker = choice.broker or self.settings.name
        place = self._place(choice, is_republished=is_republished)
        producer = OutboxProducer(
            self.app,
            Request(
                broker=broker,
                transport=self._transport(broker),
                task_name=name,
                countdown=options.get("countdown"),
                retry=choice.retry,
            ),
        )
        result = send_task(view_of(self.app, producer), name, **options)
        place.add(producer.messages)
        note_stored(result.id)
        return result

    def apply_eagerly(
        self, apply: Callable[..., Any], task: Any, options: dict[str, Any], asked: dict[str, Any]
    ) -> Any:
        """Run an eager dispatch when its transaction has committed, or at once; what the door calls."""
        choice = self._choose(task, asked, is_republished=False)
        if choice is None:
            return apply(task, **options)
        place = self._place(choice, is_republished=False)
        args, kwargs = options.pop("args", None) or (), options.pop("kwargs", None) or {}
        if task.typing:
            task.__header__(*args, **kwargs)
        serializer = options.get("serializer") or task.serializer or self.app.conf.task_serializer
        args, kwargs = copied(args, kwargs, serializer)
        result = DeferredResult(options.setdefault("task_id", uuid()), task.name)
        place.call_after_commit(
            task.name, lambda: result.run(lambda: apply(task, args, kwargs, **options))
        )
        return result

    @cached_property
    def _transactions(self) -> Transactions:
        return Transactions(self.databases, require=self.settings.require_transaction)

    def _place(self, choice: _Choice, *, is_republished: bool) -> Place:
        # retry() and replace() end by raising: the transaction around them will be rolled back.
        if is_republished:
            return self._transactions.alone(choice.database)
        return self._transactions.find(choice.database)

    def _choose(self, task: Any, asked: dict[str, Any], *, is_republished: bool) -> _Choice | None:
        """Call, then task, then app; None: this dispatch is sent directly."""
        defaults = {
            option: value
            for option in doors.OPTIONS
            if (value := getattr(task, option, None)) is not None
        }
        wanted = _wish(asked, "this call")
        if wanted is None and not is_republished:
            # An explicit None in the call clears what the task says.
            rest = {key: value for key, value in defaults.items() if key not in asked}
            wanted = _wish(rest, "the task")
            if wanted is None:
                wanted = self.settings.default
        if not wanted:
            return None
        merged = defaults | asked
        broker = merged.get("outbox_broker")
        if broker is not None and broker not in self._brokers:
            raise OptionError(
                f"outbox_broker: expected one of {sorted(self._brokers)}, got {broker!r}. "
                "Add it to outbox_brokers."
            )
        retry = merged.get("outbox_retry")
        return _Choice(
            database=merged.get("outbox_database"),
            broker=broker,
            retry=None if retry is None else read_retry("outbox_retry", retry),
        )

    @cached_property
    def _brokers(self) -> Mapping[str, BrokerSpec | None]:
        """Every broker that this app knows; its own has no specification but Celery's settings."""
        return {self.settings.name: None, **self.settings.brokers}

    def _transport(self, broker: str) -> Transport:
        known = self._transports.get(broker)
        if known is None:
            spec = self._brokers[broker]
            known = describe(self.connection(broker), None if spec is None else spec.max_delay)
            self._transports[broker] = known
        return known

    @cached_property
    def _transports(self) -> dict[str, Transport]:
        return {}

    @property
    def brokers(self) -> list[str]:
        """The names of the brokers that this app knows, its own first."""
        return list(self._brokers)

    def connection(self, broker: str) -> Connection:
        """A new connection, not yet connected, to a broker by its name."""
        spec = self._brokers[broker]
        if spec is None:
            return self.app.connection_for_write()
        return self.app.connection_for_write(spec.url, transport_options=dict(spec.transport_options))


def _wish(options: Mapping[str, Any], who: str) -> bool | None:
    """What one level says: True to store, False to send, None for nothing.

    Naming a database or a broker says "store".
    """
    via = options.get("via_outbox")
    if via is not None and not isinstance(via, bool):
        raise OptionError(f"via_outbox: expected True, False or None, got {via!r}.")
    named = [
        option for option in ("outbox_database", "outbox_broker") if options.get(option) is not None
    ]
    if via is False and named:
        raise OptionError(
            f"expected via_outbox=False alone, found it together with {', '.join(named)} in the "
            f"options of {who}. Clear an earlier choice with .set({named[0]}=None), or leave "
            "via_outbox=False away."
        )
    return True if named else via
