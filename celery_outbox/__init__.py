"""A transactional outbox for Celery on SQLAlchemy."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import Outbox
    from .capture.middleware import OutboxMiddleware
    from .errors import OutboxError
    from .message import ClaimedMessage, Envelope
    from .publishing import Outcome, Publisher
    from .storage.desk import StoredMessage
    from .transports import Dispatch, Transport

__all__ = [
    "ClaimedMessage",
    "Dispatch",
    "Envelope",
    "Outbox",
    "OutboxError",
    "OutboxMiddleware",
    "Outcome",
    "Publisher",
    "StoredMessage",
    "Transport",
]

# At the first use: pytest loads the plugin of every installed package, and with it this module.
_HOMES = {
    "ClaimedMessage": ".message",
    "Dispatch": ".transports",
    "Envelope": ".message",
    "Outbox": ".app",
    "OutboxError": ".errors",
    "OutboxMiddleware": ".capture.middleware",
    "Outcome": ".publishing",
    "Publisher": ".publishing",
    "StoredMessage": ".storage.desk",
    "Transport": ".transports",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
