"""Tiny random Qwen3.5 checkpoints, written through mtplab's own writer, for tests that need a shape of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mtplab.checkpoint.write import write_safetensors

DEFAULTS: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "mtp_num_hidden_layers": 1,
    "eos_token_id": None,
}


MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights with each layer's experts stacked, as transformers writes them."""
    out = {name: value for name, value in tensors.items() if ".experts." not in name}
    groups = dict.fromkeys(name.partition(".experts.")[0] + ".experts." for name in tensors if ".experts." in name)
    for at in groups:
        count = sum(name.startswith(at) and name.endswith("down_proj.weight") for name in tensors)
        parts = {p: [tensors[f"{at}{e}.{p}_proj.weight"] for e in range(count)] for p in ("gate", "up", "down")}
        both = zip(parts["gate"], parts["up"], strict=True)
        out[f"{at}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in both])
        out[f"{at}down_proj"] = torch.stack(parts["down"])
    return out


def tiny_tensors(config: dict[str, Any], seed: int = 0, spread: float = 1.0) -> dict[str, torch.Tensor]:
    """Random weights under the names of the text model; `spread` widens the logits."""
    c, g = config, torch.Generator().manual_seed(seed)
    h, inner, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    heads, dv = c["linear_num_value_heads"], c["linear_value_head_dim"]
    value, key = heads * dv, c["linear_num_key_heads"] * c["linear_key_head_dim"]
    out: dict[str, torch.Tensor] = {}

    def put(name: str, *shape: int, scale: float | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
        std = scale if scale is not None else shape[-1] ** -0.5
        out[name] = (torch.randn(*shape, generator=g) * std).to(dtype)

    def mlp(at: str, inner: int) -> None:
        put(f"{at}gate_proj.weight", inner, h)
        put(f"{at}up_proj.weight", inner, h)
        put(f"{at}down_proj.weight", h, inner)

    def mlp_and_norms(at: str) -> None:
        if "num_experts" in c:
            put(f"{at}mlp.gate.weight", c["num_experts"], h, scale=2 * h**-0.5)
            put(f"{at}mlp.shared_expert_gate.weight", 1, h)
            mlp(f"{at}mlp.shared_expert.", c["shared_expert_intermediate_size"])
            for expert in range(c["num_experts"]):
                mlp(f"{at}mlp.experts.{expert}.", c["moe_intermediate_size"])
        else:
            mlp(f"{at}mlp.", inner)
        put(f"{at}input_layernorm.weight", h, scale=0.1)
        put(f"{at}post_attention_layernorm.weight", h, scale=0.1)

    def attention(at: str) -> None:
        put(f"{at}self_attn.q_proj.weight", 2 * q, h)
        put(f"{at}self_attn.k_proj.weight", kv, h)
        put(f"{at}self_attn.v_proj.weight", kv, h)
        put(f"{at}self_attn.o_proj.weight", h, q)
        put(f"{at}self_attn.q_norm.weight", d, scale=0.1)
        put(f"{at}self_attn.k_norm.weight", d, scale=0.1)

    put("model.embed_tokens.weight", c["vocab_size"], h, scale=1.0)
    for i, kind in enumerate(c["layer_types"]):
        at = f"model.layers.{i}."
        mlp_and_norms(at)
        if kind == "full_attention":
            attention(at)
            continue
        put(f"{at}linear_attn.in_proj_qkv.weight", 2 * key + value, h)
        put(f"{at}linear_attn.in_proj_z.weight", value, h)
        put(f"{at}linear_attn.in_proj_b.weight", heads, h)
        put(f"{at}linear_attn.in_proj_a.weight", heads, h)
        put(f"{at}linear_attn.conv1d.weight", 2 * key + value, 1, c["linear_conv_kernel_dim"], scale=0.5)
        put(f"{at}linear_attn.out_proj.weight", h, value)
        put(f"{at}linear_attn.dt_bias", heads, scale=0.1)
        put(f"{at}linear_attn.A_log", heads, scale=0.5, dtype=torch.float32)
        out[f"{at}linear_attn.norm.weight"] = torch.ones(dv)
    put("model.norm.weight", h, scale=0.1)
    if not c["tie_word_embeddings"]:
        put("lm_head.weight", c["vocab_size"], h, scale=spread * h**-0.5)
    if c["mtp_num_hidden_layers"]:
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            put(f"mtp.{name}.weight", h, scale=0.1)
        put("mtp.fc.weight", h, 2 * h)
        for i in range(c["mtp_num_hidden_layers"]):
            mlp_and_norms(f"mtp.layers.{i}.")
            attention(f"mtp.layers.{i}.")
    return out


def write_tiny(folder: Path, seed: int = 0, spread: float = 1.0, stack: bool = False, **changes: Any) -> Path:
    """A checkpoint folder with config.json and model.safetensors. `changes` override `DEFAULTS` (and `MIXTURE` gives
    experts, one by one or, with `stack`, stacked)."""
    config = DEFAULTS | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = tiny_tensors(config, seed, spread)
    write_safetensors(folder / "model.safetensors", stacked(tensors) if stack else tensors)
    return folder


def write_deep(folder: Path, source: Path, layers: int, noise: float = 0.02) -> Path:
    """The bundled checkpoint with its head's layer copied `layers` times, each copy a little off: drafts by a layer per
    depth that the target accepts now and then, up to any depth."""
    config = json.loads((source / "config.json").read_text()) | {"mtp_num_hidden_layers": layers}
    tensors = load_file(source / "model.safetensors")
    draw = torch.Generator().manual_seed(layers)
    for name in [name for name in tensors if name.startswith("mtp.layers.0.")]:
        for i in range(1, layers):
            off = torch.randn(tensors[name].shape, generator=draw) * noise * tensors[name].float().std()
            tensors[name.replace("layers.0.", f"layers.{i}.")] = (tensors[name].float() + off).to(tensors[name].dtype)
    return _beside(source, folder, config, tensors)


def write_shallow(folder: Path, source: Path, kept: tuple[int, ...] = (0, 2, 3)) -> Path:
    """The bundled checkpoint, BF16 or FP8, with these layers of its target alone: for what is the same in every layer
    and slow, as a compiler is. Without layer 1 it still writes text, of whose drafts two in five are right; with one
    layer of each kind it writes two words in turn, whatever is wrong with its arithmetic."""
    config = json.loads((source / "config.json").read_text())
    config |= {"num_hidden_layers": len(kept), "layer_types": [config["layer_types"][layer] for layer in kept]}
    tensors = {}
    for name, value in load_file(source / "model.safetensors").items():
        words = name.split(".")
        if words[:2] == ["model", "layers"]:
            if int(words[2]) not in kept:
                continue
            words[2] = str(kept.index(int(words[2])))
        tensors[".".join(words)] = value
    return _beside(source, folder, config, tensors)


def _beside(source: Path, folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of these, with the tokenizer and the settings of another."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "generation_config.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder
