"""Qwen3-Next: Qwen3.5's layers with the delta rule's projections interleaved by key head, and experts in all but those
layers that config.json names.

Keys are those of transformers' `Qwen3NextConfig`. The head, which transformers does not run, is as in vLLM's
`qwen3_next_mtp.py`: whether its layer i has experts is decided as for the target's layer i.

The published config.json does not count the head's layers, and vLLM takes them for one
(`num_nextn_predict_layers`). Here those on disk are counted, since what transformers saves has no head and nothing in
its config.json says so; where a config counts them, it is believed.
"""

from __future__ import annotations

import re
from dataclasses import replace

from mtplab.checkpoint.draft_layouts import BEHIND_COUNT, OWN_COUNT, QWEN
from mtplab.config import MAX_DEPTH
from mtplab.errors import CheckpointError
from mtplab.models.families.family import Family, Sizes
from mtplab.models.families.qwen3_5 import hybrid, read_experts
from mtplab.models.fields import Fields
from mtplab.models.spec import DenseSpec, Feed

__all__ = ["FAMILY"]

_LAYER = re.compile(QWEN.layer)


def _read(fields: Fields) -> Sizes:
    layers = fields.number("num_hidden_layers", top=10_000)
    experts = replace(read_experts(fields), normalised=fields.flag("norm_topk_prob", True))
    step, without = fields.number("decoder_sparse_step", 1), _layers_without(fields)
    inner = fields.number("intermediate_size") if step > 1 or without else 0

    def feeds(count: int) -> list[Feed]:
        mixed = (i not in without and (i + 1) % step == 0 for i in range(count))
        return [experts if each else DenseSpec(inner) for each in mixed]

    return hybrid(fields, feeds(layers), feeds(_head_layers(fields)), interleaved=True)


def _layers_without(fields: Fields) -> list[int]:
    if fields.text.get("mlp_only_layers") is None:
        return []
    found = fields.expect("mlp_only_layers", list)
    if not all(type(i) is int and i >= 0 for i in found):
        raise fields.wrong("mlp_only_layers", "a list of layers' numbers")
    return found


def _head_layers(fields: Fields) -> int:
    for key in (OWN_COUNT, BEHIND_COUNT):
        if fields.text.get(key) is not None:
            return fields.head_layers(key)
    if fields.names is None:
        return 1
    numbers = [int(found[1]) for found in map(_LAYER.match, fields.names) if found]
    if max(numbers, default=0) >= MAX_DEPTH:
        raise CheckpointError(
            f"{fields.file}: {OWN_COUNT} is missing, and a tensor is named {QWEN.root}{QWEN.numbered}{max(numbers)}.*; "
            f"expected at most {MAX_DEPTH} layers of the MTP head, counted from 0. Rename it, or give the count."
        )
    # fusion without a layer: a head that is not whole, which says so as it is built
    return max(numbers, default=-1) + 1 or int(any(name.startswith(QWEN.root) for name in fields.names))


FAMILY = Family(
    name="Qwen3-Next",
    model_types=("qwen3_next",),
    layout=QWEN,
    read=_read,
    target="gated delta rule and gated attention; experts with a shared one",
    head="one layer of attention and experts",
    oracle="transformers",
)
