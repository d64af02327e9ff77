"""Tiny random checkpoints of model families, in the layout and under the names of the published releases, with their
MTP heads.

`write_NAME(folder, **overrides)` for each of `FAMILIES`; `overrides` change keys of its config.json (of the text's,
where that is nested), and `seed`, `heads` (head layers) and `state` (how much of the hidden state a head lets in) its
weights. `write_fp8` makes the block-FP8 release of one. Names and shapes of the target and of the head's decoder block
are what transformers' `save_pretrained` writes for a model of that many layers more; what else a head has, and what it
is called, is from the loaders that mtplab/checkpoint/draft_layouts.py names. Values are random and representable in
BF16, norms are not one, logits are spread, and a head is right now and then. `load_target` gives transformers' model of
a folder, every weight of the target found.

Knows nothing of how any of it is run here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

__all__ = [
    "FAMILIES", "WIDE", "block_fp8", "draft_names", "load_target", "longer", "model_of", "ready_for_mtp", "write_fp8",
]  # fmt: skip

VOCABULARY, HIDDEN = 64, 64
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "max_position_embeddings": 256, "initializer_range": 0.02,
    "bos_token_id": 0, "eos_token_id": 1, "attention_dropout": 0.0,
}  # fmt: skip

QWEN3_NEXT: dict[str, Any] = _COMMON | {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 4,
    "full_attention_interval": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_scaling": None, "rms_norm_eps": 1e-6,
    "intermediate_size": 96, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "decoder_sparse_step": 1, "mlp_only_layers": [1],
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
    "norm_topk_prob": True, "attention_bias": False, "use_sliding_window": False,
}  # fmt: skip

_NEXT_ALONE = ("mlp_only_layers", "decoder_sparse_step", "rope_theta")
QWEN3_5_MOE: dict[str, Any] = {key: value for key, value in QWEN3_NEXT.items() if key not in _NEXT_ALONE} | {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
}  # fmt: skip

DEEPSEEK_V3: dict[str, Any] = _COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 3,
    "first_k_dense_replace": 1, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 0.8,
    },
    "attention_bias": False, "num_nextn_predict_layers": 1,
}  # fmt: skip

GLM4_MOE: dict[str, Any] = _COMMON | {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_hidden_layers": 3,
    "first_k_dense_replace": 1, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5, "rope_theta": 1000000,
    "rope_scaling": None, "rms_norm_eps": 1e-5, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 1,
}  # fmt: skip

MIMO: dict[str, Any] = _COMMON | {
    "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_hidden_layers": 3, "intermediate_size": 96,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "attention_bias": True, "rms_norm_eps": 1e-5,
    "rope_theta": 640000, "rope_scaling": None, "use_sliding_window": False, "sliding_window": 256,
    "max_window_layers": 3, "num_nextn_predict_layers": 1,
}  # fmt: skip

_FULL, _SLIDING = "full_attention", "sliding_attention"
# per-layer lists count the head's layers too, and transformers takes them so only where they do
STEP_TEXT: dict[str, Any] = _COMMON | {
    "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "num_hidden_layers": 5, "intermediate_size": 96,
    "num_attention_heads": 4, "num_attention_groups": 2, "head_dim": 32, "att_impl_type": "GQA",
    "attention_other_setting": {
        "attention_type": _SLIDING, "num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 32,
    },
    "layer_types": [_FULL, *[_SLIDING] * 3, _FULL, *[_SLIDING] * 3], "sliding_window": 8,
    "rope_theta": [5000000.0, *[10000.0] * 3, 5000000.0, *[10000.0] * 3],
    "partial_rotary_factors": [0.5, *[1.0] * 3, 0.5, *[1.0] * 3],
    "rope_scaling": {
        "rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0,
        "original_max_position_embeddings": 64,
    },
    "yarn_only_types": [_FULL], "use_rope_layers": [], "use_qk_norm": True, "use_head_wise_attn_gate": True,
    "moe_layers_enum": "2,3,4", "use_moe": True, "moe_num_experts": 8, "moe_top_k": 2, "moe_intermediate_size": 32,
    "share_expert_dim": 48, "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0,
    "use_moe_router_bias": True, "need_fp32_gate": True, "norm_expert_weight": True, "zero_centered": True,
    "swiglu_limits": [*[0.0] * 4, 1.5, *[0.0] * 3], "swiglu_limits_shared": [*[0.0] * 4, 1.0, *[0.0] * 3],
    "rms_norm_eps": 1e-5, "num_nextn_predict_layers": 3,
}  # fmt: skip
_STEP_VISION: dict[str, Any] = {
    "model_type": "perception_encoder", "width": 16, "layers": 1, "heads": 2, "image_size": 28, "patch_size": 14,
    "mlp_ratio": 2.0, "ls_init_value": 0.1, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip

# sizes at which blocks of 128 are whole, more than one, and ragged
WIDE: dict[str, dict[str, Any]] = {
    "qwen3_next": {"hidden_size": 256, "intermediate_size": 192, "moe_intermediate_size": 128, "head_dim": 64},
    "deepseek_v3": {"hidden_size": 256, "intermediate_size": 192, "moe_intermediate_size": 128, "q_lora_rank": 160},
    "glm4_moe": {"hidden_size": 256, "intermediate_size": 192, "moe_intermediate_size": 128, "head_dim": 64},
    "mimo": {"hidden_size": 256, "intermediate_size": 192, "head_dim": 128},
    "step3p7": {
        "hidden_size": 256, "intermediate_size": 192, "moe_intermediate_size": 128, "head_dim": 64,
        "attention_other_setting": STEP_TEXT["attention_other_setting"] | {"head_dim": 64},
    },
}


# the families


def write_qwen3_next(folder: Path, **overrides: Any) -> Path:
    """Qwen3-Next: gated delta rule and gated full attention, a layer without experts; `mtp.*`, a mixture; no count of
    head layers in config.json, as published."""
    return _write(folder, QWEN3_NEXT, _qwen_head, one_plus=True, overrides=overrides)


def write_qwen3_5_moe(folder: Path, **overrides: Any) -> Path:
    """Qwen3.5's text model with experts, which runs here already: to prove a comparison on."""
    return _write(folder, QWEN3_5_MOE, _qwen_head, one_plus=True, overrides=overrides)


