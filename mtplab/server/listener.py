"""A port, a thread for each connection, and the end of them all.

Binds first and listens later, so that a port that is taken is known before minutes of loading; so nothing heavy is
imported here. Knows nothing of what is said on a connection: `handler.py` does.
"""

from __future__ import annotations

import hmac
import socket
import socketserver
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from mtplab.errors import ConfigError

if TYPE_CHECKING:
    from mtplab.server.service import Service

__all__ = ["Listener"]


class Listener(ThreadingHTTPServer):
    """A bound port, on which `start` listens. Raises ConfigError for one that cannot be had; 0 takes a free one."""

    daemon_threads, block_on_close = True, False  # a client that keeps its connection open must not keep us
    request_queue_size = 128

    def __init__(self, host: str = "127.0.0.1", port: int = 8000):
        if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
            raise ConfigError(f"port is {port!r}; expected 0 (a free one) to 65535")
        if not isinstance(host, str) or not host:
            raise ConfigError(
                f"host is {host!r:.60}; expected an address of this machine, such as 127.0.0.1 or 0.0.0.0"
            )
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.service: Service | None = None
        self._key: bytes | None = None
        self._idle = threading.Condition()
        self._busy, self._open = 0, set()
        self._loop: threading.Thread | None = None
        try:
            super().__init__((host, port), BaseHTTPRequestHandler, bind_and_activate=False)
            self.server_bind()
        except (OSError, UnicodeError) as problem:
            if hasattr(self, "socket"):
                self.socket.close()
            why = getattr(problem, "strerror", None) or problem
            raise ConfigError(f"port {port} of {host} cannot be listened on: {why}; choose another, or 0") from None

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's asks a name server who we are
        self.server_name, self.server_port = self.server_address[:2]

    @property
    def url(self) -> str:
        """Where it is reached from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.server_name, self.server_name)
        return f"http://[{host}]:{self.server_port}" if ":" in host else f"http://{host}:{self.server_port}"

    def start(self, service: Service, handler: type[BaseHTTPRequestHandler], api_key: str | None = None) -> None:
        """Listens, in a thread. `api_key`: asked of whoever wants more than to look; None asks for none."""
        self.RequestHandlerClass = handler
        self.service, self._key = service, None if api_key is None else api_key.encode("utf-8", "surrogateescape")
        try:
            self.server_activate()
        except OSError as problem:  # another one bound it too, and listened first
            self.server_close()
            raise ConfigError(f"port {self.server_port} cannot be listened on: {problem.strerror}") from None
        self._loop = threading.Thread(target=self.serve_forever, args=(0.05,), name="mtplab-listener", daemon=True)
        self._loop.start()

    def allows(self, authorization: str | None) -> bool:
        """Whether a request with this header may ask for what needs the key."""
        if self._key is None:
            return True
        scheme, _, given = (authorization or "").partition(" ")
        right = hmac.compare_digest(given.strip().encode("latin-1", "replace"), self._key)
        return right and scheme.lower() == "bearer"

    def stop(self, within: float) -> bool:
        """Takes no more connections, lets what is being answered be answered for `within` seconds, and closes all.
        Returns whether all was answered."""
        if self._loop is not None:
            self.shutdown()
            self._loop.join()
        with self._idle:
            answered = self._idle.wait_for(lambda: not self._busy, within)
            left = list(self._open)
        for connection in left:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with self._idle:  # their threads close them
            self._idle.wait_for(lambda: not self._open, 0.5 if answered else 0)
        self.server_close()
        return answered

    def busy(self, change: int) -> None:
        """One more request is being answered, or one less."""
        with self._idle:
            self._busy += change
            self._idle.notify_all()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._idle:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._idle:
            self._open.discard(request)
            self._idle.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that left is no news
            super().handle_error(request, client_address)
