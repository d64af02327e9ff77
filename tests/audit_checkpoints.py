"""A tiny whole checkpoint of every family with an MTP head, for audits: names as published, values like trained ones.

Rows differ in size as trained weights' do, so that nothing looks random; norms lie about 0 or 1 as their family's do.
Uses nothing of mtplab.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint_builders import E4M3, write_checkpoint

H, I, BLOCK = 64, 96, 32  # hidden and intermediate size, block of scales
PLAIN = re.compile(r"(embed_tokens|embed|lm_head|head|gate|fc|eh_proj|input_proj|in_proj_[ab]|shared_expert_gate)$")


@dataclass
class Made:
    """A checkpoint in the making: faults are planted by changing it."""

    config: dict[str, Any]
    one_plus: bool = False
    suffix: str = ".weight_scale_inv"
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    quantization: dict[str, Any] | None = field(default_factory=dict)
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(3))

    def norm(self, *names: str, size: int = H) -> None:
        for name in names:
            values = torch.randn(size, generator=self.generator) * 0.1 + (0 if self.one_plus else 1)
            self.tensors[f"{name}.weight"] = values.bfloat16()

    def values(self, n: int, k: int) -> torch.Tensor:
        rows = torch.exp(0.6 * torch.randn(n, 1, generator=self.generator))
        return torch.randn(n, k, generator=self.generator) * rows * 0.05

    def linear(self, name: str, n: int = H, k: int = H) -> None:
        if PLAIN.search(name):
            self.tensors[f"{name}.weight"] = self.values(n, k).bfloat16()
        else:
            self.fp8(name, self.values(n, k))

    def fp8(self, name: str, values: torch.Tensor, top: float = 448) -> None:
        """Codes and scales of `values` in blocks."""
        n, k = values.shape
        blocks = values.view(n // BLOCK, BLOCK, k // BLOCK, BLOCK)
        scale = blocks.abs().amax((1, 3)) / top
        self.tensors[f"{name}.weight"] = (blocks / scale[:, None, :, None]).view(n, k).to(E4M3)
        self.tensors[f"{name}{self.suffix}"] = scale

    def mlp(self, prefix: str, size: int = I) -> None:
        for name in ("gate_proj", "up_proj"):
            self.linear(f"{prefix}.{name}", size, H)
        self.linear(f"{prefix}.down_proj", H, size)

    def attention(self, prefix: str, kv: int = 32, norms: bool = True) -> None:
        for name, size in (("q_proj", H), ("k_proj", kv), ("v_proj", kv), ("o_proj", H)):
            self.linear(f"{prefix}.{name}", size, H)
        if norms:
            self.norm(f"{prefix}.q_norm", f"{prefix}.k_norm", size=32)

    def mixture(self, prefix: str, shared: str = "shared_expert", experts: int = 3) -> None:
        self.linear(f"{prefix}.gate", experts, H)
        for expert in range(experts):
            self.mlp(f"{prefix}.experts.{expert}", 32)
        self.mlp(f"{prefix}.{shared}", 32)
        if shared == "shared_expert":
            self.linear(f"{prefix}.shared_expert_gate", 1, H)

    def block(self, prefix: str, moe: bool = False, **attention: Any) -> None:
        self.norm(f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm")
        self.attention(f"{prefix}.self_attn", **attention)
        self.mixture(f"{prefix}.mlp") if moe else self.mlp(f"{prefix}.mlp")

    def ends(self, root: str = "model.", embed: str = "embed_tokens", head: str = "lm_head") -> None:
        self.tensors[f"{root}{embed}.weight"] = self.values(96, H).bfloat16()
        self.tensors[f"{head}.weight"] = self.values(96, H).bfloat16()
        self.norm(f"{root}norm")

    def modules(self, prefix: str) -> list[str]:
        """Tensors whose names start so."""
        return [name for name in self.tensors if name.startswith(prefix)]

    def drop(self, *prefixes: str) -> None:
        for name in [name for name in self.tensors if name.startswith(prefixes)]:
            del self.tensors[name]

    def rename(self, old: str, new: str) -> None:
        self.tensors = {name.replace(old, new): tensor for name, tensor in self.tensors.items()}

    def write(self, folder: Path, shards: int = 1) -> Path:
        return write_checkpoint(folder, self.tensors, self.quantization, shards, self.config)


def _qwen(moe: bool, model: str) -> Made:
    made = Made({"model_type": model, "num_hidden_layers": 4, "mtp_num_hidden_layers": 1}, one_plus=True)
    made.ends()
    for i in range(4):
        prefix = f"model.layers.{i}"
        if i == 3:
            made.block(prefix, moe)
            continue
        made.norm(f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm")
        for name in ("in_proj_qkv", "in_proj_z", "out_proj"):
            made.linear(f"{prefix}.linear_attn.{name}")
        for name in ("in_proj_a", "in_proj_b"):
            made.linear(f"{prefix}.linear_attn.{name}", 2)
        made.tensors[f"{prefix}.linear_attn.A_log"] = torch.zeros(2)
        made.tensors[f"{prefix}.linear_attn.dt_bias"] = torch.ones(2)
        made.tensors[f"{prefix}.linear_attn.conv1d.weight"] = made.values(3 * H, 4).view(3 * H, 1, 4).bfloat16()
        made.tensors[f"{prefix}.linear_attn.norm.weight"] = torch.ones(32)
        made.mixture(f"{prefix}.mlp") if moe else made.mlp(f"{prefix}.mlp")
    made.linear("mtp.fc", H, 2 * H)
    made.norm("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    made.block("mtp.layers.0", moe)
    return made


def _wrapped() -> Made:
    made = _qwen(True, "qwen3_5_moe_text")
    made.config = {"model_type": "qwen3_5_moe", "num_hidden_layers": None, "mtp_num_hidden_layers": None,
                   "text_config": made.config}  # fmt: skip
    made.tensors = {re.sub(r"^model\.", "model.language_model.", name): t for name, t in made.tensors.items()}
    return made


def _mla(made: Made, prefix: str) -> None:
    made.norm(f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm")
    attn = f"{prefix}.self_attn"
    made.norm(f"{attn}.q_a_layernorm", f"{attn}.kv_a_layernorm", size=32)
    for name, n, k in (("q_a_proj", 32, H), ("q_b_proj", H, 32), ("kv_a_proj_with_mqa", 32, H), ("kv_b_proj", H, 32),
                       ("o_proj", H, H)):  # fmt: skip
        made.linear(f"{attn}.{name}", n, k)


def _behind(inner: str, count: int, model: str, **head: str) -> Made:
    """Layers 0 dense, 1 and 2 mixtures, and `count` of a head behind them."""
    step = bool(inner)
    made = Made({"model_type": model, "num_hidden_layers": 3, "num_nextn_predict_layers": count}, one_plus=step)
    made.config["mtp_num_hidden_layers"] = None
    made.ends()
    for i in range(3 + count):
        prefix = f"model.layers.{i}"
        if i >= 3:
            made.norm(*(f"{prefix}.{name}" for name in ("enorm", "hnorm", f"{inner}shared_head.norm")))
            made.linear(f"{prefix}.eh_proj", H, 2 * H)
            for name, target in head.items():
                made.tensors[f"{prefix}.{name.replace('__', '.')}.weight"] = made.tensors[target].clone()
        if step:
            made.block(prefix, moe=0 < i < 3)
        else:
            _mla(made, prefix)
            made.mixture(f"{prefix}.mlp", "shared_experts") if i else made.mlp(f"{prefix}.mlp")
    return made


def _deepseek_v3() -> Made:
    return _behind("", 1, "deepseek_v3", embed_tokens="model.embed_tokens.weight", shared_head__head="lm_head.weight")


def _step() -> Made:
    return _behind("transformer.", 3, "step3p5", transformer__shared_head__output="lm_head.weight")


def _mimo_7b() -> Made:
    made = Made({"model_type": "mimo", "num_hidden_layers": 2, "num_nextn_predict_layers": 1})
    made.config["mtp_num_hidden_layers"] = None
    made.ends()
    for i in range(2):
        made.block(f"model.layers.{i}", norms=False)
    head = "model.mtp_layers.0"
    made.norm(*(f"{head}.{name}" for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")))
    made.linear(f"{head}.input_proj", H, 2 * H)
    made.block(head, norms=False)
    return made


def _mimo_v2() -> Made:
    """Full attention with one KV width, sliding windows with another; the head's layers have the latter."""
    made = Made({"model_type": "mimo_v2_flash", "num_hidden_layers": 3, "num_nextn_predict_layers": 3})
    made.config["mtp_num_hidden_layers"] = None
    made.ends()
    for i in range(3):
        made.block(f"model.layers.{i}", moe=i > 0, norms=False, kv=32 if i == 0 else 64)
    for i in range(3):
        head = f"model.mtp.layers.{i}"
        made.norm(*(f"{head}.{name}" for name in ("enorm", "hnorm", "final_layernorm")))
        made.linear(f"{head}.eh_proj", H, 2 * H)
        made.norm(f"{head}.input_layernorm", f"{head}.pre_mlp_layernorm")
        made.attention(f"{head}.self_attn", norms=False, kv=64)
        made.mlp(f"{head}.mlp")
    return made


