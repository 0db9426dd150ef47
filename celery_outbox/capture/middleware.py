"""The ASGI middleware that lets threads of one request see each other's transactions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .owner import enter_request, leave_request

__all__ = ["OutboxMiddleware"]

Scope = MutableMapping[str, Any]
ASGIApp = Callable[[Scope, Callable[..., Any], Callable[..., Any]], Awaitable[None]]


class OutboxMiddleware:
    """Marks everything that works for one request, for FastAPI, Starlette and other ASGI apps.

    FastAPI runs synchronous dependencies and endpoints in threads of a pool, each call in another.
    With ``app.add_middleware(OutboxMiddleware)`` a dispatch in the endpoint finds the transaction
    that the dependency began.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(
        self, scope: Scope, receive: Callable[..., Any], send: Callable[..., Any]
    ) -> None:
        """Run the application with a request of its own in the context."""
        if scope["type"] not in {"http", "websocket"}:
            await self.app(scope, receive, send)
            return
        token = enter_request()
        try:
            await self.app(scope, receive, send)
        finally:
            leave_request(token)
