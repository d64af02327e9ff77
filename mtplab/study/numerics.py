"""`mtplab.numerics`: a checkpoint, or a slice of one that is too large to run, before and after FP8.

Makes the two models and says how; what differs, `layer_errors.py` measures.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from mtplab.checkpoint import Checkpoint, open_checkpoint
from mtplab.checkpoint.text_table import folder_name, printable
from mtplab.errors import ConfigError
from mtplab.models import load_model
from mtplab.study.layer_errors import Numerics, compare_layers
from mtplab.study.prompts import load_prompts

__all__ = ["numerics"]

_TOKENS = 128  # that are read of a prompt
_ONLINE = "Quantised here: E4M3 weights in blocks of 128×128, inputs rounded per token and 128 features."
_INPUTS_ALONE = (
    "The file holds no weights from before it was quantised: errors are of rounding inputs alone. A source adds those "
    "of weights."
)
_NO_INPUT = "kv_b_proj has no such error: latent attention multiplies no row by it, and rounds nothing before it."


def numerics(
    path: str | os.PathLike[str] | Checkpoint,
    layers: str | Iterable[int] | None = None,
    prompts: Any = None,
    exclude: str | list[str] | None = None,
    source: str | os.PathLike[str] | Checkpoint | None = None,
    device: str = "cpu",
) -> Numerics:
    """What FP8 does to each layer and module, for the same inputs.

    Args:
        path: a checkpoint in FP8, whose arithmetic is taken as it is stored, or in BF16, which is quantised here.
        layers: of the target, "0-3" or numbers; None for all. The MTP head is measured with any of them.
        prompts: read by both, the first 128 tokens of each: as `sweep` takes them, lists of token ids too, which need
            no tokenizer. One of each bundled domain by default.
        exclude: modules kept from FP8, globs, "published" or "none".
        source: the checkpoint that an FP8 one was made from.

    Raises CheckpointError for files, ConfigError for settings.
    """
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    if checkpoint.quantization is None:
        if source is not None:
            raise ConfigError(f"source is {source!s:.60}, but {checkpoint.path} is not quantised: leave it out")
        plain = load_model(checkpoint, device, exact=False, layers=layers)
        quantised = plain.with_exclusions(exclude or "published", model_format="fp8")
        about = _ONLINE
    else:
        quantised = load_model(checkpoint, device, exclude=exclude, exact=False, layers=layers)
        if source is None:
            plain = quantised.with_exclusions("*", "*")
            about = f"{_INPUTS_ALONE} {_NO_INPUT}" if plain.config.one_row else _INPUTS_ALONE
        else:
            plain = load_model(source, device, dtype=quantised.dtype, exact=False, layers=layers)
            about = f"Against {printable(folder_name(plain.checkpoint.path))}, which it is said to be made from."
    found = load_prompts(prompts)
    if prompts is None:
        found = found.narrowed(limit=1)
    return compare_layers(plain, quantised, [ids[:_TOKENS] for ids in found.encoded(plain.encode)], [about])
