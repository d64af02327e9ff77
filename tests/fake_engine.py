"""A server of a few lines that speaks as vLLM does, counts truly, and fails as it is told to: for tests of asking.

Its greedy text is a function of the prompt, and draft j of slot t is right when (t + j) % 4 != 0, as in `study_fakes`.
A `fault` is called with (server, number of the completion, handler) before a completion is answered; what it returns
True for it has answered itself.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VERSION = "0.32.0"
Fault = Callable[["FakeEngine", int, "Handler"], bool]


def rounds_of(tokens: int, depth: int) -> list[int]:
    """Accepted drafts of each round, those beyond the end among them, as vLLM counts."""
    found, slot = [], 0
    while slot < tokens - 1:
        accepted = next((j for j in range(depth) if (slot + j + 1) % 4 == 0), depth)
        found.append(accepted)
        slot += accepted + 1
    return found


class FakeEngine:
    """Serves until it is closed. `url` is where; counters are attributes, so that a test can spoil them."""

    def __init__(self, depth: int = 3, fault: Fault | None = None, key: str | None = None, own: bool = False):
        self.depth, self.fault, self.key, self.own = depth, fault, key, own
        self.lock = threading.Lock()
        self.begun = self.running = self.most = self.metrics_read = 0
        self.started = time.time()
        self.zero()
        self.delay = 0.0
        self.metrics: str | None = None  # in place of the text, where a test gives one
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.engine = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def zero(self) -> None:
        """Counters as they are when a server starts."""
        self.requests = self.prompt_tokens = self.generated = self.rounds = self.drafted = self.accepted = 0
        self.places = [0] * self.depth

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def count(self, prompt: int, tokens: int) -> list[int]:
        """A request into the counters; the accepted drafts of its rounds."""
        rounds = rounds_of(tokens, self.depth) if self.depth else []
        with self.lock:
            self.requests += 1
            self.prompt_tokens += prompt
            self.generated += tokens
            self.rounds += len(rounds)
            self.drafted += self.depth * len(rounds)
            self.accepted += sum(rounds)
            for j in range(self.depth):
                self.places[j] += sum(each > j for each in rounds)
        return rounds

    def close(self) -> None:
        """No connection is taken any more."""
        self._http.shutdown()
        self._http.server_close()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *problem: Any) -> None:
        self.close()

    def exposition(self) -> str:
        """Its figures."""
        if self.metrics is not None:
            return self.metrics
        lines = [f"process_start_time_seconds {self.started}"]
        totals = {"request_success": self.requests, "prompt_tokens": self.prompt_tokens}
        totals |= {"generation_tokens": self.generated}
        if self.depth:
            totals |= {"spec_decode_num_drafts": self.rounds, "spec_decode_num_draft_tokens": self.drafted}
            totals |= {"spec_decode_num_accepted_tokens": self.accepted}
        for name, value in totals.items():
            lines += [f"# TYPE vllm:{name}_total counter", f'vllm:{name}_total{{engine="0"}} {float(value)}']
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f'{name}{{engine="0",position="{j}"}} {float(count)}' for j, count in enumerate(self.places)]
        lines += [f'vllm:num_requests_running{{engine="0"}} {float(self.running)}']
        lines += ['vllm:num_requests_waiting{engine="0"} 0.0']
        lines += ['vllm:cache_config_info{cache_dtype="auto",engine="0"} 1.0']
        return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *words: Any) -> None:
        """Nothing on stderr."""

    def send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        """An answer: text, or JSON of anything else."""
        raw = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(raw)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        engine = self.server.engine
        if self.path == "/metrics":
            engine.metrics_read += 1
            return self.send(200, engine.exposition())
        if self.path == "/health":
            return self.send(200, "")
        if self.path == "/version":
            return self.send(200, {"version": VERSION})
        if engine.key and self.headers.get("Authorization") != f"Bearer {engine.key}":
            return self.send(401, {"error": {"message": f"not {self.headers.get('Authorization')}"}})
        if self.path == "/v1/models":
            return self.send(200, {"data": [{"id": "fake"}]})
        return self.send(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        engine = self.server.engine
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if engine.key and self.headers.get("Authorization") != f"Bearer {engine.key}":
            return self.send(401, {"error": {"message": f"not {self.headers.get('Authorization')}"}})
        if self.path == "/tokenize":
            return self.send(200, {"tokens": [ord(sign) for sign in asked["prompt"]]})
        with engine.lock:
            engine.begun += 1
            number = engine.begun
            engine.running += 1
            engine.most = max(engine.most, engine.running)
        try:
            time.sleep(engine.delay)
            if engine.fault is not None and engine.fault(engine, number, self):
                return None
            answer = self.answer(engine, asked)
        finally:
            with engine.lock:
                engine.running -= 1
        return self.send(200, answer)

    @staticmethod
    def answer(engine: FakeEngine, asked: dict[str, Any]) -> dict[str, Any]:
        """A completion, counted."""
        tokens = asked["max_tokens"]
        ids = [(sum(asked["prompt"]) * 7 + at) % 101 for at in range(tokens)]
        rounds = engine.count(len(asked["prompt"]), tokens)
        body: dict[str, Any] = {
            "choices": [{"index": 0, "text": "x", "finish_reason": "length", "token_ids": ids}],
            "usage": {"prompt_tokens": len(asked["prompt"]), "completion_tokens": tokens},
        }
        if engine.own and engine.depth:
            spec = {"per_step_accepted": rounds, "per_step_drafted": [engine.depth] * len(rounds)}
            body["metrics"] = {"speculative_decoding": spec}
        return body


def in_a_thread(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine gives in an event loop of its own, where this thread has one that runs too (a browser's)."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