def write_deepseek_v3(folder: Path, **overrides: Any) -> Path:
    """DeepSeek-V3: latent attention with a query rank (`q_lora_rank=None`: without), groups of experts, yarn; the head
    behind the target's layers, with copies of embedding and output matrix."""
    return _write(folder, DEEPSEEK_V3, _behind_head, overrides=overrides)


def write_glm4_moe(folder: Path, **overrides: Any) -> Path:
    """GLM-4.5: biases on q, k, v, half of each head rotated, norms of q and k (GLM-4.5-Air: `use_qk_norm=False`)."""
    return _write(folder, GLM4_MOE, _behind_head, overrides=overrides)


def write_mimo(folder: Path, **overrides: Any) -> Path:
    """MiMo-7B: Qwen2's layers; `model.mtp_layers.*`, hidden state before embedding."""
    return _write(folder, MIMO, _mimo_head, overrides=overrides)


def write_step3p7(folder: Path, *, text_only: bool = False, infix: str = "transformer.", **overrides: Any) -> Path:
    """Step-3.7 with its vision tower, or `text_only` Step-3.5: sliding and full layers of other head counts and
    rotations, gates by head, stacked experts, clamped ones; three dense head layers with their own output matrices,
    named with `infix`, without which alone transformers' `generate(use_mtp=True)` finds their norms."""
    head = functools.partial(_step_head, infix=infix)
    return _write(folder, STEP_TEXT, head, one_plus=True, vision=not text_only, overrides=overrides)


FAMILIES: dict[str, Callable[..., Path]] = {
    "qwen3_next": write_qwen3_next,
    "deepseek_v3": write_deepseek_v3,
    "glm4_moe": write_glm4_moe,
    "mimo": write_mimo,
    "step3p7": write_step3p7,
}


