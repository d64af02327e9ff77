"""A client for tests of `mtplab serve`: one question at a time over HTTP, and what must hold of every answer.

Knows nothing of what a server should say; the tests do.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

REPO = Path(__file__).resolve().parent.parent
PROMPTS = ["Once upon a time", "def add(a, b):"]
GREEDY = {"temperature": 0, "return_token_ids": True}
# more than a test waits for
LONG = {"prompt": PROMPTS, "max_tokens": 3900, "ignore_eos": True, "temperature": 1.0}


class Answer:
    """One response. None may tell where on this machine anything is."""

    def __init__(self, response: http.client.HTTPResponse):
        self.status, self.headers, self.raw = response.status, response.headers, response.read()
        assert str(REPO).encode() not in self.raw and b"/tmp" not in self.raw and b"site-packages" not in self.raw
        assert int(self.headers["Content-Length"]) == len(self.raw) or not self.raw

    @property
    def json(self) -> dict:
        assert self.headers["Content-Type"] == "application/json"
        return json.loads(self.raw)

    def refused(self, status: int, says: str) -> None:
        error = self.json["error"]
        assert self.status == status, error
        assert sorted(error) == ["code", "message", "type"] and error["type"] and error["code"]
        assert says in error["message"] and error["message"].isprintable()


def ask(server, path: str, body=None, method: str | None = None, **headers: str) -> Answer:
    """Asks a server (or its URL) one thing, over a connection of its own."""
    url = server if isinstance(server, str) else server.url
    with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)) as connection:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method or ("GET" if body is None else "POST"), path, data, headers)
        return Answer(connection.getresponse())


def metrics(server) -> dict[str, float]:
    """A server's samples, positions as `name[0]`."""
    answer = ask(server, "/metrics")
    assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/plain")
    found = [s for family in text_string_to_metric_families(answer.raw.decode()) for s in family.samples]
    return {s.name + "".join(f"[{p}]" for p in s.labels.values()): s.value for s in found}


def same(answer: Answer, expected, depth: int) -> None:
    """The answer is what `generate` gave."""
    assert answer.status == 200, answer.raw
    choices = answer.json["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(expected.tokens)))
    assert [choice["token_ids"] for choice in choices] == expected.tokens
    assert [choice["text"] for choice in choices] == expected.texts
    counts = [
        {
            "rounds": s.rounds,
            "drafted": s.drafted,
            "accepted": s.accepted,
            "per_position": list(s.accepted_per_position),
        }
        for s in expected.per_prompt
    ]
    assert [choice["spec_decode"] for choice in choices] == (counts if depth else [None] * len(counts))


def raw(server, sent: bytes) -> bytes:
    """What comes back for these bytes, until the server closes or says nothing for a second."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=1) as connection:
        connection.sendall(sent)
        found = b""
        try:
            while part := connection.recv(65536):
                found += part
        except TimeoutError:
            pass
        return found


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Waits for it."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)
