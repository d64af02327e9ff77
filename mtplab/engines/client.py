"""Asking one server over HTTP: bounded in time, in size and in attempts, and the key never shown.

What a server says is never trusted: bodies are read up to a limit and the key is cut out of them before anything else
is done; texts of errors are made printable and cut. Knows no engine and no meaning of what is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from mtplab.engines.clean import hides, loopback
from mtplab.errors import MtplabError, printable

__all__ = ["Broken", "Client", "Exchange", "PutOff", "Refused", "Unreachable", "overheard"]

MAX_BODY = 64 << 20  # bytes of an answer
MAX_SAID = 300  # characters of a server's own words in an error
# nothing was done: the server did not take the request
_LATER = (429, 503)
_PATIENCE = 10.0  # seconds, at most, between two tries


class Refused(MtplabError):
    """The server will not do this: another try would be refused alike."""


class Broken(MtplabError):
    """A request failed on its way: whether the server worked at it, and counted it, cannot be known."""


class PutOff(Broken):
    """The server took no request in all attempts; it did nothing."""


@dataclass(frozen=True)
class Exchange:
    """A request to the server at `address` and its whole answer; `body` is None for a GET. No key is in it."""

    address: str
    path: str
    body: Mapping[str, Any] | None
    status: int
    text: str


_listeners: list[Callable[[Exchange], None]] = []


@contextlib.contextmanager
def overheard(take: Callable[[Exchange], None]) -> Iterator[None]:
    """Gives `take` every exchange of this process's clients that ends while this lasts, from the thread it ends in: for
    keeping what servers really answer."""
    _listeners.append(take)
    try:
        yield
    finally:
        _listeners.remove(take)


class Client:
    """One server. Use as an async context manager, in one event loop.

    Args:
        address: without a slash at its end.
        key: of its API, None where it asks for none.
        connections: at once.
        seconds: of one request, from its start to its answer's end.
        attempts: at most, for what the server put off (429, 503, no connection).
    """

    def __init__(self, address: str, key: str | None, connections: int = 1, seconds: float = 30.0, attempts: int = 3):
        self.address, self.seconds, self.attempts = address, seconds, attempts
        self._hide = hides([] if key is None else [key])
        self._http = httpx.AsyncClient(
            # nothing packed: what unpacks to gigabytes would be unpacked before any limit is looked at
            headers={"Accept-Encoding": "identity", **({} if key is None else {"Authorization": f"Bearer {key}"})},
            timeout=httpx.Timeout(seconds, connect=min(seconds, 10.0)),
            limits=httpx.Limits(max_connections=connections + 1),
            follow_redirects=False,  # the key is for this server
            trust_env=not loopback(address),  # a proxy knows nothing of this machine's own ports
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *problem: Any) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> tuple[int, str]:
        """(status, text) of what lies at a path, whatever the status. Raises Broken where there is no answer."""
        status, text, _ = await self._send("GET", path, None)
        return status, text

    async def get_json(self, path: str) -> Any:
        """The JSON at a path; None where the server has nothing there. Raises Broken, Refused."""
        status, text = await self.get(path)
        if status in (404, 405, 501):
            return None
        self._check(status, text, path)
        return self._json(text, path)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that a body is answered with; what the server puts off is tried again. Raises PutOff where it does
        in every attempt, Broken, Refused."""
        for attempt in range(1, self.attempts + 1):
            try:
                status, text, after = await self._send("POST", path, body)
                if status not in _LATER:
                    self._check(status, text, path)
                    return self._json(text, path)
                why = f"{self.address}{path}: status {status} ({self._said(_message(text))})"
            except Unreachable as problem:
                why, after = str(problem), None
            if attempt < self.attempts:
                await asyncio.sleep(_wait(attempt, after))
        raise PutOff(why + (f", {self.attempts} times in all" if self.attempts > 1 else ""))

    async def _send(self, verb: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, str, str | None]:
        """(status, text, Retry-After), no key in the text."""
        try:
            # httpx's limits are between two bytes; a server that drips would never reach them
            async with asyncio.timeout(self.seconds):
                async with self._http.stream(verb, self.address + path, json=body) as answer:
                    packed = answer.headers.get("content-encoding", "identity").strip().lower()
                    if packed not in ("", "identity"):
                        raise Broken(
                            f"{self.address}{path}: an answer in {printable(packed)[:40]}, which was not asked for; "
                            "take the proxy away that packs it"
                        )
                    parts, size = [], 0
                    async for part in answer.aiter_raw():
                        size += len(part)
                        if size > MAX_BODY:
                            raise Broken(f"{self.address}{path}: an answer of more than {MAX_BODY} bytes")
                        parts.append(part)
                    text = self._hide(b"".join(parts).decode("utf-8", errors="replace"))
                    for take in _listeners:
                        take(Exchange(self.address, path, body, answer.status_code, text))
                    return answer.status_code, text, answer.headers.get("retry-after")
        except TimeoutError:
            raise Broken(f"{self.address}{path}: no answer within {self.seconds:g} s") from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as problem:
            raise Unreachable(f"{self.address}: cannot be reached ({self._said(problem)})") from None
        except httpx.TimeoutException:
            raise Broken(f"{self.address}{path}: no answer within {self.seconds:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as problem:
            raise Broken(f"{self.address}{path}: the answer broke off ({self._said(problem)})") from None

    def _check(self, status: int, text: str, path: str) -> None:
        if status == 200:
            return
        said = self._said(_message(text))
        where = f"{self.address}{path}: status {status}"
        if status in (401, 403):
            raise Refused(f"{where}: it wants an API key, or another one ({said})")
        if 300 <= status < 400:
            raise Refused(f"{where}: it sends elsewhere, which is not followed; give that address")
        if status >= 500 or status in (408, *_LATER):
            raise Broken(f"{where} ({said})")
        raise Refused(f"{where} ({said})")

    def _json(self, text: str, path: str) -> Any:
        try:
            return json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            raise Broken(f"{self.address}{path}: half an answer, or none in JSON: {self._said(text[:80])!r}") from None

    def _said(self, what: object) -> str:
        """A server's words, or an error's, fit to be shown."""
        return printable(self._hide(str(what) or type(what).__name__))[:MAX_SAID]


class Unreachable(Broken):
    """No connection: nothing was asked."""


def _message(text: str) -> str:
    """What an error's body says, as OpenAI's or FastAPI's has it, else its beginning."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text[:MAX_SAID]
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    return found if isinstance(found, str) else text[:MAX_SAID]


def _no_constant(name: str) -> float:
    raise ValueError(name)


def _wait(attempt: int, after: str | None) -> float:
    """Seconds before the next try: what the server asks for, or twice as long each time, within bounds."""
    try:
        asked = float(after) if after is not None else math.nan
    except ValueError:
        asked = math.nan
    return min(_PATIENCE, max(0.0, asked)) if math.isfinite(asked) else min(_PATIENCE, 0.25 * 2**attempt)
