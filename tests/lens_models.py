"""Models as engines' lenses see them: names, parts and what is stored in FP8, without any tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mtplab.checkpoint.lenses import View
from mtplab.checkpoint.names import draft_prefixes, kind_of, part_of

FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
CT: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "block"},
            "input_activations": {"strategy": "group", "group_size": 128},
        }
    },
}
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "FP8"}
QUARK: dict[str, Any] = {"quant_method": "quark", "export": {}}

QWEN = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "mtp_num_hidden_layers": 1},
}
QWEN_TEXT = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "mtp_num_hidden_layers": 1,
}
QWEN_NEXT = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 4}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2}

_ATTENTION = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
_MLP = [f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
_SHARED = [f"mlp.shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")]


def views(names: Iterable[str], plain: Iterable[str], config: dict[str, Any]) -> list[View]:
    """Two-dimensional weights of these names, in FP8 with a scale but for `plain` (names or their ends)."""
    drafts, ends = draft_prefixes(config), tuple(plain)
    made = []
    for name in names:
        fp8 = not any(name == end or name.endswith("." + end) for end in ends)
        made.append(View(name, kind_of(name, 2), part_of(name, drafts), fp8, fp8))
    return made


def qwen_names(root: str = "model.language_model.", layers: int = 4, moe: bool = False) -> list[str]:
    """Linear layers of a Qwen3.5 model: every fourth layer full attention, one MTP layer."""
    mlp = _MLP
    if moe:
        mlp = ["mlp.gate", "mlp.shared_expert_gate", *_SHARED]
        mlp += [f"mlp.experts.{e}.{name}" for e in range(2) for name in ("gate_proj", "up_proj", "down_proj")]
    delta = [f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")]
    names = []
    for layer in range(layers):
        mixer = _ATTENTION if layer % 4 == 3 else delta
        names += [f"{root}layers.{layer}.{name}" for name in (*mixer, *mlp)]
    return [*names, "lm_head", "mtp.fc", *(f"mtp.layers.0.{name}" for name in (*_ATTENTION, *mlp))]


QWEN_PLAIN = ("in_proj_a", "in_proj_b", "mlp.gate", "shared_expert_gate", "lm_head", "mtp.fc")


def qwen(root: str = "model.language_model.", moe: bool = False, plain: Iterable[str] = QWEN_PLAIN) -> list[View]:
    """A Qwen3.5 checkpoint in the published layout."""
    return views(qwen_names(root, moe=moe), plain, QWEN)


def deepseek(layers: int = 61, experts: int = 256) -> list[View]:
    """A DeepSeek-V3 checkpoint: three dense layers, the MTP layer behind the last, routers and eh_proj plain."""
    attention = [f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")]
    names = []
    for layer in range(layers + 1):
        mlp = _MLP
        if layer >= 3:
            mlp = ["mlp.gate", *(f"mlp.shared_experts.{name}" for name in ("gate_proj", "up_proj", "down_proj"))]
            mlp += [f"mlp.experts.{e}.{name}" for e in range(experts) for name in ("gate_proj", "up_proj", "down_proj")]
        names += [f"model.layers.{layer}.{name}" for name in (*attention, *mlp)]
    names += [f"model.layers.{layers}.eh_proj", "lm_head"]
    return views(names, ("mlp.gate", "eh_proj", "lm_head"), {**DEEPSEEK, "num_hidden_layers": layers})


def llama() -> list[View]:
    """A plain decoder of two layers, q, k, v, o and the MLP in FP8."""
    names = [f"model.layers.{layer}.{name}" for layer in range(2) for name in (*_ATTENTION, *_MLP)]
    return views([*names, "lm_head"], ("lm_head",), LLAMA)
