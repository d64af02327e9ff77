"""lmdeploy's PyTorch engine as read in its 0.18.0 wheel: which list it takes, how it matches, what it names modules.

Only data, and the few refusals that its config class makes; matching is in `matching.py`.
"""

from __future__ import annotations

from typing import Any

from mtplab.checkpoint.lenses.base import LOAD_ERROR, LOSSY, UNKNOWN, Consequence, Engine, Family, Fixed, Method
from mtplab.checkpoint.lenses.fused import QKV_AND_MLP
from mtplab.checkpoint.strict_json import shown

__all__ = ["LMDEPLOY"]

_HEAD = Fixed(r"(^|\.)lm_head$", "plain", "lm_head is never given a quantisation config")
_ROUTER = Fixed(r"\.mlp\.gate$", "plain", "the router is never given a quantisation config")
_GATE = Fixed(r"\.shared_expert_gate$", "plain", "the shared expert's gate is never given a quantisation config")
_VISION = Fixed(r"^(model\.)?visual\.", "plain", "the vision config has no quantisation config of its own")
_GDN = (
    Fixed(r"\.in_proj_(a|b|ba)$", "plain", "in_proj_ba is never given a quantisation config (models/qwen3_5.py)"),
    Fixed(
        r"\.linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$",
        "fp8",
        "it is built without a name, and a nameless module is always quantised (models/qwen3_5.py)",
    ),
)
_NAMELESS = "modules of this family are built without names, and a nameless module is always quantised"
_DRAFT = Fixed("", "unknown", "the draft's construction in this family was not looked at", parts=("draft",))


def _fp8(content: dict[str, Any]) -> str | None:
    form = content.get("fmt", "e4m3")
    return None if form in ("e4m3", "e5m2") else f"fmt {shown(form)}, expected 'e4m3' or 'e5m2'"


def _blocks(content: dict[str, Any]) -> str | None:
    size = content.get("weight_block_size")
    if size == [128, 128] or (size is None and content.get("activation_scheme") == "static"):
        return None
    return f"builds blocks of 128x128 whatever the file has (here {shown(size)}); what follows is not known"


def _static(content: dict[str, Any]) -> Consequence | None:
    """Only the layer of blocks quantises what it is given."""
    if content.get("weight_block_size") is not None:
        return None
    return Consequence(UNKNOWN, "static FP8 layers copy the values as they are; what follows was not looked at")


def _qwen(note: str = "") -> Family:
    return Family(
        fused=QKV_AND_MLP,
        fixed=(
            _HEAD,
            _ROUTER,
            _GATE,
            _VISION,
            *_GDN,
            # https://github.com/InternLM/lmdeploy/pull/4572; before it, the name was empty and it was quantised
            Fixed(r"^mtp\.fc$", "plain", "mtp.fc is never given a quantisation config (models/qwen3_5_mtp.py)"),
        ),
        note=note,
    )


LMDEPLOY = Engine(
    name="lmdeploy",
    version="0.18.0",
    sources=(
        "lmdeploy/pytorch/config.py (QuantizationConfig.from_config, get_quant_method)",
        "lmdeploy/pytorch/models/utils/model.py (DeployModelMixin.update_quant_config)",
        "lmdeploy/pytorch/models/{qwen3_5,qwen3_5_moe,qwen3_5_mtp,qwen3_next,deepseek_v2,deepseek_mtp,glm4_moe}.py",
        "lmdeploy/pytorch/nn/linear/{__init__,blocked_fp8,static_fp8}.py (weight_loader_with_quant)",
        "https://github.com/InternLM/lmdeploy/tree/v0.18.0",
    ),
    methods={
        "fp8": Method(
            rule="name inside entry",
            keys=("ignored_layers", "modules_to_not_convert"),
            reads="leaves a module alone if its whole name is inside an entry",
            source="lmdeploy/pytorch/config.py (get_quant_method)",
            head=False,
            refuses=_fp8,
            unsure=_blocks,
            fp8_for_plain=_static,
        ),
        "compressed-tensors": Method(
            rule="full name or re:, unfused",
            keys=("ignore",),
            reads="",
            source="lmdeploy/pytorch/config.py (_parse_compressed_tensors_config)",
            fp8=False,
            refuses=lambda content: "of compressed-tensors it reads pack-quantized 4-bit weights only",
        ),
    },
    families={
        "": Family(
            fused=QKV_AND_MLP,
            fixed=(_HEAD, _ROUTER, _DRAFT),
            note="no names of this model family were looked at: asked with those on disk, q, k, v and gate, up fused",
        ),
        "qwen3_5": _qwen(),
        "qwen3_5 text": _qwen("it registers only Qwen3.5's ForConditionalGeneration: judged with the names on disk"),
        "qwen3_next": Family(fused=QKV_AND_MLP, fixed=(_HEAD, _ROUTER, _GATE, _DRAFT, Fixed("", "fp8", _NAMELESS))),
        "deepseek_v3": Family(
            fused=QKV_AND_MLP,
            # the decoder layer passes no name on, so every layer asks with the last part only
            renames=(
                (r"^.*\.mlp\.experts\.", "experts."),
                (r"^.*\.mlp\.(shared_experts\.[a-z_]+)$", r"\1"),
                (r"^.*\.mlp\.([a-z_]+)$", r"\1"),
            ),
            fixed=(
                _HEAD,
                _ROUTER,
                Fixed(r"\.self_attn\.", "fp8", _NAMELESS),
                Fixed(r"\.eh_proj$", "fp8", "eh_proj is built without a name, and so always quantised"),
                Fixed(r"\.shared_head\.head$", "unknown", "the draft's own head was not looked at"),
            ),
        ),
        "glm4_moe": Family(fused=QKV_AND_MLP, fixed=(_HEAD, _ROUTER, _DRAFT, Fixed("", "fp8", _NAMELESS))),
    },
    fp8_for_plain=Consequence(
        LOSSY, "its weights are quantised as they are loaded, and the precision the file kept is lost"
    ),
    plain_for_fp8=Consequence(LOAD_ERROR, "the scale has no parameter to go to, a KeyError"),
    unread="its config class raises a TypeError for any other method",
)
