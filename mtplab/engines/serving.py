"""The two ends of using a server: how a point gets one (`Serving`), and one that answers (`Running`).

`ServerSlot` holds one at a time. Knows neither how servers are started nor how they are asked.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mtplab.config import SamplingConfig
from mtplab.engines.measured import Measured
from mtplab.errors import MtplabError

__all__ = ["Progress", "Running", "ServerSlot", "Serving"]


class Progress(Protocol):
    """How far a measurement is, as the runner tells it of its own."""

    tokens_done: int
    tokens_total: int


class Running(Protocol):
    """A server that answers."""

    def measure(
        self,
        prompts: Sequence[Sequence[int]],
        domains: Sequence[str],
        depth: int,
        sampling: SamplingConfig,
        cancel: Any,
        on_progress: Callable[[Progress], None] | None,
    ) -> Measured:
        """All prompts, counted domain by domain or one by one. Raises MtplabError where it cannot be, and within the
        limits it was given; nothing is left under way then."""

    def alive(self) -> bool:
        """Whether it may still be measured: False where what was started has ended, or can count no more."""

    def close(self) -> None:
        """Lets go of it; what was started for it is gone when this returns."""


class Serving(Protocol):
    """How a point at one depth gets its server; picklable. `key` is equal for points that can share one."""

    key: str

    def open(self, cancel: Any) -> Running:
        """A server that answers. Raises MtplabError where there is none within the limits."""


class ServerSlot:
    """Holds one server: asking for another ends the one before. What could not be had is not tried again for the same
    key, so that a sweep does not wait for it at every point."""

    def __init__(self) -> None:
        self.key: str | None = None
        self._running: Running | None = None
        self._failed: dict[str, str] = {}

    def get(self, serving: Serving, cancel: Any) -> tuple[Running, float]:
        """The server, and the seconds that getting it took (0.0 when it was there)."""
        if self.key == serving.key and self._running is not None and self._running.alive():
            return self._running, 0.0
        self.close()
        if serving.key in self._failed:
            raise MtplabError(self._failed[serving.key])
        started = time.monotonic()
        try:
            self._running = serving.open(cancel)
        except MtplabError as problem:
            self._failed[serving.key] = str(problem)
            raise
        self.key = serving.key
        return self._running, time.monotonic() - started

    def close(self) -> None:
        """Ends what is held."""
        running, self._running, self.key = self._running, None, None
        if running is not None:
            with contextlib.suppress(MtplabError):
                running.close()
