"""A transactional outbox for Celery on SQLAlchemy."""

from .app import Outbox
from .capture.middleware import OutboxMiddleware
from .errors import OutboxError

__all__ = ["Outbox", "OutboxError", "OutboxMiddleware"]
