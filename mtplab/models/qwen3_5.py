"""Qwen3.5, dense and mixture of experts: the target's decoder and its MTP head, and where a checkpoint has both.

Layers come from `layers.py`; this file says which there are, in what order, and under what names. The architectures are
those of transformers' `Qwen3_5ForCausalLM` and `Qwen3_5MoeForCausalLM`; the head, which transformers does not run, is
as in lmdeploy's `qwen3_5_mtp.py` and vLLM's:
fc(cat[norm_e(embedding), norm_h(hidden)]) → one full-attention layer → norm → shared head.
Published heads have one layer. Of several, fc and the norms are shared, as vLLM builds them (whose first loop runs
layer 0 alone, issue 52688); here each draft has its own (`head.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mtplab.errors import CheckpointError
from mtplab.models.cache import DeltaState, KVCache
from mtplab.models.config import ModelConfig
from mtplab.models.head import DraftModule, Head
from mtplab.models.layers import MLP, Attention, GatedDelta
from mtplab.models.mixture import Mixture
from mtplab.models.norm import RMSNorm
from mtplab.models.parameters import Parameters
from mtplab.models.passes import Pass
from mtplab.quant.linear import PackedLinear

Cache = KVCache | DeltaState


@dataclass
class DecoderLayer:
    """norm → mixer → residual, norm → MLP → residual."""

    input_norm: RMSNorm
    mixer: Attention | GatedDelta
    post_norm: RMSNorm
    mlp: MLP | Mixture

    def linears(self) -> Iterator[PackedLinear]:
        """Every linear layer of it."""
        inputs = self.mixer.qkv if isinstance(self.mixer, Attention) else self.mixer.inputs
        yield from (inputs, self.mixer.out, *self.mlp.linears())

    def __call__(self, x: Tensor, run: Pass, cache: Cache) -> Tensor:
        x = self.mixer(x, self.input_norm(x), run, cache)
        return self.mlp(x, self.post_norm(x), run.rows)


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
    if c.tied_embeddings and not p.has("lm_head.weight"):
        head = p.tied(embedding)
    else:
        head = p.linear([("lm_head", c.vocab_size)], c.hidden_size)
    layers = [_layer(c, p, f"{root}layers.{i}.", kind) for i, kind in enumerate(c.layer_types)]
    return Target(c, embedding, layers, _norm(c, p, f"{root}norm.weight"), head)


def build_head(config: ModelConfig, p: Parameters) -> Head | None:
    """The MTP head, or None where the config promises none. Raises CheckpointError if it is promised and incomplete."""
    c = config
    if c.mtp_layers == 0:
        return None
    if not any(name.startswith("mtp.") for name in p.checkpoint.tensors):
        raise CheckpointError(
            f"{p.checkpoint.files.folder / 'config.json'}: mtp_num_hidden_layers is {c.mtp_layers}, but no tensor is "
            "named mtp.*: there is no head to load. Set it to 0 to run the model without one (depth 0), or take a "
            "checkpoint that has its head."
        )
    norm_embedding = _norm(c, p, "mtp.pre_fc_norm_embedding.weight")
    norm_hidden = _norm(c, p, "mtp.pre_fc_norm_hidden.weight")
    fc = p.linear([("mtp.fc", c.hidden_size)], 2 * c.hidden_size)
    layers = [_layer(c, p, f"mtp.layers.{i}.", "full_attention") for i in range(c.mtp_layers)]
    norm = _norm(c, p, "mtp.norm.weight")
    return Head([DraftModule(norm_embedding, norm_hidden, fc, layer, norm) for layer in layers])


def _norm(c: ModelConfig, p: Parameters, name: str) -> RMSNorm:
    """A norm over the hidden size, which Qwen3.5 stores zero-centred."""
    return RMSNorm(p.one_plus(name, c.hidden_size), c.rms_norm_eps)


def _layer(c: ModelConfig, p: Parameters, at: str, kind: str) -> DecoderLayer:
    mixer = _attention(c, p, f"{at}self_attn.") if kind == "full_attention" else _delta(c, p, f"{at}linear_attn.")
    return DecoderLayer(
        _norm(c, p, f"{at}input_layernorm.weight"),
        mixer,
        _norm(c, p, f"{at}post_attention_layernorm.weight"),
        _mixture(c, p, f"{at}mlp.") if c.num_experts else _mlp(c, p, f"{at}mlp.", c.intermediate_size),
    )


def _mlp(c: ModelConfig, p: Parameters, at: str, inner: int) -> MLP:
    return MLP(
        p.linear([(f"{at}gate_proj", inner), (f"{at}up_proj", inner)], c.hidden_size),
        p.linear([(f"{at}down_proj", c.hidden_size)], inner),
    )


def _mixture(c: ModelConfig, p: Parameters, at: str) -> Mixture:
    return Mixture(
        p.linear([(f"{at}gate", c.num_experts)], c.hidden_size),
        p.experts(f"{at}experts", c.num_experts, c.expert_size, c.hidden_size),
        _mlp(c, p, f"{at}shared_expert.", c.shared_expert_size),
        p.linear([(f"{at}shared_expert_gate", 1)], c.hidden_size),
        c.num_experts,
        c.experts_per_token,
    )


def _attention(c: ModelConfig, p: Parameters, at: str) -> Attention:
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    q_norm = p.one_plus(f"{at}q_norm.weight", c.head_dim) * c.head_dim**-0.5
    k_norm = p.one_plus(f"{at}k_norm.weight", c.head_dim)
    return Attention(
        c,
        p.linear([(f"{at}q_proj", 2 * q), (f"{at}k_proj", kv), (f"{at}v_proj", kv)], c.hidden_size),
        p.linear([(f"{at}o_proj", c.hidden_size)], q),
        RMSNorm(torch.cat([q_norm.expand(c.num_heads, -1), k_norm.expand(c.num_kv_heads, -1)]), c.rms_norm_eps),
    )


def _delta(c: ModelConfig, p: Parameters, at: str) -> GatedDelta:
    conv = p.vector(f"{at}conv1d.weight", (c.conv_dim, 1, c.conv_kernel))
    inputs = [
        (f"{at}in_proj_qkv", c.conv_dim),
        (f"{at}in_proj_z", c.value_dim),
        (f"{at}in_proj_b", c.linear_v_heads),
        (f"{at}in_proj_a", c.linear_v_heads),
    ]
    return GatedDelta(
        c,
        p.linear(inputs, c.hidden_size),
        p.linear([(f"{at}out_proj", c.hidden_size)], c.value_dim),
        conv.squeeze(1).t().contiguous(),
        -p.vector(f"{at}A_log", (c.linear_v_heads,), torch.float32).exp(),
        p.vector(f"{at}dt_bias", (c.linear_v_heads,), torch.float32),
        RMSNorm(p.vector(f"{at}norm.weight", (c.linear_v_dim,), torch.float32), c.rms_norm_eps),
    )
