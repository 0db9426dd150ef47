"""The settings of an Outbox, validated once and completely.

This module alone knows the settings' names, defaults and forms. A keyword argument of ``Outbox``
beats the ``outbox_*`` key of Celery's configuration, which beats the default.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, NoReturn

from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError

from .asynchronous import is_async_engine
from .errors import ConfigurationError
from .policy import LONGEST_DELAY, MOST_ATTEMPTS, RetryPolicy

__all__ = ["BrokerSpec", "Settings", "parse_duration", "read_settings"]

#: What may stand for a database in ``outbox_databases``.
#: An AsyncEngine too: it has no type here, for its module needs greenlet.
DatabaseSource = Any

MAX_TABLE_NAME = 63  # the shortest limit of any database: PostgreSQL's
MAX_BROKER_NAME = 191  # the broker column; short enough for every database's index limit

_TABLE_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*(\.[a-zA-Z_][a-zA-Z0-9_]*)?")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSpec:
    """A named broker other than the app's own.

    Attributes:
        url: with alternates behind ``;``.
        transport_options: as in Celery's ``broker_transport_options``.
        default: stored dispatches that name no broker go there.
        max_delay: overrides how early, before its time, a delayed message may leave for it.
    """

    url: str
    transport_options: Mapping[str, Any] = field(default_factory=dict)
    default: bool = False
    max_delay: timedelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Validated settings; the field names are those of the keyword arguments of ``Outbox``."""

    databases: Mapping[str, DatabaseSource]
    table: str = "celery_outbox"
    name: str
    retry_after: timedelta = timedelta(seconds=300)
    default: bool = False
    require_transaction: bool = False
    brokers: Mapping[str, BrokerSpec] = field(default_factory=dict)
    transports: Mapping[str, Any] = field(default_factory=dict)
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    keep: bool = False
    notify: bool = True


def parse_duration(value: object, what: str) -> timedelta:
    """Turn ``90``, ``1.5``, ``"90s"``, ``"15m"``, ``"12h"``, ``"7d"`` or a timedelta into a timedelta.

    A bare number is seconds. Raises ConfigurationError, naming ``what``, for anything else and for
    negative durations.
    """
    expected = "a number of seconds or text such as 90, 90s, 15m, 12h or 7d"
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    else:
        match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            _refuse(what, expected, value)
        seconds = float(match[1]) * _UNITS[match[2]]
    try:
        duration = timedelta(seconds=seconds)
    except (OverflowError, ValueError):
        _refuse(what, expected, value)
    if duration < timedelta(0):
        _refuse(what, f"{expected}, not negative", value)
    return duration


def _refuse(what: str, expected: str, found: object, todo: str = "") -> NoReturn:
    raise ConfigurationError(f"{what}: expected {expected}, got {found!r}. {todo}".rstrip())


def _refuse_unseen(what: str, expected: str, value: object, todo: str = "") -> NoReturn:
    """Refuse a value that may hold a URL with a password in it: it is not repeated."""
    found = type(value).__name__ if value else repr(value)
    raise ConfigurationError(f"{what}: expected {expected}, got {found}. {todo}".rstrip())


def _flag(what: str, value: object) -> bool:
    if not isinstance(value, bool):
        _refuse(what, "True or False", value)
    return value


def _databases(what: str, value: object) -> Mapping[str, DatabaseSource]:
    if not isinstance(value, Mapping) or not value:
        _refuse_unseen(
            what,
            "a mapping of at least one name to an engine, an AsyncEngine or a URL",
            value,
            'Write for example databases={"default": engine}.',
        )
    return {_name(f"{what}, a key", name): _database(what, name, it) for name, it in value.items()}


def _database(what: str, name: str, source: object) -> DatabaseSource:
    if isinstance(source, Engine | URL) or is_async_engine(source):
        return source
    if isinstance(source, str):
        try:
            return make_url(source)
        except ArgumentError:
            # The text may be a URL with a password in it, which SQLAlchemy 2.0 repeats.
            raise ConfigurationError(
                f"{what}[{name!r}]: expected an SQLAlchemy database URL such as "
                "postgresql+psycopg://user@host/name, got text that is none."
            ) from None
    _refuse_unseen(f"{what}[{name!r}]", "an engine, an AsyncEngine or a URL", source)


def _table(what: str, value: object) -> str:
    todo = 'Write for example "celery_outbox" or "queue.celery_outbox".'
    if not isinstance(value, str) or not _TABLE_NAME.fullmatch(value):
        _refuse(what, "a name of letters, digits and _ (optionally schema.name)", value, todo)
    if max(map(len, value.split("."))) > MAX_TABLE_NAME:
        _refuse(what, f"at most {MAX_TABLE_NAME} characters in a name", value, "Choose a shorter one.")
    return value


