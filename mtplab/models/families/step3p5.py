"""Step-3.5 and Step-3.7: sliding and full attention with heads and rotations of their own, a gate for each head,
experts chosen by sigmoids, clamped in some layers; an MTP head of a layer for each draft.

Keys are those of the releases, which transformers' `Step3p7TextConfig` takes too: lists by layer count the head's
layers behind the target's. Step-3.7 keeps them under `text_config`; its vision tower is not run. The head's layers,
each with an output matrix of its own, are as in vLLM's `step3p5_mtp.py` and transformers' `MtpModel`, which takes the
target's matrix in its place. vLLM gives layer 0 the target's hidden state from before its final norm, and the next
layers what the one before gives before its norm; transformers takes both after.

vLLM 0.32's runner fills the caches of layers 1 and 2 with drafts' slots alone; here, as in transformers, every layer
reads all slots (`head.py`), and the two agree at depth 1 only.
"""

from __future__ import annotations

from mtplab.checkpoint.draft_layouts import STEP
from mtplab.models.families.family import Family, Sizes
from mtplab.models.fields import Fields
from mtplab.models.spec import (
    AttentionSpec,
    DenseSpec,
    Feed,
    LayerSpec,
    Llama3,
    MixtureNames,
    MixtureSpec,
    Rotary,
)

__all__ = ["FAMILY"]

_FULL, _SLIDING = "full_attention", "sliding_attention"
_VARIANT = "a variant mtplab lacks"
_NAMES = MixtureNames(
    router="moe.gate",
    bias="moe.router_bias",
    experts="moe.experts",
    stacks=tuple((f"moe.{part}.weight", (part,)) for part in ("gate_proj", "up_proj", "down_proj")),
    shared="share_expert",
)


def _read(fields: Fields) -> Sizes:
    layers, heads = fields.number("num_hidden_layers", top=10_000), fields.head_layers(STEP.count_key)
    for key, value, why in (
        ("hidden_act", "silu", "the experts' and the MLP's activation"),
        ("att_impl_type", "GQA", _VARIANT),
        ("use_qk_norm", True, _VARIANT),
        ("zero_centered", True, "norms are stored less 1"),
        ("moe_router_activation", "sigmoid", _VARIANT),
        ("use_moe_router_bias", True, _VARIANT),
    ):
        fields.must_be(key, value, why)
    mixers, feeds = _mixers(fields, layers + heads), _feeds(fields, layers + heads)
    specs = [LayerSpec(i, *pair) for i, pair in enumerate(zip(mixers, feeds, strict=True))]
    return Sizes(
        layers=tuple(specs[:layers]),
        draft_layers=tuple(LayerSpec(i, each.mixer, each.feed) for i, each in enumerate(specs[layers:])),
        one_plus_norms=True,
    )


def _mixers(fields: Fields, count: int) -> list[AttentionSpec]:
    kinds = fields.by_layer("layer_types", count, _FULL)
    wrong = sorted({str(kind)[:40] for kind in kinds} - {_FULL, _SLIDING})
    if wrong:
        raise fields.wrong("layer_types", f"each {_FULL} or {_SLIDING}, found {', '.join(wrong)}")
    turning = fields.by_layer("use_rope_layers", count) if fields.text.get("use_rope_layers") else ()
    if any(each is not True and each != 1 for each in turning):
        raise fields.wrong("use_rope_layers", f"true for every layer: {_VARIANT}")
    window = fields.number("sliding_window") if _SLIDING in kinds else None
    heads = {_FULL: _heads(fields), _SLIDING: _heads(_of_sliding(fields))}
    scaling = _scaling(fields)
    turns = zip(
        kinds,
        fields.reals_by_layer("rope_theta", count, 10000.0),
        fields.reals_by_layer("partial_rotary_factors", count, 1.0, top=1),
        strict=True,
    )
    gated, bias = fields.flag("use_head_wise_attn_gate", False), fields.flag("attention_bias", False)
    return [
        AttentionSpec(
            *heads[kind],
            Rotary(fields.turned(heads[kind][2], share), theta, scaling.get(kind)),
            norms=True,
            head_gated=gated,
            bias=bias,
            window=window if kind == _SLIDING else None,
        )
        for kind, theta, share in turns
    ]