def write_fp8(family: str, folder: Path, **overrides: Any) -> Path:
    """The block-FP8 release of a family at `WIDE` sizes: E4M3 codes, `weight_scale_inv` by 128 × 128, single experts;
    in BF16 what the releases keep so. The BF16 checkpoint it is of lies in `folder`/bf16."""
    source = FAMILIES[family](folder / "bf16", **(WIDE[family] | overrides))
    tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    out: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if value.ndim < 2 or not name.endswith(".weight") or _KEPT.search(name):
            out[name] = value
        else:
            out[name], out[f"{name}_scale_inv"] = block_fp8(value.float())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    }  # fmt: skip
    if family != "deepseek_v3":  # whose releases have no list
        kept = {name.rpartition(".")[0] for name, value in out.items() if name.endswith(".weight") and value.ndim >= 2}
        config["quantization_config"]["modules_to_not_convert"] = sorted(
            name for name in kept if out[f"{name}.weight"].dtype != torch.float8_e4m3fn
        )
    save_file(out, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


# two-dimensional weights that block-FP8 releases keep in BF16
_KEPT = re.compile(
    r"embed_tokens|lm_head|shared_head\.|(mlp|moe)\.gate\.|shared_expert_gate|in_proj_ba|conv1d|g_proj|"
    r"eh_proj|mtp\.fc\.|input_proj|vision_model|vit_large_projector"
)


def block_fp8(weight: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    """[..., n, k] → codes of that shape and scales [..., ⌈n/128⌉, ⌈k/128⌉], which codes are multiplied by."""
    *_, n, k = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -k % block, 0, -n % block))
    tiles = padded.unflatten(-1, (-1, block)).unflatten(-3, (-1, block))  # [..., N, 128, K, 128]
    scale = tiles.abs().amax((-3, -1)) / torch.finfo(torch.float8_e4m3fn).max
    scale = torch.where(scale == 0, 1.0, scale)
    codes = (tiles / scale[..., :, None, :, None]).flatten(-4, -3).flatten(-2, -1)[..., :n, :k]
    return codes.to(torch.float8_e4m3fn).contiguous(), scale.contiguous()


# writing


def _write(
    folder: Path,
    base: dict[str, Any],
    head: Callable[[dict[str, Tensor], dict[str, Any], int, _Draw], None],
    *,
    one_plus: bool = False,
    vision: bool = False,
    overrides: dict[str, Any],
) -> Path:
    """`head` renames the layers behind the target's and adds what else the head has."""
    own = {key: overrides.pop(key) for key in ("seed", "heads", "state") if key in overrides}
    config = base | overrides
    heads = own.get("heads", config.get("num_nextn_predict_layers", config.get("mtp_num_hidden_layers", 1)))
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        if key in config:
            config[key] = heads
    layers = config["num_hidden_layers"] + heads
    config = {key: value[:layers] if isinstance(value, list) else value for key, value in config.items()}
    shapes = _shapes(config, heads, vision)
    draw = _Draw(own.get("seed", 0), one_plus, own.get("state", 0.5))
    tensors = {name: draw(name, shape) for name, shape in shapes.items()}
    head(tensors, config, heads, draw)
    if vision:
        config = {
            "architectures": ["Step3p7ForConditionalGeneration"], "model_type": "step3p7", "image_token_id": 63,
            "projector_bias": False, "torch_dtype": "bfloat16", "text_config": config, "vision_config": _STEP_VISION,
        }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _shapes(config: dict[str, Any], heads: int, vision: bool) -> dict[str, torch.Size]:
    """Names and shapes that transformers writes for the target with `heads` layers more: the head's blocks."""
    with tempfile.TemporaryDirectory() as at, _quiet():
        model_of(longer(config, heads)).to(torch.bfloat16).save_pretrained(at)
        made = load_file(Path(at) / "model.safetensors")
    seen = ("vision_model.", "vit_large_projector.")
    return {name: value.shape for name, value in made.items() if vision or not name.startswith(seen)}


def longer(config: dict[str, Any], heads: int) -> dict[str, Any]:
    """A config.json that counts `heads` head layers among the target's."""
    if "text_config" in config:
        return config | {"text_config": longer(config["text_config"], heads)}
    layers = config["num_hidden_layers"]
    more = config | {"num_hidden_layers": layers + heads, "num_nextn_predict_layers": 0}
    if "full_attention_interval" in config:
        every = config["full_attention_interval"]
        kinds = ["linear_attention" if (i + 1) % every else _FULL for i in range(layers)]
        more["layer_types"] = kinds + [_FULL] * heads
    return {key: value[: layers + heads] if isinstance(value, list) else value for key, value in more.items()}


