"""What a model weighs: the sizes of its layers, parameters of each part, bytes a parameter takes by format.

Pure arithmetic over dimensions. Knows no GPU, no time and no file; `checkpoint_sizes.py` reads a checkpoint into these.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mtplab.errors import ConfigError
from mtplab.quant.policy import resolve_policy

__all__ = ["FORMATS", "WEIGHTS", "Attention", "DeltaRule", "Experts", "Format", "ModelSizes", "Weights", "weights"]


@dataclass(frozen=True)
class Attention:
    """Full attention. Grouped queries: `heads`, `kv_heads`, `head_dim`; `gate`: q also brings an output gate.

    Latent attention (DeepSeek's MLA) where `kv_lora` is given: `nope`, `rope` and `v_dim` features a head, `q_lora`
    that queries are made from, 0 for the hidden state itself; the cache holds `kv_lora + rope` numbers a token, the
    same on every rank.
    """

    heads: int
    kv_heads: int = 0
    head_dim: int = 0
    gate: bool = False
    q_lora: int = 0
    kv_lora: int = 0
    nope: int = 0
    rope: int = 0
    v_dim: int = 0

    def parameters(self, hidden: int) -> dict[str, int]:
        """Parameters of each product, in the order in which they run."""
        if self.kv_lora:
            queries = self.heads * (self.nope + self.rope)
            return {
                "q_a, kv_a": hidden * ((self.q_lora or queries) + self.kv_lora + self.rope),
                **({"q_b": self.q_lora * queries} if self.q_lora else {}),
                "absorb k": self.heads * self.nope * self.kv_lora,
                "absorb v": self.heads * self.v_dim * self.kv_lora,
                "out": self.heads * self.v_dim * hidden,
            }
        q = self.heads * self.head_dim * (2 if self.gate else 1)
        return {
            "qkv": hidden * (q + 2 * self.kv_heads * self.head_dim),
            "out": self.heads * self.head_dim * hidden,
        }

    def cache_bytes(self, policy: str, tp: int = 1) -> float:
        """Bytes of one token's K and V in one layer on one of `tp` ranks, scales included. Raises ConfigError for a
        policy whose layers differ, or that latent attention, which keeps one row for K and V, cannot have."""
        found = resolve_policy(policy)
        if found.kept:
            raise ConfigError(
                f"quant_policy {found.name} keeps layers unquantised, and here every layer counts alike; use "
                f"{found.everywhere.name}"
            )
        if self.kv_lora:
            storage = found.k.storage
            if not found.one_storage:
                raise ConfigError(
                    f"quant_policy {found.name} stores K and V apart, and latent attention keeps one row for both; use "
                    "int8, int4 or fp8"
                )
            return (self.kv_lora + self.rope) * (storage.bits or 16) / 8 + 2 * storage.meta
        return found.bytes_per_token(-(-self.kv_heads // tp), self.head_dim, 2)

    def operations(self, context: float) -> float:
        """Multiplications and additions of one query token that attends to `context` tokens."""
        if self.kv_lora:
            return 2 * self.heads * context * (2 * self.kv_lora + self.rope)
        return 4 * self.heads * self.head_dim * context


@dataclass(frozen=True)
class DeltaRule:
    """Gated delta rule (linear attention) with `v_heads` states of `k_dim` × `v_dim`."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int

    def parameters(self, hidden: int) -> dict[str, int]:
        """Parameters of each product."""
        keys, values = self.k_heads * self.k_dim, self.v_heads * self.v_dim
        return {"qkvz, ba": hidden * (2 * keys + 2 * values + 2 * self.v_heads), "out": values * hidden}

    def state_bytes(self, number: float = 4) -> float:
        """Bytes of one sequence's recurrent state in one layer; `number` = bytes of one number (float32)."""
        return number * self.v_heads * self.k_dim * self.v_dim


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: each token takes `top` of `count`, of width `inner`; `shared` experts serve every token."""

    count: int
    top: int
    inner: int
    shared: int = 0  # width of all shared experts together

    def touched(self, tokens: float) -> float:
        """Distinct experts that `tokens` tokens reach: count · (1 − (1 − top / count)^tokens).

        This takes routing as uniform and tokens as independent. Real routers repeat themselves, within a sequence above
        all, so it is an upper bound on the average.
        """
        return self.count * (1 - (1 - self.top / self.count) ** tokens)


@dataclass(frozen=True)
class ModelSizes:
    """Dimensions of one model and its MTP head.

    `attention_layers` + `delta_layers` are its layers; `dense_layers` of them have an MLP of width `inner`, all others
    `experts`. The head is one layer of full attention with the same kind of MLP as the target's last layer, a
    projection of 2 · hidden to hidden, and the target's own output head; with `draft_layers` above 1 it has a layer for
    each depth, behind the same projection (Qwen's names; `models/head.py` says what runs when).
    """

    name: str
    hidden: int
    vocabulary: int
    attention: Attention
    attention_layers: int
    source: str
    delta: DeltaRule | None = None
    delta_layers: int = 0
    inner: int = 0
    experts: Experts | None = None
    dense_layers: int = 0
    tied: bool = field(default=False, compare=False)
    draft_layers: int = 1

    @property
    def layers(self) -> int:
        """How many decoder layers the target has."""
        return self.attention_layers + self.delta_layers

    @property
    def expert_layers(self) -> int:
        """How many of them route to experts."""
        return self.layers - self.dense_layers if self.experts else 0

    def parameters(self) -> dict[str, float]:
        """Parameters by part: mixer, mlp (dense and shared), experts, head; draft_fc, draft_mixer, draft_mlp,
        draft_experts. Norms, routers and embeddings are left out: a round reads next to nothing of them."""
        h, e = self.hidden, self.experts
        mixer = sum(self.attention.parameters(h).values())
        found = {"mixer": float(self.attention_layers * mixer), "mlp": 0.0, "experts": 0.0}
        if self.delta is not None:
            found["mixer"] += self.delta_layers * sum(self.delta.parameters(h).values())
        found["mlp"] += 3 * h * self.inner * (self.layers if e is None else self.dense_layers)
        if e is not None:
            found["mlp"] += 3 * h * e.shared * self.expert_layers
            found["experts"] = 3.0 * h * e.inner * e.count * self.expert_layers
        return {
            **found,
            "head": float(h * self.vocabulary),
            "draft_fc": 2.0 * h * h,
            "draft_mixer": float(self.draft_layers * mixer),
            "draft_mlp": self.draft_layers * 3.0 * h * (self.inner if e is None else e.shared),
            "draft_experts": 0.0 if e is None else self.draft_layers * 3.0 * h * e.inner * e.count,
        }

    def active(self) -> float:
        """Parameters that one token meets in the target, embedding left out."""
        parts = self.parameters()
        share = 0.0 if self.experts is None else self.experts.top / self.experts.count
        return parts["mixer"] + parts["mlp"] + parts["head"] + share * parts["experts"]


@dataclass(frozen=True)
class Format:
    """How a weight is stored: bytes a parameter, scales included, and the rate its products run at."""

    name: str
    nbytes: float
    rate: str  # "bf16", "fp8" or "fp4", as in `Gpu.rate`


FORMATS = {
    found.name: found
    for found in (
        Format("bf16", 2.0, "bf16"),
        Format("fp8", 1 + 4 / 128**2, "fp8"),  # a float32 scale for 128 × 128
        Format("nvfp4", 0.5 + 1 / 16, "fp4"),  # an E4M3 scale for 16
        Format("int4", 0.5 + 2 / 128, "bf16"),  # weights only; a BF16 scale for 128
    )
}


@dataclass(frozen=True)
class Weights:
    """The format of every part of a model. `fc` is the MTP head's projection."""

    name: str
    mixer: Format
    mlp: Format
    experts: Format
    head: Format
    fc: Format
    draft_mixer: Format
    draft_mlp: Format
    draft_experts: Format
    source: str = "assumed by name"

    def of(self, part: str) -> Format:
        """The format of a part as `ModelSizes.parameters` calls it."""
        return getattr(self, {"draft_fc": "fc"}.get(part, part))

    def nbytes(self, sizes: ModelSizes) -> float:
        """Bytes of all weights, an input embedding of BF16 included unless it is the head."""
        total = sum(count * self.of(part).nbytes for part, count in sizes.parameters().items())
        return total + (0 if sizes.tied else 2.0 * sizes.hidden * sizes.vocabulary)


def _preset(name: str, mixer: str, mlp: str, experts: str, draft: str, draft_experts: str | None = None) -> Weights:
    f = FORMATS
    return Weights(
        name, f[mixer], f[mlp], f[experts], f["bf16"], f["bf16"], f[draft], f[draft], f[draft_experts or draft]
    )


# what publishers make of a model; the output head and `mtp.fc` stay BF16 in all of them
WEIGHTS = {
    found.name: found
    for found in (
        _preset("bf16", "bf16", "bf16", "bf16", "bf16"),
        _preset("fp8", "fp8", "fp8", "fp8", "fp8"),  # Qwen's and DeepSeek's releases
        _preset("fp8-experts", "bf16", "bf16", "fp8", "bf16", "fp8"),  # Qwen3.8-2.4T-A95B-FP8
        _preset("nvfp4", "nvfp4", "nvfp4", "nvfp4", "bf16"),  # ModelOpt with mtp.* excluded
        _preset("nvfp4-experts", "bf16", "nvfp4", "nvfp4", "bf16"),  # DeepSeek-R1-FP4
        _preset("int4", "int4", "int4", "int4", "bf16"),
    )
}


def weights(name: str) -> Weights:
    """The preset of that name. Raises ConfigError, listing those there are, for another."""
    if not isinstance(name, str) or name not in WEIGHTS:
        raise ConfigError(f"weights {name!r:.60}: expected one of {', '.join(WEIGHTS)}, or give a checkpoint")
    return WEIGHTS[name]
