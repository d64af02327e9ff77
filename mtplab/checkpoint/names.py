"""What a tensor's name says: its module, the part of the model it belongs to, the kind of module.

Names stay as they stand on disk; only for comparison are the roots that different writers use made alike.
Knows nothing of dtypes or quantisation, and of a family no more than how its draft head is named.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from mtplab.checkpoint.config_json import text_config

__all__ = ["draft_prefixes", "kind_of", "module_of", "nearest", "normalised", "part_of"]

# the multimodal wrapper's roots, and what the text model alone writes in their place
_ROOTS = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head", "lm_head"),
)
_PARAMETERS = ("weight", "bias")
_DRAFT_ROOTS = ("mtp.", "model.mtp.", "model.mtp_layers.")  # Qwen3.5, MiMo-V2, MiMo-7B
_EMBEDDINGS = {"embed_tokens", "embed", "wte", "word_embeddings", "tok_embeddings", "embeddings"}
_HEADS = {"lm_head", "head", "output"}


def normalised(name: str) -> str:
    """The name under the text model's own root: `model.language_model.layers.0` becomes `model.layers.0`."""
    for root, plain in _ROOTS:
        if name.startswith(root):
            return plain + name[len(root) :]
    return name


def module_of(tensor: str) -> str:
    """The module a tensor belongs to: its name without `.weight` or `.bias`, else the name (`….A_log`)."""
    module, dot, parameter = tensor.rpartition(".")
    return module if dot and parameter in _PARAMETERS else tensor


def draft_prefixes(config: dict[str, Any]) -> tuple[str, ...]:
    """Prefixes (normalised) of the draft head's names under this config.json.

    DeepSeek-V3 and GLM put their MTP layers behind the last decoder layer: `model.layers.{num_hidden_layers
    + i}`.
    """
    text = text_config(config)
    layers, extra = text.get("num_hidden_layers"), text.get("num_nextn_predict_layers")
    if type(layers) is int and type(extra) is int and 0 < extra <= 64 and 0 < layers < 100_000:
        return (*_DRAFT_ROOTS, *(f"model.layers.{layers + i}." for i in range(extra)))
    return _DRAFT_ROOTS


def part_of(module: str, drafts: tuple[str, ...]) -> str:
    """draft, embedding, head or target; what lies in the draft head is "draft", whatever it is."""
    name = normalised(module)
    if name.startswith(drafts):
        return "draft"
    last = name.rpartition(".")[2]
    if last in _EMBEDDINGS:
        return "embedding"
    if name in _HEADS or last == "lm_head":
        return "head"
    return "target"


def kind_of(module: str, dims: int) -> str:
    """linear, norm, conv, embedding or other, by a module's name and its weight's number of dimensions."""
    last = module.rpartition(".")[2]
    if last in _EMBEDDINGS:
        return "embedding"
    if "conv" in last and dims >= 2:
        return "conv"
    if dims <= 1:
        return "norm" if "norm" in last or last == "ln_f" else "other"
    return "linear" if dims == 2 and "embed" not in last else "other"


def nearest(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Up to `count` of `names` that look most like `name`, best first; bounded work whatever their number."""
    candidates = list(dict.fromkeys(names))
    if len(candidates) > 2000:
        words = set(re.findall(r"[A-Za-z]\w*", name))
        candidates.sort(key=lambda item: -len(words & set(re.findall(r"[A-Za-z]\w*", item))))
        candidates = candidates[:2000]
    return difflib.get_close_matches(name, candidates, n=count, cutoff=0.3)