class _Draw:
    """Random values by a tensor's name and shape, in BF16, or in float32 where releases have it so."""

    def __init__(self, seed: int, one_plus: bool, state: float) -> None:
        self.generator, self.one_plus, self.state = torch.Generator().manual_seed(seed), one_plus, state

    def __call__(self, name: str, shape: torch.Size | tuple[int, ...]) -> Tensor:
        value = torch.randn(shape, generator=self.generator)
        plain_norm = "linear_attn.norm" in name or "vision" in name
        if re.search(r"norm\.weight$|(ln_\w+|layernorm)\.weight$", name):
            value = value * 0.4 + (0.0 if self.one_plus and not plain_norm else 1.0)
        else:
            value = value * _deviation(name, value.shape)
        value = value.to(torch.bfloat16)
        return value.float() if re.search(r"e_score_correction_bias|router_bias|A_log", name) else value

    def fusion(self, hidden: int, hidden_first: bool = False) -> Tensor:
        """[h, 2h] that passes the embedding and some of the hidden state."""
        scale = hidden**-0.5
        emb = torch.eye(hidden) + 0.1 * scale * torch.randn(hidden, hidden, generator=self.generator)
        state = self.state * scale * torch.randn(hidden, hidden, generator=self.generator)
        return torch.cat([state, emb] if hidden_first else [emb, state], 1).to(torch.bfloat16)


def _deviation(name: str, shape: torch.Size) -> float:
    fan_in = shape[-1] ** -0.5
    for pattern, deviation in (
        (r"embed_tokens\.weight$", 1.0),
        (r"lm_head\.weight$", 4 * fan_in),
        (r"(mlp|moe)\.gate\.weight$", 2 * fan_in),
        # layers correct the token's embedding and do not drown it, so that a random head is right now and then
        (r"(o_proj|out_proj|down_proj)(\.weight)?$", 0.2 * fan_in),
        (r"conv1d\.weight$", 0.5),
        (r"A_log$", 0.5),
        (r"dt_bias$", 0.1),
        (r"bias$", 0.2),
    ):
        if re.search(pattern, name):
            return deviation
    return fan_in


# heads: the decoder block's names first, then what joins embedding and hidden state


def _renamed(tensors: dict[str, Tensor], old: str, new: str) -> None:
    for name in [name for name in tensors if name.startswith(old)]:
        tensors[new + name.removeprefix(old)] = tensors.pop(name)


def _qwen_head(tensors: dict[str, Tensor], config: dict[str, Any], heads: int, draw: _Draw) -> None:
    for i in range(heads):
        _renamed(tensors, f"model.layers.{config['num_hidden_layers'] + i}.", f"mtp.layers.{i}.")
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = draw(f"{name}.norm.weight", (config["hidden_size"],))
    tensors["mtp.fc.weight"] = draw.fusion(config["hidden_size"])


def _mimo_head(tensors: dict[str, Tensor], config: dict[str, Any], heads: int, draw: _Draw) -> None:
    for i in range(heads):
        at = f"model.mtp_layers.{i}."
        _renamed(tensors, f"model.layers.{config['num_hidden_layers'] + i}.", at)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            tensors[f"{at}{name}.weight"] = draw(f"{name}.weight", (config["hidden_size"],))
        tensors[f"{at}input_proj.weight"] = draw.fusion(config["hidden_size"], hidden_first=True)


def _fusion_behind(tensors: dict[str, Tensor], config: dict[str, Any], layer: int, draw: _Draw, inner: str) -> None:
    at = f"model.layers.{layer}."
    for name in ("enorm", "hnorm", f"{inner}shared_head.norm"):
        tensors[f"{at}{name}.weight"] = draw(f"{name}norm.weight", (config["hidden_size"],))
    tensors[f"{at}eh_proj.weight"] = draw.fusion(config["hidden_size"])


