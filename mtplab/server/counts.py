"""What the server has done, as Prometheus reads it: vLLM's counters under the prefix `mtplab:`.

As in vLLM each prompt of a completion is a request. Unlike vLLM's, accepted tokens that the end of a sequence cut off
are not counted (`decode/stats.py`), and a request that was cancelled counts as nothing. Plain decoding drafts nothing:
at depth 0 there are no samples of speculation. Counts what it is told; knows nothing of models or HTTP.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from mtplab.decode import AcceptanceStats

__all__ = ["CONTENT_TYPE_LATEST", "Counts"]


class Counts:
    """Counters and gauges of one server at one depth. Everything in one scrape is of one moment."""

    def __init__(self, depth: int):
        self._lock = threading.Lock()
        self._speculation = AcceptanceStats.of(depth, ())
        self._succeeded = self._prompt_tokens = self._generated_tokens = 0
        self._waiting = self._running = 0
        # of this server, not of the process, which may hold several: what a reader wants is when counting began
        self._started = time.time()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def queued(self, prompts: int) -> None:
        """So many prompts wait for their turn."""
        with self._lock:
            self._waiting += prompts

    def unqueued(self, prompts: int) -> None:
        """They wait no longer, and never ran."""
        with self._lock:
            self._waiting -= prompts

    def began(self, prompts: int) -> None:
        """They are run."""
        with self._lock:
            self._waiting -= prompts
            self._running += prompts

    def failed(self, prompts: int) -> None:
        """They were run, and nothing came of it."""
        with self._lock:
            self._running -= prompts

    def finished(
        self, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], stats: AcceptanceStats
    ) -> None:
        """They were run: their ids, what was generated after each, and the acceptance of all."""
        with self._lock:
            self._running -= len(prompts)
            self._succeeded += len(prompts)
            self._prompt_tokens += sum(map(len, prompts))
            self._generated_tokens += sum(map(len, tokens))
            self._speculation += stats

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client asks a collector for."""
        with self._lock:
            counters = self._speculation.counters()
            totals = {
                "request_success": ("Prompts answered.", self._succeeded),
                "prompt_tokens": ("Tokens of the prompts that were answered.", self._prompt_tokens),
                "generation_tokens": ("Tokens generated, EOS counted.", self._generated_tokens),
            }
            gauges = {
                "mtplab:num_requests_running": ("Prompts that are run now.", self._running),
                "mtplab:num_requests_waiting": ("Prompts that wait for their turn.", self._waiting),
                "process_start_time_seconds": ("When this server began to count, in Unix seconds.", self._started),
            }
        if self._speculation.depth:
            per_position = CounterMetricFamily(
                "mtplab:spec_decode_num_accepted_tokens_per_pos",
                "Rounds in which the drafts up to this position, counted from 0, were all accepted.",
                labels=["position"],
            )
            for position, count in enumerate(counters["num_accepted_tokens_per_pos"]):
                per_position.add_metric([str(position)], count)
            yield per_position
            totals |= {
                "spec_decode_num_drafts": ("Rounds.", counters["num_drafts"]),
                "spec_decode_num_draft_tokens": ("Tokens drafted.", counters["num_draft_tokens"]),
                "spec_decode_num_accepted_tokens": (
                    "Drafts accepted and emitted; bonus tokens are not among them.",
                    counters["num_accepted_tokens"],
                ),
            }
        for name, (meaning, value) in totals.items():
            yield CounterMetricFamily(f"mtplab:{name}", meaning, value)
        for name, (meaning, value) in gauges.items():
            yield GaugeMetricFamily(name, meaning, value)
