"""Sizes and bytes of a checkpoint for the cost model: dimensions from config.json, bytes from the plan's headers.

Reads no values. Knows the names that families give their dimensions; what becomes of a module is the plan's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtplab.checkpoint import Checkpoint
from mtplab.errors import CheckpointError
from mtplab.models.config import ModelConfig, config_of
from mtplab.models.families import family_of
from mtplab.study.model_sizes import Attention, DeltaRule, Experts, Format, ModelSizes, Weights

__all__ = ["sizes_of", "weights_of"]

# keys of config.json by what they hold; families differ
_KEYS = {
    "hidden": ("hidden_size",),
    "layers": ("num_hidden_layers",),
    "vocabulary": ("vocab_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "inner": ("intermediate_size",),
    "experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "top": ("num_experts_per_tok",),
    "expert_inner": ("moe_intermediate_size",),
    "dense": ("first_k_dense_replace",),
    # of a family that is not run: other keys do not say whether a layer is a depth, nor what projections there are
    "draft_layers": ("mtp_num_hidden_layers",),
}
# where the layers with experts are otherwise
_EVERY = ("decoder_sparse_step", "mlp_only_layers", "moe_layer_freq")


def sizes_of(checkpoint: Checkpoint) -> ModelSizes:
    """A checkpoint's dimensions. Raises CheckpointError naming the key that is missing or makes no sense, or the layers
    that the cost model does not know."""
    run, outer = _as_run(checkpoint), checkpoint.config
    text = outer.get("text_config") if isinstance(outer.get("text_config"), Mapping) else outer
    if isinstance(text.get("attention_other_setting"), Mapping):
        raise CheckpointError(
            f"{checkpoint.path}: config.json gives some layers attention of another size (attention_other_setting), "
            "and a window, which the cost model does not know; expected layers of attention that are alike. Measure "
            "rounds instead (mtplab sweep, --method run)"
        )
    read = _Reader(checkpoint, text)
    hidden, layers, heads = read("hidden"), read("layers"), read("heads")
    kinds = text.get("layer_types")
    full = layers
    delta = None
    if "linear_num_value_heads" in text:
        if isinstance(kinds, list) and len(kinds) == layers:
            full = sum(kind == "full_attention" for kind in kinds)
        else:
            full = layers // read.key("full_attention_interval", 4)
        delta = DeltaRule(*(read.key(f"linear_{name}") for name in (
            "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"
        )))  # fmt: skip
    if text.get("kv_lora_rank"):
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        # 0 where queries are made from the hidden state
        attention = Attention(heads, 0, 0, False, *(read.key(name, 0 if name == names[0] else None) for name in names))
    else:
        gate = delta is not None and text.get("attn_output_gate", True) is True
        head_dim = read.key("head_dim", hidden // heads)
        attention = Attention(heads, read("kv_heads", heads), head_dim, gate)
    experts, dense = None, 0
    if read("experts", 0) > 0:
        inner, shared = read("expert_inner"), text.get("n_shared_experts")
        width = inner * shared if type(shared) is int else read.key("shared_expert_intermediate_size", 0)
        experts, dense = Experts(read("experts"), read("top"), inner, width), read("dense", 0)
        if any(text.get(key) not in (None, 1, []) for key in _EVERY):
            raise CheckpointError(
                f"{checkpoint.path}: config.json spreads experts over some layers only ({', '.join(_EVERY)}), which "
                "the cost model does not know; expected experts in every layer after the first dense ones"
            )
    tied = text.get("tie_word_embeddings", outer.get("tie_word_embeddings", False)) is True
    return ModelSizes(
        checkpoint.path.name, hidden, read("vocabulary"), attention, full, f"{checkpoint.path.name}/config.json", delta,
        layers - full, read("inner", 0), experts, dense, tied,
        max(1, read("draft_layers", 0) if run is None else run.mtp_layers),
    )  # fmt: skip


def _as_run(checkpoint: Checkpoint) -> ModelConfig | None:
    """What a checkpoint is read as where its family is run, None for another, of which config.json's keys alone are
    known. Raises CheckpointError for layers that have no place in `ModelSizes`."""
    try:
        config = config_of(checkpoint)
    except CheckpointError:
        return None
    if len(config.geometries) > 1 or any(geometry.window for geometry in config.geometries):
        raise CheckpointError(
            f"{checkpoint.path}: attention layers of {config.family} differ in heads, rotation or how far they see, "
            "and the cost model takes all for alike; expected one kind of attention. What depth pays on this machine, "
            "`mtplab measure` times"
        )
    if config.mtp_layers > 1 and family_of(checkpoint.config)[0].layout.behind:
        raise CheckpointError(
            f"{checkpoint.path}: its MTP head has {config.mtp_layers} layers, each with a projection of its own, and "
            "the cost model knows one projection for all; expected one layer. What depth pays on this machine, `mtplab "
            "measure` times"
        )
    return config


def weights_of(checkpoint: Checkpoint, sizes: ModelSizes, model_format: str | None = None) -> Weights:
    """Bytes a parameter of each part, from the headers: as stored, or with `model_format="fp8"` as loaded.

    Raises CheckpointError where the bytes of a part and the dimensions do not agree.
    """
    plan = checkpoint.plan(model_format=model_format)
    parameters = sizes.parameters()
    nbytes = dict.fromkeys(parameters, 0)
    for module in plan.modules:
        part = _part(module.part, module.name, module.kind)
        if part is not None:
            nbytes[part] += module.loaded_nbytes
    if not nbytes["head"]:  # tied: the embedding is the head
        nbytes["head"] = plan.loaded_nbytes("embedding")
    formats = {}
    for part, count in parameters.items():
        # a part without parameters of its own is read by nobody, and a head may be missing
        each = nbytes[part] / count if count and nbytes[part] else 2.0
        if not 0.3 < each < 4.6:
            raise CheckpointError(
                f"{checkpoint.path}: {part} has {nbytes[part]:,} bytes, {each:.2f} for each of the {count:,.0f} "
                "parameters that config.json gives it; expected 0.3 to 4.6: the two do not describe one model"
            )
        formats[part] = Format(f"{each:.2f} bytes", each, "fp4" if each < 0.75 else "fp8" if each < 1.4 else "bf16")
    formats["fc"] = formats.pop("draft_fc")
    if not any(nbytes[part] for part in nbytes if part.startswith("draft")):
        raise CheckpointError(
            f"{checkpoint.path}: has no MTP head, so there is nothing to draft with; give one that has"
        )
    how = "stored" if model_format is None else f"{model_format} (made at load)"
    return Weights(how, **formats, source=f"bytes from the headers of {checkpoint.path.name}")


def _part(part: str, name: str, kind: str) -> str | None:
    """The key of `ModelSizes.parameters` that a module's bytes belong to; None for what is left out there."""
    if part == "head":
        return "head"
    if part not in ("target", "draft") or kind in ("norm", "embedding", "conv"):
        return None
    pre = "draft_" if part == "draft" else ""
    pieces = name.split(".")
    if pieces[-1] in ("fc", "eh_proj", "input_proj", "e_proj", "h_proj"):
        return "draft_fc" if pre else None
    if "experts" in pieces:
        return f"{pre}experts"
    if pieces[-1] in ("gate", "router", "shared_expert_gate"):
        return None
    if any(piece in ("mlp", "feed_forward", "ffn") for piece in pieces):
        return f"{pre}mlp"
    if any(piece.endswith(("attn", "attention", "mixer")) for piece in pieces):
        return f"{pre}mixer"
    return None


class _Reader:
    def __init__(self, checkpoint: Checkpoint, text: Mapping[str, Any]) -> None:
        self._checkpoint, self._text = checkpoint, text

    def __call__(self, what: str, default: int | None = None) -> int:
        keys = _KEYS[what]
        return self.key(next((key for key in keys if self._text.get(key) is not None), keys[0]), default)

    def key(self, key: str, default: int | None = None) -> int:
        value = self._text.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 <= value < 1 << 32 or (value == 0 and default != 0):
            raise CheckpointError(
                f"{self._checkpoint.path}: config.json gives {key} as {self._text.get(key)!r:.60}; expected a whole "
                "number above 0 to work out what a round reads"
            )
        return value
