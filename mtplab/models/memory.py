"""What a model will take in memory, before it is loaded: weights by part and dtype, caches, and whether that fits.

From headers and config.json alone; no values are read, and on a CPU no torch is imported. How weights are held is
`held.py`'s to say, what the machine has `machine.py`'s.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any

from mtplab.checkpoint import Checkpoint, ModulePlan, Plan, open_checkpoint
from mtplab.checkpoint.config_json import stored_dtype
from mtplab.checkpoint.names import layer_of, module_of
from mtplab.checkpoint.text_table import aligned, as_bytes, html_table, printable
from mtplab.config import DTYPES, MAX_DEPTH, EngineConfig, SpecConfig
from mtplab.errors import CheckpointError, ConfigError
from mtplab.models.asked import check_exclusions, load_settings, plan_arguments
from mtplab.models.cache_fit import check_cache
from mtplab.models.config import config_of, vocabulary_head
from mtplab.models.held import DTYPE_BYTES, Held, held_weights, largest_product
from mtplab.models.machine import available_memory
from mtplab.models.spec import CacheRows, ModelConfig
from mtplab.quant.policy import QuantPolicy, resolve_policy

__all__ = ["Caches", "Memory", "Weights", "memory", "refuse_what_cannot_fit", "weights_in_memory"]

_COLUMNS, _RIGHT = ("what", "held in", "bytes"), ("bytes",)


@dataclass(frozen=True)
class Weights:
    """Weights as `load_model` holds them. `loading`: what it needs beside them at most, one matrix (bytes)."""

    device: str
    dtype: str  # computed in
    held: tuple[Held, ...]
    loading: int

    @property
    def nbytes(self) -> int:
        """All parts together."""
        return sum(each.nbytes for each in self.held)

    @property
    def at_most(self) -> int:
        """Where values do not fit the dtype that is expected, or a head's copies of the target's embedding and output
        matrix differ from them; only values say whether they do."""
        return sum(each.at_most for each in self.held)


@dataclass(frozen=True)
class Caches:
    """What a run of `batch` sequences of `context` tokens keeps, in bytes; a token's as deployed and as held here.

    Here a CPU keeps a quantised cache's codes and beside them the values read back, and an unquantised one in the dtype
    that is computed in; an engine keeps the codes alone, or BF16. `state`: the delta rule's, of a sequence, with a copy
    for every draft token that may be rejected. A layer with a window keeps every token here, and counts so as deployed
    too, where an engine may free what it has passed.
    """

    batch: int
    context: int
    depth: int
    policy: str
    draft_policy: str
    token: int
    deployed_token: int
    state: int

    @property
    def nbytes(self) -> int:
        """All sequences together."""
        return self.batch * (self.context * self.token + self.state)


@dataclass(frozen=True)
class Memory:
    """What `memory` found. `caches` is None and `why` says why for an architecture that mtplab does not run.

    Of a slice (`layers`) `stored` counts all the same what the files hold.

    `available` is None where the machine does not say, or has no such device; `source` says whose it is, or why not.
    `positions` are those the model has (max_position_embeddings), 0 where it is not run.
    """

    checkpoint: str
    weights: Weights
    caches: Caches | None
    why: str
    stored: int  # bytes of the files' tensors
    available: int | None
    source: str
    positions: int = 0

    @property
    def too_long(self) -> bool:
        """Whether the context is longer than the model has positions for, so that a run of it is refused."""
        return self.caches is not None and self.caches.context > self.positions > 0

    @property
    def needed(self) -> int:
        """Bytes at the worst moment: weights, and the larger of what loading and what the run needs beside them."""
        return self.weights.nbytes + max(self.weights.loading, self.caches.nbytes if self.caches else 0)

    @property
    def fits(self) -> bool | None:
        """Whether that is there, for a context that the model has; None where the machine does not say or the model is
        not run."""
        if self.too_long:
            return False
        return None if self.available is None or self.caches is None else self.needed <= self.available

    @property
    def sentence(self) -> str:
        """In a line: what it takes, and whether it fits."""
        w = self.weights
        said = f"weights {as_bytes(w.nbytes)} on {w.device} ({as_bytes(self.stored)} in the files)"
        if self.caches is None:
            return f"{said}; {self.why}"
        said += f", caches {as_bytes(self.caches.nbytes)}, at most {as_bytes(self.needed)} in all"
        if self.available is None:
            said += f"; {self.source}"
        else:
            verdict = "it fits" if self.needed <= self.available else "it does NOT fit"
            said += f": {verdict} in {as_bytes(self.available)} of {self.source}"
        if self.too_long:
            said += (
                f"; but a context of {self.caches.context} tokens is longer than the model's {self.positions} "
                "positions (max_position_embeddings), and no run of it starts"
            )
        return said

    def rows(self) -> list[tuple[str, str, str]]:
        """(what, held in, bytes) for a table."""
        found = [(each.part, each.dtype, as_bytes(each.nbytes)) for each in self.weights.held]
        beside = self.weights.at_most - self.weights.nbytes
        reasons = "values do not fit FP16, or a head's copies differ"
        all_of_them = f"up to {as_bytes(beside)} more if {reasons}" if beside else ""
        found.append(("all weights", all_of_them, as_bytes(self.weights.nbytes)))
        found.append(("while loading, beside them", "one matrix", as_bytes(self.weights.loading)))
        c = self.caches
        if c is not None:
            policy = c.policy if c.policy == c.draft_policy else f"{c.policy}, draft {c.draft_policy}"
            kept = f"{c.batch} × {c.context} tokens of {c.token} B; as deployed {c.deployed_token} B a token"
            found.append((f"KV cache, {policy}", kept, as_bytes(c.batch * c.context * c.token)))
            if c.state:
                held = f"{c.batch} × {as_bytes(c.state)}, for rounds of {c.depth} drafts"
                found.append(("delta-rule state", held, as_bytes(c.batch * c.state)))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {
            **asdict(self),
            "weight_bytes": self.weights.nbytes,
            "weight_bytes_at_most": self.weights.at_most,
            "cache_bytes": None if self.caches is None else self.caches.nbytes,
            "needed": self.needed,
            "context_too_long": self.too_long,
            "fits": self.fits,
        }

    def __str__(self) -> str:
        rows = [tuple(map(printable, row)) for row in self.rows()]
        lines = aligned(_COLUMNS, rows, _RIGHT)
        return "\n".join([f"{printable(self.checkpoint)}, computed in {self.weights.dtype}", *lines, self.sentence])

    def _repr_html_(self) -> str:
        rows = [tuple(map(printable, row)) for row in self.rows()]
        caption = f"{printable(self.checkpoint)} in memory, computed in {self.weights.dtype}"
        table = html_table(_COLUMNS, rows, _RIGHT, caption)
        return f'<div class="mtplab-memory"><p>{escape(printable(self.sentence, 400))}</p>{table}</div>'


def memory(
    path: str | os.PathLike[str] | Checkpoint,
    device: str = "cpu",
    dtype: str | None = None,
    exclude: str | list[str] | None = None,
    draft_exclude: str | list[str] | None = None,
    quant_policy: str | int | QuantPolicy = "none",
    draft_quant_policy: str | int | QuantPolicy | None = None,
    model_format: str | None = None,
    *,
    batch: int = 1,
    context: int = 4096,
    depth: int = 3,
    layers: str | Iterable[int] | None = None,
) -> Memory:
    """What `load_model` with these arguments takes, and a run of `batch` sequences of `context` tokens at `depth`.

    Reads headers and config.json. Bytes are those held here, which on a CPU are more than an engine's on a GPU: FP8
    weights are held as their float32 values, BF16 ones as FP16, embeddings in float32. Activations of a pass, and what
    torch itself takes, are not in it; nor is the second packing that `compile=True` makes.

    Raises CheckpointError for files that cannot be read, ConfigError for settings.
    """
    engine, spec = load_settings(
        device, dtype, exclude, draft_exclude, quant_policy, draft_quant_policy, model_format, layers=layers
    )
    for name, value, least in (("batch", batch, 1), ("context", context, 1), ("depth", depth, 0)):
        if type(value) is not int or value < least or (name == "depth" and value > MAX_DEPTH):
            most = f" and at most {MAX_DEPTH}" if name == "depth" else ""
            raise ConfigError(f"{name} is {value!r:.60}; expected a whole number of at least {least}{most}")
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    check_exclusions(checkpoint, engine, spec)
    plan = checkpoint.plan(**plan_arguments(engine, spec))
    config, why = None, ""
    try:
        config = config_of(checkpoint).slice(engine.layers)
    except CheckpointError as error:
        why = f"not run: {error}"
    weights = weights_in_memory(checkpoint, plan, engine, config)
    caches = None if config is None else _caches(checkpoint, config, weights, engine, spec, batch, context, depth)
    available, source = available_memory(engine.device)
    positions = 0 if config is None else config.max_position
    return Memory(str(checkpoint.path), weights, caches, why, plan.nbytes(), available, source, positions)


def weights_in_memory(checkpoint: Checkpoint, plan: Plan, engine: EngineConfig, config: ModelConfig | None) -> Weights:
    """Weights of a planned checkpoint as they will be held. `config` is None for an architecture that is not run."""
    cpu = engine.device.startswith("cpu")
    stored = stored_dtype(checkpoint.config) if config is None else config.dtype
    dtype = engine.dtype or ("float32" if cpu else stored if stored in DTYPES else "bfloat16")
    if config is not None and config.sliced:
        kept = {layer.number for layer in config.layers}
        plan = replace(plan, modules=tuple(m for m in plan.modules if _in_slice(m, kept)))
    tied = None
    if config is not None and config.tied_embeddings and vocabulary_head(checkpoint.tensors) is None:
        tied = config.vocab_size, config.hidden_size
    packs = cpu and dtype == "float32"
    # a matrix is whole in float32 as it is packed; on a GPU codes are joined; otherwise it is made where it stays
    each = 4 if packs else 0 if cpu else 1
    biases = {
        module_of(name): math.prod(info.shape) for name, info in checkpoint.tensors.items() if name.endswith(".bias")
    }
    held = tuple(held_weights(plan, engine.device, dtype, tied, biases))
    return Weights(engine.device, dtype, held, each * max(largest_product(plan), math.prod(tied or ())))


def _in_slice(module: ModulePlan, kept: set[int]) -> bool:
    """Whether a slice of these of the target's layers has this module: those of other layers are left on disk."""
    number = layer_of(module.name) if module.part == "target" else None
    return number is None or number in kept


