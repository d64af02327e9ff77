"""A target and its MTP head, built from their sizes and a checkpoint's parameters.

Layers come from `layers.py` and `mixture.py`; which there are is the `ModelConfig`'s to say, and how the head is named
its family's layout's. The head is, in every family: norm both inputs → fc → one decoder layer → norm → vocabulary head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mtplab.errors import CheckpointError
from mtplab.models.cache import DeltaState, KVCache
from mtplab.models.families.family import Family
from mtplab.models.head import DraftModule, Head
from mtplab.models.latent import LatentAttention
from mtplab.models.layers import MLP, Attention, DecoderLayer, GatedDelta
from mtplab.models.mixture import Mixture
from mtplab.models.norm import RMSNorm
from mtplab.models.parameters import Parameters
from mtplab.models.passes import Pass
from mtplab.models.spec import (
    AttentionSpec,
    DeltaSpec,
    DenseSpec,
    Feed,
    LayerSpec,
    MlaSpec,
    ModelConfig,
)
from mtplab.quant.linear import PackedLinear

__all__ = ["Cache", "Target", "build_head", "build_target"]

Cache = KVCache | DeltaState


@dataclass
class Target:
    """Embedding, decoder layers, final norm and vocabulary head."""

    config: ModelConfig
    embedding: Tensor  # [v, hidden]
    layers: list[DecoderLayer]
    norm: RMSNorm
    head: PackedLinear  # [v, hidden]

    def linears(self) -> Iterator[PackedLinear]:
        """Every linear layer of it."""
        for layer in self.layers:
            yield from layer.linears()
        yield self.head

    def __call__(self, tokens: Tensor, run: Pass, caches: list[Cache]) -> Tensor:
        """tokens [b, t] int64 → hidden [padded rows, hidden] before the final norm; fills the caches."""
        x = run.gather(F.embedding(tokens, self.embedding))
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, run, cache)
        return x

    def normed(self, hidden: Tensor) -> Tensor:
        """The final norm: what the vocabulary head reads, and the MTP head by default."""
        return self.norm(hidden)

    def logits(self, normed: Tensor) -> Tensor:
        """[m, hidden] after the final norm → [m, v]."""
        return self.head(normed)[0]


def build_target(config: ModelConfig, p: Parameters) -> Target:
    """The target from its parameters. Raises CheckpointError for a tensor that is missing or of another shape."""
    c, root = config, p.root
    embedding = p.vector(f"{root}embed_tokens.weight", (c.vocab_size, c.hidden_size))
    if c.tied_embeddings and not p.has(f"{p.lm_head}.weight"):
        head = p.tied(embedding)
    else:
        head = p.linear([(p.lm_head, c.vocab_size)], c.hidden_size)
    build = _Builder(c, p)
    layers = [build.layer(spec, f"{root}layers.{spec.number}.") for spec in c.layers]
    return Target(c, embedding, layers, build.norm(f"{root}norm"), head)


def build_head(config: ModelConfig, family: Family, p: Parameters, target: Target) -> Head | None:
    """The MTP head, or None where the config promises none. Raises CheckpointError if it is promised and incomplete."""
    c, layout = config, family.layout
    if not c.draft_layers:
        return None
    names = [layout.names(spec.number, c.num_layers, p.root) for spec in c.draft_layers]
    starts = tuple(each.block for each in names) if layout.behind else layout.root
    if not any(name.startswith(starts) for name in p.checkpoint.tensors):
        where = layout.root if not layout.behind else names[0].block
        raise CheckpointError(
            f"{p.checkpoint.files.folder / 'config.json'}: {layout.count_key} is {c.mtp_layers}, but no tensor is "
            f"named {where}*: there is no head to load. Set it to 0 to run the model without one (depth 0), or take a "
            "checkpoint that has its head."
        )
    build = _Builder(c, p)
    norms = {name: build.norm(name) for each in names for name in (each.norm_embedding, each.norm_hidden, each.norm)}
    fcs = {each.fc: p.linear([(each.fc, c.hidden_size)], 2 * c.hidden_size) for each in names}
    modules = [
        DraftModule(
            norms[each.norm_embedding],
            norms[each.norm_hidden],
            fcs[each.fc],
            build.layer(spec, each.block),
            norms[each.norm],
            build.own_embedding(each.embedding, target.embedding),
            build.own_head(each.head, target.head.names[0]),
        )
        for spec, each in zip(c.draft_layers, names, strict=True)
    ]
    return Head(modules, target.head, family.chained, family.hidden_first, family.first_masked)


class _Builder:
    """Layers of one model, from their specs and the prefixes of their names."""

    def __init__(self, config: ModelConfig, p: Parameters):
        self._c, self._p, self._geometries = config, p, config.geometries

    def norm(self, module: str) -> RMSNorm:
        """Over the hidden size."""
        return RMSNorm(self._norm_weight(module, self._c.hidden_size), self._c.rms_norm_eps)

    def own_embedding(self, module: str, targets: Tensor) -> Tensor:
        """The embedding that a module has of its own, or the target's where the file holds the same or none."""
        name = f"{module}.weight"
        if not module or not self._p.has(name) or self._p.same(name, f"{self._p.root}embed_tokens.weight"):
            return targets
        return self._p.vector(name, tuple(targets.shape))

    def own_head(self, module: str, targets: str) -> PackedLinear | None:
        """The vocabulary head, likewise; None for the target's."""
        name = f"{module}.weight"
        if not module or not self._p.has(name) or self._p.same(name, f"{targets}.weight"):
            return None
        return self._p.linear([(module, self._c.vocab_size)], self._c.hidden_size)

    def layer(self, spec: LayerSpec, at: str) -> DecoderLayer:
        """A decoder layer whose names begin with `at`."""
        match spec.mixer:
            case AttentionSpec():
                mixer = self._attention(spec.mixer, f"{at}self_attn.")
            case MlaSpec():
                mixer = self._latent(spec.mixer, f"{at}self_attn.")
            case DeltaSpec():
                mixer = self._delta(spec.mixer, f"{at}linear_attn.")
        return DecoderLayer(
            self.norm(f"{at}input_layernorm"),
            mixer,
            self.norm(f"{at}post_attention_layernorm"),
            self._feed(spec.feed, at),
        )

    def _norm_weight(self, module: str, size: int) -> Tensor:
        """What a norm multiplies by, float32: BF16's mantissa has no room for 1 + w."""
        weight = self._p.vector(f"{module}.weight", (size,), torch.float32)
        return 1.0 + weight if self._c.one_plus_norms else weight

    def _feed(self, spec: Feed, at: str) -> MLP | Mixture:
        p, hidden = self._p, self._c.hidden_size
        if isinstance(spec, DenseSpec):
            return self._mlp(f"{at}mlp.", spec.size, spec.limit)
        names = spec.names
        return Mixture(
            spec,
            p.linear([(f"{at}{names.router}", spec.count)], hidden),
            p.experts(at, spec, hidden),
            self._mlp(f"{at}{names.shared}.", spec.shared_size, spec.shared_limit) if spec.shared_size else None,
            p.linear([(f"{at}{names.shared_gate}", 1)], hidden) if spec.shared_gated else None,
            p.vector(f"{at}{names.bias}", (spec.count,), torch.float32) if spec.scores == "sigmoid" else None,
        )

    def _mlp(self, at: str, inner: int, limit: float | None) -> MLP:
        hidden = self._c.hidden_size
        return MLP(
            self._p.linear([(f"{at}gate_proj", inner), (f"{at}up_proj", inner)], hidden),
            self._p.linear([(f"{at}down_proj", hidden)], inner),
            limit,
        )

    def _attention(self, spec: AttentionSpec, at: str) -> Attention:
        p, hidden, d = self._p, self._c.hidden_size, spec.head_dim
        q, kv = spec.heads * d, spec.kv_heads * d
        sizes = {"q_proj": q * (2 if spec.gated else 1), "k_proj": kv, "v_proj": kv}
        inputs = [(f"{at}{name}", rows) for name, rows in sizes.items()]
        if spec.head_gated:
            inputs.append((f"{at}g_proj", spec.heads))
        norm = biases = None
        if spec.norms:
            # q is multiplied by d^-½ as it is normed
            of_q = self._norm_weight(f"{at}q_norm", d) * d**-0.5
            of_k = self._norm_weight(f"{at}k_norm", d)
            weight = torch.cat([of_q.expand(spec.heads, -1), of_k.expand(spec.kv_heads, -1)])
            norm = RMSNorm(weight, self._c.rms_norm_eps)
        if spec.bias:
            biases = tuple(p.vector(f"{at}{name}.bias", (rows,)) for name, rows in sizes.items())
        return Attention(
            spec,
            self._geometries.index(spec.geometry),
            p.linear(inputs, hidden),
            p.linear([(f"{at}o_proj", hidden)], q),
            norm,
            biases,
        )

    def _latent(self, spec: MlaSpec, at: str) -> LatentAttention:
        p, hidden = self._p, self._c.hidden_size
        queries = f"{at}q_proj" if spec.q_rank is None else f"{at}q_a_proj"
        inputs = [
            (queries, spec.q_rank or spec.heads * spec.q_dim),
            (f"{at}kv_a_proj_with_mqa", spec.kv_rank + spec.rotary.dim),
        ]

        def norm(name: str, size: int) -> RMSNorm:
            return RMSNorm(self._norm_weight(f"{at}{name}", size), spec.norm_eps)

        return LatentAttention(
            spec,
            self._geometries.index(spec.geometry),
            p.linear(inputs, hidden),
            norm("q_a_layernorm", spec.q_rank) if spec.q_rank else None,
            p.linear([(f"{at}q_b_proj", spec.heads * spec.q_dim)], spec.q_rank) if spec.q_rank else None,
            norm("kv_a_layernorm", spec.kv_rank),
            p.linear([(f"{at}kv_b_proj", spec.heads * (spec.nope_dim + spec.v_dim))], spec.kv_rank),
            p.linear([(f"{at}o_proj", hidden)], spec.heads * spec.v_dim),
        )

    def _delta(self, spec: DeltaSpec, at: str) -> GatedDelta:
        p, hidden, heads = self._p, self._c.hidden_size, spec.v_heads
        conv = p.vector(f"{at}conv1d.weight", (spec.conv_dim, 1, spec.conv_kernel))
        if spec.interleaved:
            sizes = {"qkvz": spec.conv_dim + spec.value_dim, "ba": 2 * heads}
        else:
            sizes = {"qkv": spec.conv_dim, "z": spec.value_dim, "b": heads, "a": heads}
        inputs = [(f"{at}in_proj_{name}", rows) for name, rows in sizes.items()]
        return GatedDelta(
            spec,
            p.linear(inputs, hidden),
            p.linear([(f"{at}out_proj", hidden)], spec.value_dim),
            conv.squeeze(1).t().contiguous(),
            -p.vector(f"{at}A_log", (heads,), torch.float32).exp(),
            p.vector(f"{at}dt_bias", (heads,), torch.float32),
            RMSNorm(p.vector(f"{at}norm.weight", (spec.v_dim,), torch.float32), self._c.rms_norm_eps),
        )
