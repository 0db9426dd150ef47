"""The brokers that one app knows: its own, as Celery's settings say, and those of ``outbox_brokers``.

A stored row holds a broker's name only. What the name stands for is looked up anew by whoever relays,
so a broker may move while its messages wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from celery import Celery
from kombu import Connection

from .config import BrokerSpec, Settings
from .errors import ConfigurationError, OptionError
from .transports import Transport, describe, resolved

__all__ = ["Brokers"]


class Brokers:
    """Connections and transports by the names of brokers."""

    def __init__(self, app: Celery, settings: Settings) -> None:
        self._app = app
        self._own = settings.name
        self._specs = settings.brokers
        self._custom = {scheme: resolved(scheme, it) for scheme, it in settings.transports.items()}
        self._transports: dict[str, Transport] = {}
        chosen = [name for name, spec in self._specs.items() if spec.default]
        #: Where a stored dispatch goes that names no broker.
        self.default: str = next(iter(chosen), self._own)

    @property
    def names(self) -> Sequence[str]:
        """Their names, the app's own first."""
        return [self._own, *self._specs]

    def check(self, name: str | None) -> str:
        """The name of the broker that ``name`` means. Raises OptionError when there is none."""
        if name is None:
            return self.default
        if name not in self.names:
            raise OptionError(
                f"outbox_broker: expected one of {sorted(self.names)}, got {name!r}. "
                "Add it to outbox_brokers."
            )
        return name

    def connection(self, name: str) -> Connection:
        """A new connection, not yet connected. Raises ConfigurationError for a URL that is none."""
        spec = self._specs.get(name)
        try:
            return self._app.connection_for_write() if spec is None else self._connection(spec)
        except (KeyError, ValueError) as error:
            # Kombu's text may repeat the URL, with a password in it.
            found = str(error) if isinstance(error, KeyError) else type(error).__name__
            raise ConfigurationError(
                f"broker {name!r}: expected a broker URL that Kombu can read, found that it cannot "
                f"({found}). Correct broker_url or outbox_brokers."
            ) from None

    def transport(self, name: str) -> Transport:
        """The transport of a broker. Raises ConfigurationError when Kombu has none for its URL."""
        known = self._transports.get(name)
        if known is None:
            spec = self._specs.get(name)
            max_delay = None if spec is None else spec.max_delay
            known = describe(self.connection(name), max_delay, self._custom)
            self._transports[name] = known
        return known

    def _connection(self, spec: BrokerSpec) -> Connection:
        """Only what is no broker's own comes from Celery's settings: neither login nor options."""
        conf = self._app.conf
        return self._app.amqp.Connection(
            spec.url,
            transport_options=dict(spec.transport_options),
            connect_timeout=conf.broker_connection_timeout,
            failover_strategy=conf.broker_failover_strategy,
        )
