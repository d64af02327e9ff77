"""MiMo-7B: attention with biases of q, k and v, and MLPs, as in Qwen2; a head whose fc takes the hidden state first.

Keys are those of transformers' `Qwen2Config`, of which MiMo's is one with `num_nextn_predict_layers`. The head is as in
vLLM's `mimo_mtp.py`: zeros in place of the embedding at position 0, the target's hidden state from before its final
norm, and the head's own after its norm. One layer drafts every step.
"""

from __future__ import annotations

from mtplab.checkpoint.draft_layouts import MIMO
from mtplab.models.families.family import Family, Sizes
from mtplab.models.families.grouped_attention import read_attention
from mtplab.models.fields import Fields
from mtplab.models.spec import DenseSpec, LayerSpec

__all__ = ["FAMILY"]


def _read(fields: Fields) -> Sizes:
    layers = fields.number("num_hidden_layers", top=10_000)
    fields.must_be("hidden_act", "silu", "the MLP's activation")
    fields.must_be("use_sliding_window", False, "MiMo-7B's layers see all that came before")
    heads = fields.head_layers(MIMO.count_key)
    if heads > 1:
        raise fields.wrong(MIMO.count_key, "0 or 1: MiMo-7B has one layer, which drafts every step")
    attention = read_attention(fields, bias=fields.flag("attention_bias", True))
    mlp = DenseSpec(fields.number("intermediate_size"))
    return Sizes(
        layers=tuple(LayerSpec(i, attention, mlp) for i in range(layers)),
        draft_layers=tuple(LayerSpec(i, attention, mlp) for i in range(heads)),
    )


FAMILY = Family(
    name="MiMo-7B",
    model_types=("mimo",),
    layout=MIMO,
    read=_read,
    target="attention with biases; MLPs",
    head="one layer of attention, the hidden state first",
    oracle="transformers' Qwen2; vLLM for counts",
    hidden_first=True,
    first_masked=True,
    target_hidden="pre_norm",
)
