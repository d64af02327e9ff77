"""A model's config.json, read by its family into a `ModelConfig`, and what names on disk begin with.

Knows nothing of tensors but their names."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mtplab.checkpoint import Checkpoint
from mtplab.checkpoint.config_json import CONFIG_FILE
from mtplab.models.families import family_of
from mtplab.models.fields import Fields
from mtplab.models.spec import ModelConfig

__all__ = ["ROOTS", "ModelConfig", "config_of", "parse_config", "roots_of", "vocabulary_head"]

# what names on disk begin with: the text model's own, and inside a multimodal wrapper
ROOTS = ("model.", "model.language_model.", "language_model.model.")
# likewise the vocabulary head, which some wrappers hold under the whole text model's root
_HEADS = ("language_model.lm_head", "lm_head")


def roots_of(names: Collection[str]) -> list[str]:
    """Those of `ROOTS` under which there is an embedding among these tensors: one in a text model or its wrapper."""
    return [root for root in ROOTS if f"{root}embed_tokens.weight" in names]


def vocabulary_head(names: Collection[str]) -> str | None:
    """The vocabulary head's module among these tensors, None where it has none of its own."""
    return next((head for head in _HEADS if f"{head}.weight" in names), None)


def config_of(
    checkpoint: Checkpoint, eos_override: Any = None, eos_file: object = "generation_config.json"
) -> ModelConfig:
    """`parse_config` of an opened checkpoint, whose file messages name."""
    file = checkpoint.files.folder / CONFIG_FILE
    return parse_config(checkpoint.config, eos_override, eos_file, file, checkpoint.tensors)


def parse_config(
    config: dict[str, Any],
    eos_override: Any = None,
    eos_file: object = "generation_config.json",
    file: object = "config.json",
    names: Collection[str] | None = None,
) -> ModelConfig:
    """Read a model's sizes from its parsed config.json.

    `eos_override` is `eos_token_id` of generation_config.json (an id, a list of ids or None), which wins over the
    model's own; `eos_file` and `file` are what messages call the two files. `names` are the tensors on disk, where they
    are known: Qwen3-Next's config.json leaves it to them whether there is a head. Raises CheckpointError naming file
    and key, what it holds and what was expected.
    """
    family, model_type = family_of(config, file)
    fields = Fields(config, file, names)
    sizes, vocabulary = family.read(fields), fields.number("vocab_size")
    return ModelConfig(
        family=family.name,
        model_type=model_type,
        vocab_size=vocabulary,
        hidden_size=fields.number("hidden_size"),
        num_layers=len(sizes.layers),
        layers=sizes.layers,
        draft_layers=sizes.draft_layers,
        rms_norm_eps=fields.real("rms_norm_eps", 1e-6),
        one_plus_norms=sizes.one_plus_norms,
        tied_embeddings=fields.tied(),
        max_position=fields.number("max_position_embeddings", 32768),
        eos_token_ids=fields.eos(eos_override, eos_file, vocabulary),
        dtype=fields.dtype(),
    )
