"""Qwen3.5, 3.6 and 3.8, dense and mixture of experts: layers of the gated delta rule, every fourth one attention.

Keys are those of transformers' `Qwen3_5TextConfig` and `Qwen3_5MoeTextConfig`; a multimodal wrapper keeps them under
`text_config`. The head, which transformers does not run, is as in lmdeploy's `qwen3_5_mtp.py` and vLLM's: one
full-attention layer. Of several, fc and the norms are shared, as vLLM builds them (whose first loop runs layer 0 alone,
issue 52688); here each draft has its own (`head.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from mtplab.checkpoint.draft_layouts import QWEN
from mtplab.models.families.family import Family, Sizes
from mtplab.models.families.grouped_attention import read_attention
from mtplab.models.fields import Fields
from mtplab.models.spec import DeltaSpec, DenseSpec, Feed, LayerSpec, MixtureNames, MixtureSpec

__all__ = ["FAMILY", "hybrid", "read_experts"]

_DENSE = ("qwen3_5_text", "qwen3_5")
_MIXTURES = ("qwen3_5_moe_text", "qwen3_5_moe")
_VARIANT = "a variant mtplab lacks"


def _read(fields: Fields) -> Sizes:
    mixture = fields.text.get("model_type", fields.whole.get("model_type")) in _MIXTURES
    feed = read_experts(fields) if mixture else DenseSpec(fields.number("intermediate_size"))
    fields.must_be("attn_output_gate", True, _VARIANT)
    fields.must_be("mtp_use_dedicated_embeddings", False, _VARIANT)
    layers = fields.number("num_hidden_layers", top=10_000)
    return hybrid(fields, [feed] * layers, [feed] * fields.head_layers("mtp_num_hidden_layers"))


def hybrid(fields: Fields, feeds: Sequence[Feed], head_feeds: Sequence[Feed], interleaved: bool = False) -> Sizes:
    """Layers of the gated delta rule and of gated attention with these feeds, and a head of the latter; `interleaved`
    as `DeltaSpec` has it."""
    layers = len(feeds)
    kinds = fields.kinds("layer_types", layers, ("linear_attention", "full_attention"))
    if kinds is None:
        interval = fields.number("full_attention_interval", 4)
        kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    if fields.text.get("attention_bias"):
        raise fields.wrong("attention_bias", "false: published models have no attention biases, found a variant")
    fields.must_be("hidden_act", "silu", "the experts' and the MLP's activation")
    attention, delta = read_attention(fields, 0.25, norms=True, gated=True), _delta(fields, interleaved)
    mixers = [attention if kind == "full_attention" else delta for kind in kinds]
    return Sizes(
        layers=tuple(map(LayerSpec, range(layers), mixers, feeds)),
        draft_layers=tuple(LayerSpec(i, attention, feed) for i, feed in enumerate(head_feeds)),
        one_plus_norms=True,
    )


def _delta(fields: Fields, interleaved: bool) -> DeltaSpec:
    k_heads, v_heads = fields.number("linear_num_key_heads"), fields.number("linear_num_value_heads")
    fields.multiples(("linear_num_value_heads", v_heads, k_heads))
    return DeltaSpec(
        k_heads,
        v_heads,
        fields.number("linear_key_head_dim"),
        fields.number("linear_value_head_dim"),
        fields.number("linear_conv_kernel_dim", 4),
        interleaved,
    )


def read_experts(fields: Fields) -> MixtureSpec:
    """Experts by softmax, and one that every token goes through by a gate of its own."""
    found = MixtureSpec(
        count=fields.number("num_experts", top=65536),
        top_k=fields.number("num_experts_per_tok"),
        size=fields.number("moe_intermediate_size"),
        shared_size=fields.number("shared_expert_intermediate_size"),
        shared_gated=True,
        names=MixtureNames(shared="mlp.shared_expert"),
    )
    if found.top_k > found.count:
        raise fields.wrong("num_experts_per_tok", f"at most num_experts, {found.count}")
    return found


FAMILY = Family(
    name="Qwen3.5, 3.6, 3.8",
    model_types=(*_DENSE, *_MIXTURES),
    layout=QWEN,
    read=_read,
    target="gated delta rule and gated attention; dense, or experts with a shared one",
    head="one layer of attention",
    oracle="transformers; vLLM and llama.cpp for counts",
)
