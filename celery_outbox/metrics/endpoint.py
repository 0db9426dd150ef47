"""The small HTTP server of a relay: ``/metrics``, ``/healthz`` and ``/readyz``.

It has threads of its own, so that it answers whatever the relay does.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from ..errors import ConfigurationError
from ..relay.heartbeat import without_signals
from .health import Health, Verdict

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

__all__ = ["Endpoint"]

logger = logging.getLogger(__name__)


class Endpoint:
    """Listens from the beginning; answers as long as ``serving`` lasts.

    Raises ConfigurationError when the port cannot be had.
    """

    def __init__(self, host: str, port: int) -> None:
        kind = _Server6 if ":" in host else _Server
        try:
            self._server = kind((host, port), _Handler)
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigurationError(
                f"--metrics-port: expected to listen on {host} port {port}, found: {reason}. "
                "Choose another port, or another --metrics-host."
            ) from error

    @contextmanager
    def serving(self, metrics: WSGIApplication, health: Health) -> Iterator[None]:
        """Answer, in threads of its own, until the end of the block."""
        self._server.set_app(_answering(metrics, health))
        thread = threading.Thread(
            target=self._server.serve_forever, args=[0.1], name="celery_outbox metrics", daemon=True
        )
        with without_signals():
            thread.start()
        try:
            yield
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


def _answering(metrics: WSGIApplication, health: Health) -> WSGIApplication:
    probes: dict[str, Callable[[], Verdict]] = {"/healthz": health.live, "/readyz": health.ready}

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if path == "/metrics":
            return metrics(environ, start_response)
        probe = probes.get(path)
        if probe is None:
            status, text = "404 Not Found", "there are /metrics, /healthz and /readyz"
        else:
            verdict = probe()
            status = "200 OK" if verdict.is_good else "503 Service Unavailable"
            text = "; ".join([*verdict.reasons, *verdict.notes] or ["ok"])
        body = f"{text}\n".encode()
        headers = [
            ("Content-Type", "text/plain; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
        ]
        start_response(status, headers)
        return [body]

    return answer


class _Handler(WSGIRequestHandler):
    #: Seconds for which a client may say nothing.
    timeout = 10

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        logger.debug(format, *args)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    # What is under way need not be waited for at the end.
    block_on_close = False
    allow_reuse_port = False

    def server_bind(self) -> None:
        # The parent's asks the name service for this machine's name, which may hang.
        TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), int(port)
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that has gone, mostly.
        logger.debug("A request for metrics or health failed", exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6