def _deepseek_v4() -> Made:
    made = Made({"model_type": "deepseek_v4", "num_hidden_layers": 2, "num_nextn_predict_layers": 1}, suffix=".scale")
    made.config["mtp_num_hidden_layers"] = None
    made.ends("", "embed", "head")
    for prefix in ("layers.0", "layers.1", "mtp.0"):
        made.norm(f"{prefix}.attn_norm", f"{prefix}.ffn_norm")
        for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b"):
            made.linear(f"{prefix}.attn.{name}")
        made.linear(f"{prefix}.ffn.gate", 3, H)
        for expert in range(3):
            for name, n, k in (("w1", 32, H), ("w2", H, 32), ("w3", 32, H)):
                made.linear(f"{prefix}.ffn.experts.{expert}.{name}", n, k)
    made.norm("mtp.0.enorm", "mtp.0.hnorm", "mtp.0.norm")
    made.linear("mtp.0.e_proj")
    made.linear("mtp.0.h_proj")
    made.tensors["mtp.0.hc_head_fn"] = torch.ones(4, 4 * H)
    return made


def _nemotron() -> Made:
    made = Made({"model_type": "nemotron_h", "num_hidden_layers": 2, "num_nextn_predict_layers": 1})
    made.config["mtp_num_hidden_layers"] = None
    made.ends("backbone.", "embeddings")
    for i in range(2):
        made.norm(f"backbone.layers.{i}.norm")
        made.linear(f"backbone.layers.{i}.mixer.out_proj")
    made.norm("mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.0.norm", "mtp.layers.1.norm",
              "mtp.layers.1.final_layernorm")  # fmt: skip
    made.linear("mtp.layers.0.eh_proj", H, 2 * H)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        made.linear(f"mtp.layers.0.mixer.{name}")
    made.linear("mtp.layers.1.mixer.gate", 3, H)
    for expert in range(3):
        for name in ("up_proj", "down_proj"):
            made.linear(f"mtp.layers.1.mixer.experts.{expert}.{name}")
    return made


