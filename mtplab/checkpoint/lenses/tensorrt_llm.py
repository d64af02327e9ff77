"""TensorRT-LLM's PyTorch backend as read in its repository: which list it takes, how it matches, what it names.

Only data, the refusals and rewritings that its config code makes; matching is in `matching.py`.
"""

from __future__ import annotations

import re
from typing import Any

from mtplab.checkpoint.lenses.base import UNKNOWN, Consequence, Engine, Family, Fixed, Method
from mtplab.checkpoint.lenses.fused import GDN, QKV_AND_MLP
from mtplab.checkpoint.strict_json import shown

__all__ = ["TENSORRT_LLM"]

_COMMIT = "008e0af8980fc560003631ba4ac37828836a91c8"
_CONFIG = f"https://github.com/NVIDIA/TensorRT-LLM/blob/{_COMMIT}/tensorrt_llm/_torch/model_config.py"
# excluded whatever the list says; the loader multiplies kv_b_proj's scale in by itself
_BLOCKS = ("*kv_b_proj*", "*k_b_proj*", "*eh_proj")
_HEAD = Fixed(r"(^|\.)lm_head$", "plain", "LMHead takes no quantisation config")
_ROUTER = Fixed(r"\.mlp\.(gate|shared_expert_gate)$", "unknown", "how routers are built was not looked at")
_VISION = Fixed(r"^(model\.)?visual\.", "unknown", "the vision tower's names were not looked at")
_DRAFT_ENTRY = re.compile(r"mtp\.(layers\.[0-9]*\*?(\.|$)|fc(\*?$|\.))")
_READS = "takes an entry for the full name of a module or of one above it, or a glob over that"


def _fp8(content: dict[str, Any]) -> str | None:
    size = content.get("weight_block_size")
    if size is not None and list(size if isinstance(size, list) else []) != [128, 128]:
        return f"weight_block_size {shown(size)}; it reads 128x128 only"
    return None


def _neither(content: dict[str, Any]) -> str | None:
    if content.get("weight_block_size") or content.get("activation_scheme") == "static":
        return None
    return "reads fp8 in blocks or with static activations; what it makes of others is not known"


def _compressed(content: dict[str, Any]) -> str | None:
    groups = content.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return "config_groups is missing"
    if len(groups) > 1:
        return None
    group = next(iter(groups.values()))
    weights = group.get("weights") if isinstance(group, dict) else None
    strategy = weights.get("strategy") if isinstance(weights, dict) else None
    if isinstance(weights, dict) and weights.get("num_bits") == 8 and strategy not in ("channel", "block"):
        return f"weights of strategy {shown(strategy)}; of 8 bits it reads channel and block"
    return None


def _qwen(entries: list[str], method: str) -> list[str]:
    """Qwen3.5's lists are rewritten to the runtime's names.

    HF fp8 lists lose what begins with `mtp.`; others keep the entries for its layers and `mtp.fc`. At run time those
    are the layers behind the target's last, one name for one, so they keep their names here.
    """
    made = []
    for entry in entries:
        if entry.startswith("model.language_model."):
            entry = "model." + entry.removeprefix("model.language_model.")
        if entry.startswith("mtp"):
            if method != "fp8" and _DRAFT_ENTRY.match(entry):
                made.append(entry)
            continue
        end, star = ("$", "") if method == "fp8" else (r"(\b|\*)", "*")
        entry = re.sub(rf"\.in_proj_[ab]{end}", f".in_proj_ba{star}", entry)
        entry = re.sub(rf"\.in_proj_(q|k|v|z|qkv){end}", f".in_proj_qkvz{star}", entry)
        made.append(entry)
    return made