def _name(what: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        _refuse(what, "a name, not empty", value)
    if len(value) > MAX_BROKER_NAME:
        _refuse(what, f"at most {MAX_BROKER_NAME} characters", value)
    return value


def _outbox_name(what: str, value: object) -> str:
    if value is None or value == "__main__":
        raise ConfigurationError(
            f"{what}: expected a name for this app's broker that every process of the app agrees on, "
            f"found that the Celery app's main is {value!r}. "
            'Write Celery("shop") or Outbox(app, name="shop").'
        )
    return _name(what, value)


def _lease(what: str, value: object) -> timedelta:
    duration = parse_duration(value, what)
    if duration < timedelta(seconds=1):
        _refuse(what, "a lease of at least one second", value)
    return duration


def _brokers(what: str, value: object) -> Mapping[str, BrokerSpec]:
    if not isinstance(value, Mapping):
        _refuse_unseen(what, "a mapping of broker names to URLs", value)
    brokers = {
        _name(f"{what}, a key", name): _broker(f"{what}[{name!r}]", it) for name, it in value.items()
    }
    defaults = [name for name, spec in brokers.items() if spec.default]
    if len(defaults) > 1:
        _refuse(what, "at most one broker with 'default': True", defaults)
    return brokers


def _broker(what: str, value: object) -> BrokerSpec:
    given = value if isinstance(value, Mapping) else {"url": value}
    allowed = {"url", "transport_options", "default", "max_delay"}
    if unknown := sorted(set(given) - allowed):
        _refuse(what, f"no keys but {sorted(allowed)}", unknown)
    options = given.get("transport_options", {})
    if not isinstance(options, Mapping):
        _refuse_unseen(f"{what}['transport_options']", "a mapping", options)
    early = given.get("max_delay")
    return BrokerSpec(
        url=_broker_url(what, given.get("url")),
        transport_options=dict(options),
        default=_flag(f"{what}['default']", given.get("default", False)),
        max_delay=None if early is None else parse_duration(early, f"{what}['max_delay']"),
    )


def _broker_url(what: str, value: object) -> str:
    alternates = value if isinstance(value, list | tuple) else [value]
    if not alternates or not all(isinstance(each, str) and each.strip() for each in alternates):
        _refuse_unseen(what, "a broker URL, a list of alternates, or a mapping with a 'url'", value)
    return ";".join(map(str, alternates))


def _transports(what: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value):
        _refuse_unseen(what, "a mapping of URL schemes to classes", value)
    for scheme, named in value.items():
        if not isinstance(named, str | type):
            _refuse(f"{what}[{scheme!r}]", "a class or the path of one", named)
    return dict(value)


def read_retry(what: str, value: object, base: RetryPolicy | None = None) -> RetryPolicy:
    """Validate a retry policy: a RetryPolicy, or a mapping of some of its fields over ``base``."""
    base = base or RetryPolicy()
    allowed = [each.name for each in fields(RetryPolicy)]
    given = (
        {name: getattr(value, name) for name in allowed} if isinstance(value, RetryPolicy) else value
    )
    if not isinstance(given, Mapping) or set(given) - set(allowed):
        todo = 'Write for example {"max_attempts": 20}.'
        _refuse(what, f"a mapping with some of {sorted(allowed)}", value, todo)
    attempts = given.get("max_attempts", base.max_attempts)
    is_number = isinstance(attempts, int) and not isinstance(attempts, bool)
    if attempts is not None and not (is_number and 1 <= attempts <= MOST_ATTEMPTS):
        expected = f"None or a whole number of at least 1 and at most {MOST_ATTEMPTS}"
        _refuse(f"{what}['max_attempts']", expected, attempts, "None: try again for ever.")
    policy = RetryPolicy(
        max_attempts=attempts,
        base_delay=parse_duration(given.get("base_delay", base.base_delay), f"{what}['base_delay']"),
        max_delay=parse_duration(given.get("max_delay", base.max_delay), f"{what}['max_delay']"),
    )
    if not policy.is_sound:
        found = {"base_delay": str(policy.base_delay), "max_delay": str(policy.max_delay)}
        todo = "A delay that is left out is the app's, by default 1 second, or 600 for max_delay."
        _refuse(what, f"0 < base_delay <= max_delay <= {LONGEST_DELAY.days} days", found, todo)
    return policy


_READERS: Mapping[str, Callable[[str, object], Any]] = {
    "databases": _databases,
    "table": _table,
    "name": _outbox_name,
    "retry_after": _lease,
    "default": _flag,
    "require_transaction": _flag,
    "brokers": _brokers,
    "transports": _transports,
    "retry": read_retry,
    "keep": _flag,
    "notify": _flag,
}


def check_names(given: Mapping[str, object]) -> None:
    """Raise ConfigurationError when ``given`` holds a keyword that is no setting."""
    if unknown := sorted(set(given) - set(_READERS)):
        _refuse("Outbox", f"no settings but {sorted(_READERS)}", unknown)


def read_settings(
    given: Mapping[str, object], conf: Callable[[str], object], main: str | None
) -> Settings:
    """Merge the keyword arguments, Celery's configuration and the defaults into valid Settings.

    Args:
        given: the keyword arguments of ``Outbox``; absent or None means "not given here".
        conf: looks one ``outbox_*`` key up in Celery's configuration, None when it is not set.
        main: the Celery app's ``main``, the default for ``name``.
    """
    check_names(given)
    values: dict[str, Any] = {}
    for setting in fields(Settings):
        what, found = setting.name, given.get(setting.name)
        if found is None:
            what = f"outbox_{setting.name}"
            found = conf(what)
        if found is None and setting.name == "name":
            found = main
        if found is not None or setting.name in {"databases", "name"}:
            values[setting.name] = _READERS[setting.name](what, found)
    settings = Settings(**values)
    if settings.name in settings.brokers:
        raise ConfigurationError(
            f"outbox_brokers: expected names other than this app's own, found {settings.name!r}. "
            "Rename that broker, or set outbox_name."
        )
    return settings