def refuse_what_cannot_fit(checkpoint: Checkpoint, weights: Weights) -> None:
    """Raises ConfigError where weights alone are more than there is, before any is read."""
    available, source = available_memory(weights.device)
    if available is not None and weights.nbytes > available:
        smaller = "dtype='bfloat16', " if weights.dtype == "float32" else ""
        raise ConfigError(
            f"{checkpoint.path}: its weights take {as_bytes(weights.nbytes)} on {weights.device} in {weights.dtype}; "
            f"expected at most {as_bytes(available)}, {source}. Try {smaller}another device or a smaller model; "
            "`mtplab doctor PATH` says what takes how much; load_model(..., check_memory=False) tries all the same."
        )


def _caches(
    checkpoint: Checkpoint, c: ModelConfig, weights: Weights, engine: EngineConfig, spec: SpecConfig, batch: int,
    context: int, depth: int,
) -> Caches:  # fmt: skip
    policy = resolve_policy(engine.quant_policy)
    draft = policy.everywhere if spec.quant_policy is None else resolve_policy(spec.quant_policy)
    check_cache(checkpoint, c, policy)
    if c.draft_caches(depth):
        check_cache(checkpoint, c, draft, "draft")
    deployed, size = DTYPE_BYTES[c.dtype], DTYPE_BYTES[weights.dtype]
    copies = weights.device.startswith("cpu")  # decoding on a GPU reads the codes themselves
    layers = [(policy.at(i), rows) for i, rows in c.attention.items()]
    # here a head with a layer per depth has a cache for every draft, in an engine one for every layer
    modules = [(draft, each.rows) for each in c.draft_layers]
    here = layers + [modules[step % len(modules)] for step in range(c.draft_caches(depth))]
    there = layers + (modules if depth else [])

    def held(of: QuantPolicy, each: CacheRows) -> int:
        stored = (side.storage for side in of.sides[: each.sides])
        rows = sum(each.dim * (s.bits or 8 * size) // 8 + s.meta * deployed for s in stored)
        return each.heads * (rows + (each.sides * each.dim * size if of.quantised and copies else 0))

    steps = depth + 2 if depth else 1
    return Caches(
        batch, context, depth, policy.name, draft.name,
        sum(held(*each) for each in here),
        sum(of.bytes_per_token(rows.heads, rows.dim, deployed, rows.sides) for of, rows in there),
        sum(delta.conv_size * size + steps * 4 * delta.state_size for delta in c.deltas),
    )  # fmt: skip
