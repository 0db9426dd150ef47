"""Every error that celery_outbox raises on purpose.

    OutboxError
    ├── ConfigurationError        a setting, name or database is wrong; nothing was done
    ├── DispatchError             this call cannot be stored; nothing was stored or sent
    │   ├── NoOutboxError         our options reached an app that has no live Outbox
    │   ├── OptionError           options that contradict each other or name something unknown
    │   └── TransactionError      the transaction to store in is missing, ambiguous or unusable
    ├── SchemaError               the table is missing, or is not the one this version needs
    ├── DatabaseError             an outbox database could not be read or written
    └── PublisherContractError    a publisher's answer does not fit the batch it was given

The text of each says what was expected, what was found and what to do.
"""

from __future__ import annotations

__all__ = [
    "ConfigurationError",
    "DatabaseError",
    "DispatchError",
    "NoOutboxError",
    "OptionError",
    "OutboxError",
    "PublisherContractError",
    "SchemaError",
    "TransactionError",
]


class OutboxError(Exception):
    """The root of every error of this package."""


class ConfigurationError(OutboxError):
    """A setting, a name or a database is wrong; found before anything was done."""


class DispatchError(OutboxError):
    """A dispatch through the outbox is refused; nothing was stored or sent."""


class NoOutboxError(DispatchError):
    """An option of ours reached a Celery app to which no Outbox is attached."""


class OptionError(DispatchError):
    """The options of a dispatch contradict each other, or name something unknown."""


class TransactionError(DispatchError):
    """The transaction that should hold the message is missing, ambiguous or unusable."""


class SchemaError(OutboxError):
    """The outbox table is missing, or is not the table that this version works with."""


class DatabaseError(OutboxError):
    """An outbox database could not be read or written just now."""


class PublisherContractError(OutboxError):
    """A publisher answered with ids that do not fit the batch it was given."""
