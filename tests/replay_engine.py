"""Answers as a real engine did: `tests/peers/served_*.json`, of `python -m mtplab.bench engines --record`.

It answers each completion that was recorded, and no other; its metrics are those that the engine showed after as many.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mtplab.bench.engines.heard import Heard


class ReplayEngine:
    """Serves until it is closed. `url` is where; `wrong`: what was asked of it that the engine was not."""

    def __init__(self, heard: Heard, metrics_path: str):
        self.heard, self.metrics_path, self.lock = heard, metrics_path, threading.Lock()
        self.answered = 0
        self.wrong: list[str] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._http.daemon_threads = True
        self._http.engine = self  # type: ignore[attr-defined]
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def completion(self, body: dict[str, Any]) -> Any | None:
        """The engine's answer to this very body."""
        with self.lock:
            for asked, answer in self.heard.completions:
                if asked == body:
                    self.answered += 1
                    return answer
            self.wrong.append(json.dumps(body))
            return None

    def metrics(self) -> str:
        """As they were after as many completions as have been answered, or the last that were looked at before."""
        with self.lock:
            return self.heard.looks[max(n for n in self.heard.looks if n <= self.answered)]

    def __enter__(self) -> ReplayEngine:
        return self

    def __exit__(self, *problem: Any) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: Any) -> None:
        """Nothing on stderr."""

    def _send(self, status: int, text: str) -> None:
        raw = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        engine = self.server.engine
        if self.path == engine.metrics_path:
            return self._send(200, engine.metrics())
        return self._send(*engine.heard.about.get(self.path, (404, "")))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = self.server.engine.completion(body)
        return self._send(400, "not recorded") if answer is None else self._send(200, json.dumps(answer))