_GDN = Fixed(
    r"\.linear_attn\.in_proj_(qkv|qkvz|z)$",
    "as stored",
    "in_proj_qkvz is kept unquantised, and its FP8 values are multiplied out at load (qwen3_5_weight_mapper.py)",
    methods=("fp8",),
)
_QWEN = Family(
    fused={**QKV_AND_MLP, **GDN},
    renames=((r"^model\.language_model\.", "model."),),
    entries=_qwen,
    fixed=(
        _HEAD,
        _ROUTER,
        _VISION,
        _GDN,
        Fixed(
            r"^mtp\.",
            "unknown",
            "entries that begin with mtp. are dropped from an HF fp8 list (modeling_qwen3_5.py), and how the draft "
            "is then built was not looked at",
            methods=("fp8",),
        ),
        Fixed(r"^mtp\.fc$", "unknown", "how mtp.fc is built was not looked at"),
    ),
)


_DEEPSEEK = (
    _HEAD,
    _ROUTER,
    Fixed(r"\.kv_b_proj$", "as stored", "kv_b_proj is always excluded and its scale multiplied in at load"),
    Fixed(r"\.indexer\.", "unknown", "the indexer's projections were not looked at"),
    Fixed(r"\.shared_head\.head$", "unknown", "the draft's own head was not looked at"),
    Fixed(r"\.self_attn\.(q_a_proj|kv_a_proj_with_mqa)$", "unknown", "their fused name's exclusion was not looked at"),
)

TENSORRT_LLM = Engine(
    name="TensorRT-LLM",
    version=f"commit {_COMMIT[:9]}",
    sources=(
        f"{_CONFIG} (load_hf_quant_config, _build_modelopt_quant_config)",
        "tensorrt_llm/models/modeling_utils.py (QuantConfig.is_module_excluded_from_quantization)",
        "tensorrt_llm/_torch/models/modeling_utils.py (apply_quant_config_exclude_modules)",
        "tensorrt_llm/_torch/models/modeling_qwen3_5.py, commit 00620eb02 (_normalize_exclude_modules)",
        "tensorrt_llm/models/quant_config_utils.py, commit 21156a7a5 (compressed-tensors)",
    ),
    methods={
        "fp8": Method(
            rule="glob or above",
            keys=("modules_to_not_convert", "ignored_layers", "ignore"),
            combine=True,
            added=_BLOCKS,
            reads=_READS,
            source=_CONFIG,
            refuses=_fp8,
            unsure=_neither,
        ),
        "mxfp8": Method(
            rule="glob or above",
            keys=("modules_to_not_convert", "ignored_layers", "ignore"),
            combine=True,
            reads=_READS,
            source=_CONFIG,
        ),
        "modelopt": Method(
            rule="glob or above",
            keys=("quantization.exclude_modules", "ignore", "exclude_modules"),
            reads=_READS,
            source="tensorrt_llm/quantization/modelopt_config.py",
        ),
        "compressed-tensors": Method(
            rule="glob or above",
            keys=("modules_to_not_convert", "ignore"),
            combine=True,
            reads=_READS,
            source="tensorrt_llm/models/quant_config_utils.py",
            refuses=_compressed,
        ),
        **{
            name: Method(
                rule="full name",
                keys=(),
                reads="",
                source=_CONFIG,
                unknown=f"does not read {name}: load_hf_quant_config has no branch for it; what follows is not known",
            )
            for name in ("quark", "fbgemm_fp8", "auto-round", "torchao")
        },
    },
    families={
        "": Family(
            fused=QKV_AND_MLP,
            fixed=(_HEAD, _ROUTER, Fixed("", "unknown", "the draft's names were not looked at", parts=("draft",))),
            note="no names of this model family were looked at: asked with those on disk, q, k, v and gate, up fused",
        ),
        "qwen3_5": _QWEN,
        "deepseek_v3": Family(fused={"gate_up_proj": QKV_AND_MLP["gate_up_proj"]}, fixed=_DEEPSEEK),
    },
    fp8_for_plain=Consequence(UNKNOWN, "what its loader then does was not looked at"),
    plain_for_fp8=Consequence(UNKNOWN, "what its loader then does was not looked at"),
    unread="load_hf_quant_config has no branch for it",
)
