"""GLM-4.5, 4.6 and 4.7: attention with a part of each head rotated, MLPs in the first layers, experts in the others.

Keys are those of transformers' `Glm4MoeConfig`. Biases of q, k and v and their norms are each there or not: GLM-4.5 has
both, GLM-4.5-Air has no norms. The head is DeepSeek-V3's, its block a layer with experts, numbered behind the target's
(transformers' `MtpModel`, vLLM's `glm4_moe_mtp.py`). vLLM puts zeros in place of the embedding at position 0,
transformers does not; vLLM feeds back what the head gives before its norm, transformers uses it once.
"""

from __future__ import annotations

from mtplab.checkpoint.draft_layouts import DEEPSEEK_V3
from mtplab.models.families.family import Family, Sizes
from mtplab.models.families.grouped_attention import read_attention
from mtplab.models.families.sigmoid_experts import read_feeds, read_sigmoid_experts
from mtplab.models.fields import Fields
from mtplab.models.spec import LayerSpec

__all__ = ["FAMILY"]


def _read(fields: Fields) -> Sizes:
    layers = fields.number("num_hidden_layers", top=10_000)
    fields.must_be("hidden_act", "silu", "the experts' and the MLP's activation")
    kind = {"norms": fields.flag("use_qk_norm", False), "bias": fields.flag("attention_bias", False)}
    attention, experts = read_attention(fields, 0.5, **kind), read_sigmoid_experts(fields)
    feeds = read_feeds(fields, layers, experts)
    heads = fields.head_layers("num_nextn_predict_layers")
    return Sizes(
        layers=tuple(LayerSpec(i, attention, feed) for i, feed in enumerate(feeds)),
        draft_layers=tuple(LayerSpec(i, attention, experts) for i in range(heads)),
    )


FAMILY = Family(
    name="GLM-4.5, 4.6, 4.7",
    model_types=("glm4_moe",),
    layout=DEEPSEEK_V3,
    read=_read,
    target="attention; MLPs, then experts with a shared one, chosen by sigmoids",
    head="one layer of attention and experts",
    oracle="transformers, drafts too",
    first_masked=True,
    draft_hidden="pre_norm",
)
