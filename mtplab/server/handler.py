"""HTTP: from a path to what answers it, every answer with its length, errors in OpenAI's form.

Knows nothing of models: a service answers.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

from mtplab import __version__
from mtplab.server.asked import Refused, read_body
from mtplab.server.counts import CONTENT_TYPE_LATEST
from mtplab.server.listener import Listener
from mtplab.server.service import ClientGone, Service

__all__ = ["Handler"]

MAX_BODY = 8 << 20
# read and thrown away of a body that is too large, so that its sender gets to read why
_MAX_DRAINED = 4 * MAX_BODY
_JSON = "application/json"


class Handler(BaseHTTPRequestHandler):
    """One connection, for as long as its client keeps it."""

    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds for a client that stops in the middle, or says nothing more
    disable_nagle_algorithm = True
    server: Listener

    def version_string(self) -> str:
        return f"mtplab/{__version__}"

    def log_message(self, *arguments: Any) -> None:
        """Says nothing: who asks gets every error."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server refuses by itself (a line that is no HTTP, a method nobody knows), in our form."""
        status = 405 if code == 501 else int(code)
        self.close_connection = True
        refused = Refused(status, message or self.responses.get(code, ("refused",))[0])
        self._send(status, json.dumps(refused.body()).encode(), _JSON, {"Connection": "close"})

    def answer(self) -> None:
        """Any request there is."""
        self.server.busy(+1)
        try:
            try:
                self._send(200, *self._found())
            except Refused as problem:
                self._refuse(problem)
            except (ClientGone, OSError):
                self.close_connection = True
            except Exception as problem:
                said = f"{type(problem).__name__}: {self.server.service.said(problem)}"
                self._refuse(Refused(500, said, "internal_error"))
        except OSError:  # left while it was told why not
            self.close_connection = True
        finally:
            self.server.busy(-1)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = answer

    def _refuse(self, problem: Refused) -> None:
        headers = {"WWW-Authenticate": "Bearer"} if problem.status == 401 else {}
        if problem.status == 405:
            headers["Allow"] = _ROUTES[self._path()][0]
        if self.close_connection:
            headers["Connection"] = "close"
        self._send(problem.status, json.dumps(problem.body()).encode(), _JSON, headers)

    def _path(self) -> str:
        return self.path.partition("?")[0]

    def _found(self) -> tuple[bytes, str]:
        """The answer's body and its type. Raises Refused."""
        path, data = self._path(), self._body()
        if (path.startswith("/v1/") or path == "/tokenize") and not self.server.allows(self.headers["Authorization"]):
            raise Refused(401, "this server asks for its key: Authorization: Bearer KEY", "invalid_api_key")
        if path not in _ROUTES:
            raise Refused(404, f"there is no {path!r:.120} here; expected {', '.join(_ROUTES)}", "not_found")
        method, respond = _ROUTES[path]
        if self.command != method:
            raise Refused(405, f"{path} is asked with {method}, not {self.command}", "method_not_allowed")
        found = respond(self.server.service, data, self._gone)
        return (found, CONTENT_TYPE_LATEST) if isinstance(found, bytes) else (json.dumps(found).encode(), _JSON)

    def _body(self) -> bytes:
        """What was sent, all of it: the next request of the connection begins after it. Raises Refused, ClientGone."""
        if self.headers["Transfer-Encoding"] is not None:
            self.close_connection = True
            raise Refused(411, "a body in chunks is not read here; send it with Content-Length", "length_required")
        told = set(self.headers.get_all("Content-Length", ["0"]))
        length = told.pop().strip()
        if told or not (length.isascii() and length.isdecimal()):
            self.close_connection = True
            raise Refused(400, f"Content-Length is {length!r:.60}; expected one whole number", "invalid_length")
        size = int(length[:20])
        if size > MAX_BODY:
            self.close_connection = True
            self._drain(min(size, _MAX_DRAINED))
            raise Refused(413, f"the body has {size} bytes; expected at most {MAX_BODY}", "too_large")
        data = self.rfile.read(size)
        if len(data) < size:
            raise ClientGone
        return data

    def _drain(self, size: int) -> None:
        while size > 0 and (part := self.rfile.read(min(size, 1 << 16))):
            size -= len(part)

    def _gone(self) -> bool:
        """Whether the client has closed its side, found without waiting and without taking what it may have sent."""
        self.connection.settimeout(0)
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self.connection.settimeout(self.timeout)

    def _send(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _health(service: Service) -> dict[str, Any]:
    if service.stopping:
        raise Refused(503, "the server is stopping", "stopping")
    return {"status": "ok"}


# path: the method it is asked with, and what answers a body, of a client of whom the last argument says whether it left
_ROUTES: dict[str, tuple[str, Callable[[Service, bytes, Callable[[], bool]], Any]]] = {
    "/v1/completions": ("POST", lambda service, body, gone: service.complete(read_body(body), gone)),
    "/v1/models": ("GET", lambda service, *_: service.models()),
    "/tokenize": ("POST", lambda service, body, gone: service.tokenize(read_body(body))),
    "/health": ("GET", lambda service, *_: _health(service)),
    "/version": ("GET", lambda *_: {"version": __version__}),
    "/server_info": ("GET", lambda service, *_: service.info()),
    "/metrics": ("GET", lambda service, *_: service.counts.text()),
}
