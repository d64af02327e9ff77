"""DeepSeek-V3, R1 and V3.1: latent attention, dense layers first and then experts; the head behind the target's layers.

Keys are those of transformers' `DeepseekV3Config` and of the releases. The head's decoder layer is one more of the
target's, a mixture; its embedding and its vocabulary head are copies of the target's in every release. vLLM reads zeros
in place of the embedding at position 0 (`deepseek_mtp.py`); transformers, which also runs the head, does not.
"""

from __future__ import annotations

from mtplab.checkpoint.draft_layouts import DEEPSEEK_V3
from mtplab.models.families.family import Family, Sizes
from mtplab.models.families.sigmoid_experts import read_feeds, read_sigmoid_experts
from mtplab.models.fields import Fields, yarn_mscale
from mtplab.models.spec import LayerSpec, MlaSpec, Rotary

__all__ = ["FAMILY"]

_VARIANT = "a variant mtplab lacks"


def _read(fields: Fields) -> Sizes:
    layers = fields.number("num_hidden_layers", top=10_000)
    fields.must_be("hidden_act", "silu", "the experts' and the MLP's activation")
    fields.must_be("attention_bias", False, _VARIANT)
    fields.must_be("moe_layer_freq", 1, _VARIANT)
    fields.must_be("scoring_func", "sigmoid", _VARIANT)
    fields.must_be("topk_method", "noaux_tc", _VARIANT)
    attention, experts = _attention(fields), read_sigmoid_experts(fields)
    feeds = read_feeds(fields, layers, experts)
    heads = fields.head_layers("num_nextn_predict_layers")
    return Sizes(
        layers=tuple(LayerSpec(i, attention, feed) for i, feed in enumerate(feeds)),
        draft_layers=tuple(LayerSpec(i, attention, experts) for i in range(heads)),
    )


def _attention(fields: Fields) -> MlaSpec:
    heads = fields.number("num_attention_heads")
    fields.must_be("num_key_value_heads", heads, "as many as num_attention_heads: latent attention shares none")
    nope = fields.number("qk_nope_head_dim")
    rope = fields.number("qk_rope_head_dim")
    if rope % 2:
        raise fields.wrong("qk_rope_head_dim", "an even number: features turn in pairs")
    theta, _, given = fields.rope()
    scaling, scale = None, (nope + rope) ** -0.5
    if fields.rope_type(given, "default", "yarn") == "yarn":
        scaling = fields.yarn(given)
        # of q and k both; DeepSeek's own, beside what multiplies cos and sin
        scale *= yarn_mscale(scaling.factor, fields.rope_number(given, "mscale_all_dim", 0.0)) ** 2
    return MlaSpec(
        heads,
        None if fields.text.get("q_lora_rank") is None else fields.number("q_lora_rank"),
        fields.number("kv_lora_rank"),
        nope,
        fields.number("v_head_dim"),
        Rotary(rope, theta, scaling, fields.flag("rope_interleave", True)),
        scale,
    )


FAMILY = Family(
    name="DeepSeek-V3, R1, V3.1",
    model_types=("deepseek_v3",),
    layout=DEEPSEEK_V3,
    read=_read,
    target="latent attention; dense layers, then experts in groups with a shared one",
    head="one layer of latent attention and experts",
    oracle="transformers, drafts too",
    first_masked=True,
)