def _of_sliding(fields: Fields) -> Fields:
    """What sliding layers have otherwise."""
    other = fields.expect("attention_other_setting", dict) if fields.text.get("attention_other_setting") else {}
    if other.get("attention_type", _SLIDING) != _SLIDING:
        raise fields.wrong("attention_other_setting", f"attention_type {_SLIDING}: {_VARIANT}")
    return Fields(fields.text | other, fields.file)


def _heads(fields: Fields) -> tuple[int, int, int]:
    """(query heads, KV heads, features of one)."""
    heads, kv_heads = fields.number("num_attention_heads"), fields.number("num_attention_groups")
    fields.multiples(("num_attention_heads", heads, kv_heads))
    return heads, kv_heads, fields.number("head_dim")


def _scaling(fields: Fields) -> dict[str, Llama3]:
    """By the kinds of layers whose frequencies are scaled."""
    rope = fields.expect("rope_scaling", dict) if fields.text.get("rope_scaling") else {}
    if fields.rope_type(rope, "default", "llama3") == "default":
        return {}
    kinds = fields.text.get("yarn_only_types")
    if not isinstance(kinds, list) or not kinds or any(kind not in (_FULL, _SLIDING) for kind in kinds):
        # vLLM scales all where this is missing, transformers the full ones alone
        raise fields.wrong(
            "yarn_only_types", f"a list of the layer_types whose frequencies rope_scaling scales: {_FULL}, {_SLIDING}"
        )
    return dict.fromkeys(kinds, fields.llama3(rope))


def _feeds(fields: Fields, count: int) -> list[Feed]:
    limits, of_shared = (_limits(fields, key, count) for key in ("swiglu_limits", "swiglu_limits_shared"))
    size, mixtures = fields.number("intermediate_size"), _mixtures(fields)
    return [
        # the shared expert's limits are those of MLPs, too
        _experts(fields, limit, shared) if i in mixtures else DenseSpec(size, shared)
        for i, (limit, shared) in enumerate(zip(limits, of_shared, strict=True))
    ]


def _limits(fields: Fields, key: str, count: int) -> list[float | None]:
    """By layer; none past the list's end, as vLLM has it."""
    given = fields.text.get(key)
    if isinstance(given, list):
        fields = Fields(fields.text | {key: given + [None] * count}, fields.file)
    return fields.reals_by_layer(key, count, None)


def _mixtures(fields: Fields) -> frozenset[int]:
    """Numbers of the layers with experts."""
    given = fields.text.get("moe_layers_enum")
    found = [each.strip() for each in given.split(",")] if isinstance(given, str) else given
    if not isinstance(found, list) or not all(type(each) is int or _is_number(each) for each in found):
        raise fields.wrong("moe_layers_enum", "numbers of the layers with experts, such as '3,4,5'")
    return frozenset(map(int, found))


def _is_number(text: object) -> bool:
    return isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 6


def _experts(fields: Fields, limit: float | None, shared_limit: float | None) -> MixtureSpec:
    found = MixtureSpec(
        count=fields.number("moe_num_experts", top=65536),
        top_k=fields.number("moe_top_k"),
        size=fields.number("moe_intermediate_size"),
        shared_size=fields.number("share_expert_dim"),
        scores="sigmoid",
        normalised=fields.flag("norm_expert_weight", True),
        factor=fields.real("moe_router_scaling_factor", 1.0),
        limit=limit,
        shared_limit=shared_limit,
        names=_NAMES,
    )
    if found.top_k > found.count:
        raise fields.wrong("moe_top_k", f"at most moe_num_experts, {found.count}")
    return found


FAMILY = Family(
    name="Step-3.5, 3.7",
    model_types=("step3p5", "step3p7"),
    layout=STEP,
    read=_read,
    target="sliding and full attention, gated by head; MLPs, then experts with a shared one, chosen by sigmoids",
    head="a layer of attention for each draft, each with its own output matrix",
    oracle="transformers, drafts too",
    target_hidden="pre_norm",
    draft_hidden="pre_norm",
)
