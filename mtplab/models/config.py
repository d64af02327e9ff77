"""The shape of a Qwen3.5 text model, dense or a mixture of experts, read from its config.json.

Knows nothing of tensors or files: it takes the parsed JSON and returns numbers, or says which key is wrong.
The keys are those of transformers' `Qwen3_5TextConfig` and `Qwen3_5MoeTextConfig`; a multimodal wrapper keeps them
under `text_config`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from mtplab.checkpoint.config_json import stored_dtype
from mtplab.config import DTYPES, MAX_DEPTH
from mtplab.errors import CheckpointError

DENSE = ("qwen3_5_text", "qwen3_5")
MIXTURES = ("qwen3_5_moe_text", "qwen3_5_moe")
MODEL_TYPES = (*DENSE, *MIXTURES)
# what names on disk begin with: the text model's own, and inside the multimodal wrapper
ROOTS = ("model.", "model.language_model.")
# settings that would change the arithmetic, and the only value it is written for
_REFUSED = {"attn_output_gate": True, "mtp_use_dedicated_embeddings": False}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of one model. Counts are of heads, layers or features; `layer_types[i]` names layer *i*'s mixer."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    layer_types: tuple[str, ...]
    conv_kernel: int
    linear_k_heads: int
    linear_v_heads: int
    linear_k_dim: int
    linear_v_dim: int
    mtp_layers: int
    tied_embeddings: bool
    max_position: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    # of a mixture of experts, in which `intermediate_size` is 0; all of them 0 in a dense model
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    shared_expert_size: int = 0

    def draft_caches(self, depth: int) -> int:
        """KV caches of the head when it drafts so deep: one for all drafts, or one for each (`head.py`)."""
        return depth if self.mtp_layers > 1 else min(depth, self.mtp_layers)

    @property
    def key_dim(self) -> int:
        """Features of all the delta rule's key heads together."""
        return self.linear_k_heads * self.linear_k_dim

    @property
    def value_dim(self) -> int:
        """Features of all the delta rule's value heads together."""
        return self.linear_v_heads * self.linear_v_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution: q, k and v side by side."""
        return 2 * self.key_dim + self.value_dim


def parse_config(
    config: dict[str, Any],
    eos_override: Any = None,
    eos_file: object = "generation_config.json",
    file: object = "config.json",
) -> ModelConfig:
    """Read a model's sizes from its parsed config.json.

    `eos_override` is `eos_token_id` of generation_config.json (an id, a list of ids or None), which wins over the
    model's own; `eos_file` and `file` are what messages call the two files. Raises CheckpointError naming file and key,
    what it holds and what was expected.
    """
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    model_type = text.get("model_type", config.get("model_type"))
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise CheckpointError(
            f"{file}: model_type is {model_type!r:.60}; mtplab runs {', '.join(MODEL_TYPES)}. "
            "The checkpoint can still be opened and planned with mtplab.open_checkpoint()."
        )

    number, mixture = partial(_number, file, text), model_type in MIXTURES
    layers = number("num_hidden_layers", top=10_000)
    if text.get("layer_types") is None:
        interval = number("full_attention_interval", 4)
        kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    else:
        kinds = _expect(file, text, "layer_types", list)
    known = ("linear_attention", "full_attention")
    if len(kinds) != layers or any(kind not in known for kind in kinds):
        raise CheckpointError(
            f"{file}: layer_types has {len(kinds)} entries, {sorted({str(k)[:40] for k in kinds})}; "
            f"expected {layers} entries (num_hidden_layers), each {' or '.join(known)}"
        )
    if text.get("attention_bias"):
        raise CheckpointError(f"{file}: attention_bias is true; Qwen3.5 has no attention biases, found a variant")
    if text.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{file}: hidden_act is {text['hidden_act']!r:.60}; expected 'silu'")
    mtp_layers = text.get("mtp_num_hidden_layers") or 0
    if not isinstance(mtp_layers, int) or isinstance(mtp_layers, bool) or not 0 <= mtp_layers <= MAX_DEPTH:
        raise CheckpointError(
            f"{file}: mtp_num_hidden_layers is {mtp_layers!r:.60}; expected a whole number from 0 to {MAX_DEPTH}: "
            "the layers of the MTP head, 1 in published checkpoints"
        )

    rope_key = "rope_parameters" if text.get("rope_parameters") is not None else "rope_scaling"
    rope = _expect(file, text, rope_key, dict) if text.get(rope_key) is not None else {}
    if rope.get("rope_type", "default") != "default":
        raise CheckpointError(f"{file}: rope_type is {rope['rope_type']!r:.60}; expected 'default'")
    rope = {key: text[key] for key in ("partial_rotary_factor", "rope_theta") if key in text} | rope
    heads, hidden = number("num_attention_heads"), number("hidden_size")
    head_dim = number("head_dim", hidden // heads)
    rotary_dim = int(head_dim * _number(file, rope, "partial_rotary_factor", 0.25, float, top=1))
    if rotary_dim % 2 or rotary_dim == 0:
        raise CheckpointError(
            f"{file}: partial_rotary_factor turns {rotary_dim} of {head_dim} features; expected an even number"
        )
    kv_heads = number("num_key_value_heads", heads)
    k_heads, v_heads = number("linear_num_key_heads"), number("linear_num_value_heads")
    for name, many, few in (("num_attention_heads", heads, kv_heads), ("linear_num_value_heads", v_heads, k_heads)):
        if many % few:
            raise CheckpointError(f"{file}: {name} is {many}; expected a multiple of {few}, its key heads")

    eos = eos_override if eos_override is not None else text.get("eos_token_id", config.get("eos_token_id"))
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    vocabulary = number("vocab_size")
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocabulary for i in eos_ids):
        raise CheckpointError(
            f"{file if eos_override is None else eos_file}: eos_token_id is {eos!r:.60}; "
            f"expected an id from 0 to {vocabulary - 1}, or a list of ids"
        )
    dtype = stored_dtype(config)
    if dtype not in DTYPES:
        raise CheckpointError(f"{file}: dtype is {dtype!r:.60}; expected one of {', '.join(DTYPES)}")
    for key, wanted in _REFUSED.items():
        if text.get(key, wanted) is not wanted:
            raise CheckpointError(f"{file}: {key} is {text[key]!r:.60}; expected {wanted}: a variant mtplab lacks")
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    if not isinstance(tied, bool):
        raise CheckpointError(f"{file}: tie_word_embeddings is {tied!r:.60}; expected true or false")
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=0 if mixture else number("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=_number(file, rope, "rope_theta", 10000.0, float),
        rms_norm_eps=number("rms_norm_eps", 1e-6, float),
        layer_types=tuple(kinds),
        conv_kernel=number("linear_conv_kernel_dim", 4),
        linear_k_heads=k_heads,
        linear_v_heads=v_heads,
        linear_k_dim=number("linear_key_head_dim"),
        linear_v_dim=number("linear_value_head_dim"),
        mtp_layers=mtp_layers,
        tied_embeddings=tied,
        max_position=number("max_position_embeddings", 32768),
        eos_token_ids=eos_ids,
        dtype=dtype,
        **(_mixture(file, number) if mixture else {}),
    )


def _mixture(file: object, number: Callable[..., int]) -> dict[str, int]:
    """Sizes of the experts."""
    found = {
        "num_experts": number("num_experts", top=65536),
        "experts_per_token": number("num_experts_per_tok"),
        "expert_size": number("moe_intermediate_size"),
        "shared_expert_size": number("shared_expert_intermediate_size"),
    }
    if found["experts_per_token"] > found["num_experts"]:
        raise CheckpointError(
            f"{file}: num_experts_per_tok is {found['experts_per_token']}; expected at most num_experts, "
            f"{found['num_experts']}"
        )
    return found


def _number(
    file: object, found: dict, key: str, default: float | None = None, kind: type = int, top: float = 2**40
) -> Any:
    """A positive number of this kind, at most `top`."""
    value = found.get(key, default)
    wanted = (int, float) if kind is float else int
    if isinstance(value, bool) or not isinstance(value, wanted) or not 0 < value <= top:
        said = "is missing" if value is None else f"is {value!r:.60}"
        raise CheckpointError(f"{file}: {key} {said}; expected a positive {kind.__name__} of at most {top:g}")
    return kind(value)


def _expect(file: object, found: dict, key: str, kind: type) -> Any:
    """A value of this JSON kind."""
    if not isinstance(found[key], kind):
        raise CheckpointError(f"{file}: {key} is {found[key]!r:.60}; expected a JSON {kind.__name__}")
    return found[key]
