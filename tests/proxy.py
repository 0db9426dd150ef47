"""A small TCP proxy on loopback, to break the wire between a client and a real server.

It knows nothing of any protocol. Every change of behaviour holds for the connections that
are open as well as for later ones, and for each byte that comes in after it.
"""

import contextlib
import socket
import threading
from urllib.parse import urlsplit, urlunsplit

from tests.processes import HOST, unused_port

CHUNK_BYTES = 65536


class TcpProxy:
    """Listens on `port` and forwards each connection to (host, port) of a server.

    `accepted` counts the connections, `passed` the bytes: of clients (False) and of replies (True).
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = HOST
        self.port = unused_port()
        self.accepted = 0
        self.passed = {False: 0, True: 0}
        self._upstream = (host, port)
        self._changed = threading.Condition()
        self._is_stalled = False
        self._holds_replies = False
        self._drops_replies = False
        self._allowances: dict[bool, int] = {}
        self._links: set[_Link] = set()
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self.listen()

    @property
    def live(self) -> int:
        """How many connections have not ended."""
        with self._changed:
            return len(self._links)

    def through(self, url: str) -> str:
        """Return the URL with this proxy's host and port in place of the server's."""
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{user}{at}{self.host}:{self.port}"))

    def stall(self) -> None:
        """Go on accepting connections and bytes, but forward nothing until `resume`."""
        with self._changed:
            self._is_stalled = True

    def hold_replies(self) -> None:
        """Forward what the client sends, but what the server answers not until `resume`."""
        with self._changed:
            self._holds_replies = True

    def swallow_replies(self) -> None:
        """Forward what the client sends and drop what the server answers."""
        with self._changed:
            self._drops_replies = True

    def resume(self) -> None:
        """Forward in both directions again, first what was held back."""
        with self._changed:
            self._is_stalled = self._holds_replies = self._drops_replies = False
            self._changed.notify_all()

    def cut_after(self, size: int, *, of_replies: bool = False) -> None:
        """Forward so many more bytes of what the client sends, or of the replies; then cut, once."""
        with self._changed:
            self._allowances = {of_replies: size}

    def cut(self) -> None:
        """Close every live connection, on both sides; new ones are still accepted."""
        with self._changed:
            self._allowances = {}
            links = list(self._links)
        for link in links:
            link.close()
        with self._changed:
            self._changed.notify_all()

    def refuse(self) -> None:
        """Close the listening socket: new connections are refused, live ones go on."""
        if self._listener is None or self._acceptor is None:
            return
        # Linux wakes a thread in accept() on shutdown, not on close.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        self._listener = self._acceptor = None

    def listen(self) -> None:
        """Open the listening socket (again), always on the same port."""
        if self._listener is not None:
            return
        self._listener = socket.create_server((HOST, self.port), backlog=128)
        self._acceptor = threading.Thread(
            target=self._accept, args=(self._listener,), name="proxy-accept", daemon=True
        )
        self._acceptor.start()

    def close(self) -> None:
        """Refuse and cut for good, and wait for every thread of the proxy."""
        self.refuse()
        with self._changed:
            links = list(self._links)
        self.cut()
        for link in links:
            link.join()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return  # refuse() closed the listening socket
            link = _Link(self, client, self._upstream)
            with self._changed:
                self.accepted += 1
                self._links.add(link)
            link.start()

    def may_pass(self, link: "_Link", *, is_reply: bool) -> bool:
        """Wait while stalled; tell whether bytes of this direction go on."""
        with self._changed:
            self._changed.wait_for(lambda: link.is_closed or not self._holds(is_reply=is_reply))
            return not link.is_closed and not (is_reply and self._drops_replies)

    def spend(self, size: int, *, is_reply: bool) -> int:
        """Tell how many of some bytes go on before the cut."""
        with self._changed:
            left = self._allowances.get(is_reply, size)
            passing = min(left, size)
            self.passed[is_reply] += passing
            if is_reply in self._allowances:
                self._allowances[is_reply] -= passing
            return passing

    def _holds(self, *, is_reply: bool) -> bool:
        return self._is_stalled or (is_reply and self._holds_replies)

    def forget(self, link: "_Link") -> None:
        """Drop a link that has ended."""
        with self._changed:
            self._links.discard(link)


class _Link:
    """One client's connection with its connection to the server, a thread for each way."""

    def __init__(self, proxy: TcpProxy, client: socket.socket, upstream: tuple[str, int]) -> None:
        self.is_closed = False
        self._proxy = proxy
        self._client = client
        self._server: socket.socket | None = None
        self._upstream = upstream
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="proxy-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def close(self) -> None:
        """Say goodbye on both sides at once; the link's own threads free the sockets."""
        with self._lock:
            self.is_closed = True
            for side in (self._client, self._server):
                if side is not None:
                    with contextlib.suppress(OSError):
                        side.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            server = self._connect()
            if server is not None:
                self._exchange(server)
        finally:
            self.close()
            self._client.close()
            if self._server is not None:
                self._server.close()
            self._proxy.forget(self)

    def _connect(self) -> socket.socket | None:
        try:
            server = socket.create_connection(self._upstream, timeout=5)
        except OSError:
            return None
        server.settimeout(None)
        for side in (self._client, server):
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._server = server
            return None if self.is_closed else server

    def _exchange(self, server: socket.socket) -> None:
        replies = threading.Thread(
            target=self._pump,
            args=(server, self._client),
            kwargs={"is_reply": True},
            name="proxy-replies",
            daemon=True,
        )
        replies.start()
        self._pump(self._client, server, is_reply=False)
        replies.join()

    def _pump(self, source: socket.socket, target: socket.socket, *, is_reply: bool) -> None:
        try:
            while chunk := source.recv(CHUNK_BYTES):
                if self._proxy.may_pass(self, is_reply=is_reply):
                    passing = self._proxy.spend(len(chunk), is_reply=is_reply)
                    target.sendall(chunk[:passing])
                    if passing < len(chunk):
                        self._proxy.cut()
            if self._proxy.may_pass(self, is_reply=is_reply):
                target.shutdown(socket.SHUT_WR)  # the other way may still have bytes to bring
        except OSError:
            self.close()