_MAKERS: dict[str, Callable[[], Made]] = {
    "qwen3.5": lambda: _qwen(False, "qwen3_5_text"),
    "qwen3-next": lambda: _qwen(True, "qwen3_next"),
    "qwen3.5-vl": _wrapped,
    "deepseek-v3": _deepseek_v3,
    "deepseek-v4": _deepseek_v4,
    "mimo-7b": _mimo_7b,
    "mimo-v2": _mimo_v2,
    "nemotron-3": _nemotron,
    "step-3.5": _step,
}
FAMILIES = tuple(_MAKERS)


def make(family: str, plain: bool = False) -> Made:
    """A whole checkpoint, block FP8 with every linear weight that is not listed, or in BF16."""
    made = _MAKERS[family]()
    if plain:
        for name, tensor in list(made.tensors.items()):
            if tensor.dtype == E4M3:
                scale = made.tensors.pop(name.removesuffix(".weight") + made.suffix)
                spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
                made.tensors[name] = (tensor.float() * spread).bfloat16()
        made.quantization = None
        return made
    listed = [n.removesuffix(".weight") for n, t in made.tensors.items()
              if n.endswith(".weight") and t.dim() == 2 and t.dtype != E4M3]  # fmt: skip
    made.quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
                         "modules_to_not_convert": listed}  # fmt: skip
    return made
