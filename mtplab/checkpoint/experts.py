"""Stacked experts taken apart into the single ones that FP8 layouts hold: parts of one tensor's bytes, under new names.

Only for families whose stacks are known to lie as [experts, output, input] with gate before up; others' are transposed
or interleaved (Llama 4, gpt-oss), which shapes alone do not tell. Source: transformers' Qwen3_5MoeExperts,
Qwen3NextExperts, Glm4MoeExperts and DeepseekV3Experts; releases hold `experts.{e}.{gate,up,down}_proj`, which
transformers stacks as it loads and takes apart as it saves, unless that is switched off. Reads no values.
"""

from __future__ import annotations

from typing import Any

from mtplab.checkpoint.config_json import text_config
from mtplab.checkpoint.header import TensorInfo

__all__ = ["single_experts", "stacked_parts"]

# model_type → the key that counts its experts
_FAMILIES = {
    "qwen3_5_moe": "num_experts",
    "qwen3_5_moe_text": "num_experts",
    "qwen3_next": "num_experts",
    "glm4_moe": "n_routed_experts",
    "deepseek_v3": "n_routed_experts",
    "step3p5": "moe_num_experts",
    "step3p7": "moe_num_experts",
}
_PARTS = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}
# Step's, whose experts lie one by one as `moe.experts.{e}.gate_proj`
_PARTS |= {f".moe.{part}.weight": (part,) for part in ("gate_proj", "up_proj", "down_proj")}


def stacked_parts(info: TensorInfo, config: dict[str, Any]) -> tuple[str, ...]:
    """The projections that a tensor stacks for all experts, or none where it is no stack that is known."""
    parts = next((names for suffix, names in _PARTS.items() if info.name.endswith(suffix)), ())
    if not parts or len(info.shape) != 3:
        return ()
    text = text_config(config)
    experts, n, k = info.shape
    hidden, inner = text.get("hidden_size"), text.get("moe_intermediate_size")
    expected = (hidden, inner)
    if parts != ("down_proj",) and isinstance(inner, int):
        expected = len(parts) * inner, hidden
    count = _FAMILIES.get(str(text.get("model_type", config.get("model_type"))))
    known = count is not None and text.get(count) == experts and expected == (n, k)
    return parts if known else ()


def single_experts(info: TensorInfo, config: dict[str, Any]) -> list[tuple[str, TensorInfo]]:
    """(module, its weight [n, k] as a part of the stack) for each expert, or nothing where the stack is not known."""
    parts = stacked_parts(info, config)
    if not parts:
        return []
    experts, n, k = info.shape
    group = info.name.rpartition(".")[0]
    if not group.endswith(".experts"):
        group = f"{group.rpartition('.')[0]}.experts"
    size, rows = info.nbytes // (experts * len(parts)), n // len(parts)
    found = []
    for expert in range(experts):
        for place, part in enumerate(parts):
            start = info.start + (expert * len(parts) + place) * size
            one = info._replace(shape=(rows, k), start=start, end=start + size)
            found.append((f"{group}.{expert}.{part}", one))
    return found