def _behind_head(tensors: dict[str, Tensor], config: dict[str, Any], heads: int, draw: _Draw) -> None:
    for layer in range(config["num_hidden_layers"], config["num_hidden_layers"] + heads):
        _fusion_behind(tensors, config, layer, draw, "")
        tensors[f"model.layers.{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"model.layers.{layer}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()


def _step_head(tensors: dict[str, Tensor], config: dict[str, Any], heads: int, draw: _Draw, infix: str) -> None:
    for layer in range(config["num_hidden_layers"], config["num_hidden_layers"] + heads):
        _fusion_behind(tensors, config, layer, draw, infix)
        own = tensors["lm_head.weight"].float()
        own = own + 0.2 * own.std() * torch.randn(own.shape, generator=draw.generator)
        tensors[f"model.layers.{layer}.{infix}shared_head.output.weight"] = own.to(torch.bfloat16)


# transformers


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def model_of(config: dict[str, Any]) -> PreTrainedModel:
    """transformers' model of a config.json, initialised; for Step's text alone one with a vision tower."""
    config = json.loads(json.dumps(config))  # transformers changes nested ones in place
    config.pop("quantization_config", None)
    kind = config.pop("model_type")
    if kind == "step3p5":
        made = transformers.Step3p7Config(text_config=config, vision_config=dict(_STEP_VISION))
        return transformers.Step3p7ForConditionalGeneration(made)
    if kind == "step3p7":
        return transformers.Step3p7ForConditionalGeneration(transformers.Step3p7Config(**config))
    name, text = {
        "qwen3_next": ("Qwen3Next", ""), "qwen3_5_moe_text": ("Qwen3_5Moe", "Text"), "deepseek_v3": ("DeepseekV3", ""),
        "glm4_moe": ("Glm4Moe", ""), "mimo": ("Qwen2", ""),
    }[kind]  # fmt: skip
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}{text}Config")(**config))


def draft_names(folder: Path) -> list[str]:
    """Tensors of the head of a checkpoint written here."""
    starts = _draft_prefixes(json.loads((folder / "config.json").read_text()))
    return [name for name in load_file(folder / "model.safetensors") if name.startswith(starts)]


def _draft_prefixes(config: dict[str, Any]) -> tuple[str, ...]:
    text = config.get("text_config", config)
    behind = range(text["num_hidden_layers"], text["num_hidden_layers"] + text.get("num_nextn_predict_layers", 0))
    return ("mtp.", "model.mtp_layers.", *(f"model.layers.{i}." for i in behind))


def load_target(folder: Path) -> PreTrainedModel:
    """transformers' model of a BF16 folder in float32, with eager attention, through its own `from_pretrained`.

    Raises AssertionError where it lacks a weight of the target or the file has one that is neither the target's nor the
    head's. A vision tower that a text-only file lacks stays as it is initialised.
    """
    config = json.loads((folder / "config.json").read_text())
    text_only, drafts = config["model_type"] == "step3p5", _draft_prefixes(config)
    shell = model_of(config)
    with _quiet():
        model, info = type(shell).from_pretrained(
            folder, config=shell.config, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
        )
    missing = {name for name in info["missing_keys"] if not (text_only and re.search("vision|projector", name))}
    assert not missing, f"transformers found no {sorted(missing)}"
    assert not info["mismatched_keys"], info["mismatched_keys"]
    unknown = {name for name in info["unexpected_keys"] if not name.startswith(drafts)}
    assert not unknown, f"transformers knows no {sorted(unknown)}"
    return model.eval()


def ready_for_mtp(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, for `generate(use_mtp=True)`, which finds the head by patterns that name the published layer
    numbers alone, and gives Step's sliding head layers the number of heads of its full ones."""
    text = model.config.get_text_config()
    layers = range(text.num_hidden_layers, text.num_hidden_layers + text.num_mtp_layers)
    model._keys_to_ignore_on_load_unexpected = [rf"(^|\.)layers\.{i}\." for i in layers]
    if (kinds := getattr(text, "mtp_layer_types", None)) is not None:
        own = {"num_attention_heads": text.num_sliding_attention_heads}
        text.mtp_per_layer_config = {i: own for i, kind in enumerate(kinds) if kind == _SLIDING}
    return model
