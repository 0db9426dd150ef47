"""What is said when an optional package is needed and not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ConfigurationError

__all__ = ["needs"]


@contextmanager
def needs(package: str, what: str) -> Iterator[None]:
    """Imports in the block belong to ``package``, which ``what`` needs."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("celery_outbox"):
            raise
        extra = " It comes with celery-outbox[metrics]." if package == "prometheus-client" else ""
        raise ConfigurationError(
            f"{what}: expected the package {package}, found none. Install it.{extra}"
        ) from error
