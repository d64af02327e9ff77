"""What a speculative round takes on a GPU, from a roofline of its operations: a model, not a measurement.

A round at depth k verifies k + 1 tokens of each of b sequences, and drafts k: once over the k + 1 slots that were just
verified, then k − 1 times over one slot a sequence. A head with a layer per depth reads, in each of its k steps, those
slots and the k − 1 before them, whose later tokens were drafts until now (`models/head.py`). Each product takes a fixed
latency and then its bytes at the rate of the memory or its operations at that of the matrix unit, whichever is longer
(Williams, Waterman, Patterson, 2009).
What no datasheet has (latencies, what kernels reach of the limits) are `Constants`, which a measurement can replace.

Left out: prompts, embedding rows, router imbalance, what overlaps on other streams, batches that change. Knows no
acceptance; `advice.py` sets what a round gives against what it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from mtplab.errors import ConfigError
from mtplab.quant.policy import POLICIES, resolve_policy
from mtplab.study.gpus import Gpu
from mtplab.study.model_sizes import Attention, Format, ModelSizes, Weights

__all__ = ["ASSUMED", "BINDS", "CACHES", "Constants", "RoundCost", "Setting", "round_cost"]

MOST_BATCH, MOST_CONTEXT, MOST_DEPTH, MOST_RANKS = 1 << 16, 1 << 24, 64, 1 << 10

# cache policies that cost what their bytes do
CACHES = tuple(name for name in POLICIES if name != "turboquant")

# what the time of a round goes to: each second of it is counted under one of these
BINDS = {
    "weights": "the layers' products",
    "experts": "the experts' products",
    "cache": "attention over the cache",
    "state": "the recurrent states",
    "head": "the output head",
    "link": "exchange between GPUs",
    "latency": "latency of kernels",
    "host": "the host",
}


@dataclass(frozen=True)
class Constants:
    """What kernels and hosts make of a GPU. Shares are of the datasheet's rate; times are seconds."""

    bandwidth: float = 0.8  # share of the memory bandwidth that products of few rows reach
    cache_bandwidth: float = 0.6  # the same, of attention over a cache
    state_bandwidth: float = 0.6  # the same, of the delta rule
    compute: float = 0.65  # share of the matrix unit's rate that large products reach
    # DeepGEMM's first table: 64 × 2112 × 7168 at 206 TFLOP/s on an H800 takes 9.4 µs; 15.4 MB at 3.35 TB/s take 4.6
    product_latency: float = 5e-6
    small_latency: float = 2.5e-6  # a norm, an activation, a permutation inside a CUDA graph
    link_latency: float = 10e-6  # an all-reduce of few tokens over NVLink or Infinity Fabric
    pcie_latency: float = 30e-6  # the same over PCIe
    host: float = 100e-6  # scheduling and sampling on the host that no graph hides, once a round

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Constants:
        """The defaults with some replaced. Raises ConfigError for an unknown name or a value out of range."""
        known = {item.name for item in fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise ConfigError(f"constant {name!r:.60} is unknown; expected some of {', '.join(sorted(known))}")
            number = isinstance(value, int | float) and not isinstance(value, bool) and value == value
            share = "bandwidth" in name or name == "compute"
            if not number or not ((0 < value <= 1.05) if share else (0 <= value <= 1)):
                wanted = "a share above 0 and up to 1" if share else "seconds from 0 to 1"
                raise ConfigError(f"{name} is {value!r:.60}; expected {wanted}")
        return replace(cls(), **dict(values))


ASSUMED = Constants()


@dataclass(frozen=True)
class Setting:
    """A model as it is served. Raises ConfigError for what cannot be.

    `tp` GPUs share every layer; `cache` is the target's and the draft's `quant_policy`; `state_number` is the bytes of
    one number of a recurrent state (float32 as models have it; some engines keep BF16).
    """

    sizes: ModelSizes
    weights: Weights
    gpu: Gpu
    tp: int = 1
    cache: str = "none"
    state_number: float = 4
    constants: Constants = ASSUMED
    measured: Mapping[str, str] = field(default_factory=dict, compare=False)  # constant → what measured it

    def __post_init__(self) -> None:
        _whole("tp", self.tp, 1, MOST_RANKS)
        self.sizes.attention.cache_bytes(self.cache)  # which checks it
        if any(side.storage.name not in CACHES for side in resolve_policy(self.cache).sides):
            raise ConfigError(
                f"quant_policy {self.cache!r:.60}: the cost model knows the bytes of a cache, and nothing of the time "
                f"that turboquant's rotation takes; use {', '.join(CACHES)}"
            )
        if self.sizes.attention.heads % self.tp:
            raise ConfigError(
                f"tp is {self.tp}; expected a divisor of the {self.sizes.attention.heads} attention heads of "
                f"{self.sizes.name}"
            )

    def held_bytes(self, batch: int, context: float, depth: int) -> float:
        """Bytes on one GPU: weights, the caches of `batch` sequences, their states and the states kept for drafts."""
        s = self.sizes
        cache = (s.attention_layers + s.draft_layers) * s.attention.cache_bytes(self.cache, self.tp) * context
        state = 0.0 if s.delta is None else s.delta_layers * s.delta.state_bytes(self.state_number) / self.tp
        return self.weights.nbytes(s) / self.tp + batch * (cache + (1 + depth) * state)

    def fits(self, batch: int, context: float, depth: int) -> bool:
        """Whether that is at most 92 % of the GPU's memory: activations and graphs want the rest."""
        return self.held_bytes(batch, context, depth) <= 0.92e9 * self.gpu.memory


@dataclass(frozen=True)
class RoundCost:
    """Seconds of one round, and where they go: `parts` by the keys of `BINDS`, adding up to `seconds`; `arithmetic` is
    what of each part the matrix unit bounds and not the memory; `draft` is what of it all the draft steps take."""

    seconds: float
    draft: float
    parts: Mapping[str, float]
    arithmetic: Mapping[str, float]

    @property
    def binds(self) -> str:
        """The largest part's key."""
        return max(self.parts, key=self.parts.__getitem__)

    def words(self, part: str) -> str:
        """A part's name, and whether arithmetic bounds most of it."""
        bound = self.arithmetic[part] > self.parts[part] / 2 > 0
        return BINDS[part] + (" (bound by arithmetic)" if bound else "")


def round_cost(setting: Setting, batch: int, context: int, depth: int) -> RoundCost:
    """One round of `batch` sequences that hold `context` tokens each, at a depth (0: plain decoding).

    Raises ConfigError for a number out of range.
    """
    _whole("batch", batch, 1, MOST_BATCH)
    _whole("context", context, 1, MOST_CONTEXT)
    _whole("depth", depth, 0, MOST_DEPTH)
    target, draft = _Sum(setting), _Sum(setting)
    _verify(target, batch, depth + 1, context)
    if setting.sizes.draft_layers > 1:
        for _ in range(depth):
            _draft(draft, batch, 2 * depth, context)
    elif depth:
        _draft(draft, batch, depth + 1, context)
        for step in range(2, depth + 1):
            _draft(draft, batch, 1, context + step)
    parts = {key: target.parts[key] + draft.parts[key] for key in BINDS}
    parts["host"] = setting.constants.host
    arithmetic = {key: target.arithmetic[key] + draft.arithmetic[key] for key in BINDS}
    return RoundCost(sum(parts.values()), sum(draft.parts.values()), parts, arithmetic)


class _Sum:
    """Adds up operations. Knows how long one takes, not which there are."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.c, self.gpu, self.tp = setting, setting.constants, setting.gpu, setting.tp
        self.parts = dict.fromkeys(BINDS, 0.0)
        self.arithmetic = dict.fromkeys(BINDS, 0.0)
        self._memory = 1e12 * self.gpu.bandwidth

    def product(self, part: str, rows: float, count: float, form: Format, times: int = 1, read: float | None = None,
                width: float = 0.0) -> None:  # fmt: skip
        """`rows` rows times `count` parameters, `times` over; `read`: parameters read if not all, or more than `count`;
        `width`: features a row reads and writes, in BF16."""
        nbytes = ((count if read is None else read) * form.nbytes + 2 * rows * width) / self.tp
        memory = nbytes / (self._memory * self.c.bandwidth)
        compute = 2 * rows * count / self.tp / (1e12 * self.gpu.rate(form.rate) * self.c.compute)
        self._take(part, memory, compute, times)

    def move(self, part: str, nbytes: float, share: float, operations: float = 0.0, times: int = 1) -> None:
        """A kernel that reads and writes `nbytes` on each rank, with BF16 operations."""
        memory = nbytes / (self._memory * share)
        compute = operations / (1e12 * self.gpu.bf16 * self.c.compute)
        self._take(part, memory, compute, times)

    def _take(self, part: str, memory: float, compute: float, times: int) -> None:
        self.parts["latency"] += times * self.c.product_latency
        self.parts[part] += times * max(memory, compute)
        if compute > memory:
            self.arithmetic[part] += times * compute

    def small(self, times: int) -> None:
        self.parts["latency"] += times * self.c.small_latency

    def reduce(self, rows: float, times: int = 1) -> None:
        """All-reduce of BF16 rows; nothing on one GPU."""
        if self.tp > 1:
            latency = self.c.link_latency if self.gpu.fast_link else self.c.pcie_latency
            moved = 2 * (self.tp - 1) / self.tp * 2 * rows * self.setting.sizes.hidden
            self.parts["link"] += times * (latency + moved / (1e9 * self.gpu.link))


def _verify(out: _Sum, batch: int, queries: int, context: int) -> None:
    s, w = out.setting.sizes, out.setting.weights
    rows = batch * queries
    out.small(1)
    _attention(out, s.attention, w.mixer, batch, queries, context, s.attention_layers)
    if s.delta is not None:
        for count in s.delta.parameters(s.hidden).values():
            out.product("weights", rows, count, w.mixer, s.delta_layers, width=2 * s.hidden)
        # the state is read once, and written after each token so that a rejection can go back to it
        state = (1 + queries) * batch * s.delta.state_bytes(out.setting.state_number) / out.tp
        out.move("state", state, out.c.state_bandwidth, times=s.delta_layers)
        out.small(3 * s.delta_layers)  # norm, convolution, gated norm
        out.reduce(rows, s.delta_layers)
    dense = s.layers - s.expert_layers
    if dense:
        _mlp(out, w.mlp, rows, s.inner, dense)
    if s.experts is not None:
        _experts(out, w.mlp, w.experts, rows, s.expert_layers)
    _head(out, w.head, rows)


def _draft(out: _Sum, batch: int, queries: int, context: int) -> None:
    """One pass of the MTP head over `queries` slots a sequence; its output head reads one slot of each."""
    s, w = out.setting.sizes, out.setting.weights
    rows = batch * queries
    out.small(3)  # embedding and the two norms before fc
    out.product("weights", rows, 2 * s.hidden**2, w.fc, width=3 * s.hidden)
    out.reduce(rows)
    _attention(out, s.attention, w.draft_mixer, batch, queries, context, 1)
    if s.experts is None:
        _mlp(out, w.draft_mlp, rows, s.inner, 1)
    else:
        _experts(out, w.draft_mlp, w.draft_experts, rows, 1)
    _head(out, w.head, batch)


def _attention(
    out: _Sum, attention: Attention, form: Format, batch: int, queries: int, context: int, layers: int
) -> None:
    hidden, rows = out.setting.sizes.hidden, batch * queries
    for count in attention.parameters(hidden).values():
        out.product("weights", rows, count, form, layers, width=2 * hidden)
    cache = batch * context * attention.cache_bytes(out.setting.cache, out.tp)
    out.move("cache", cache, out.c.cache_bandwidth, rows * attention.operations(context) / out.tp, layers)
    out.small(3 * layers)  # norm, rotation and writing of the cache, merging of split contexts
    out.reduce(rows, layers)


def _mlp(out: _Sum, form: Format, rows: int, inner: int, layers: int) -> None:
    hidden = out.setting.sizes.hidden
    out.product("weights", rows, 2 * hidden * inner, form, layers, width=hidden + 2 * inner)
    out.product("weights", rows, hidden * inner, form, layers, width=hidden + inner)
    out.small(2 * layers)
    out.reduce(rows, layers)


def _experts(out: _Sum, shared: Format, form: Format, rows: int, layers: int) -> None:
    hidden, e = out.setting.sizes.hidden, out.setting.sizes.experts
    assert e is not None
    touched = e.touched(rows)
    out.product("weights", rows, hidden * e.count * out.tp, _ROUTER, layers, width=hidden)  # every rank routes
    for wide in (2, 1):  # gate and up, down
        one = wide * hidden * e.inner
        out.product("experts", rows * e.top, one, form, layers, touched * one, hidden + wide * e.inner)
        if e.shared:
            out.product("weights", rows, wide * hidden * e.shared, shared, layers, width=hidden + wide * e.shared)
    out.small(5 * layers)  # norm, choice of experts, permutation, activation, sum
    out.reduce(rows, layers)


def _head(out: _Sum, form: Format, rows: int) -> None:
    s = out.setting.sizes
    out.product("head", rows, s.hidden * s.vocabulary, form, width=s.hidden + s.vocabulary)
    # float32 logits are written and read for the choice of a token
    out.move("head", 8 * rows * s.vocabulary / out.tp, out.c.bandwidth)
    out.small(3)
    out.reduce(rows)


_ROUTER = Format("bf16", 2.0, "bf16")


def _whole(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r:.60}; expected a whole number from {low} to {high}")
