"""What a tensor's name says: its module, the part of the model it belongs to, the kind of module.

Names stay as they stand on disk; only for comparison are the roots that different writers use made alike.
Knows nothing of dtypes or quantisation, and of a family no more than how its layers and its draft head
(`draft_layouts.py`) are named.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from mtplab.checkpoint.config_json import text_config
from mtplab.checkpoint.draft_layouts import BEHIND_COUNT, OWN_COUNT, ROOTS

__all__ = [
    "InLayer",
    "Reach",
    "draft_globs",
    "draft_prefixes",
    "experts_together",
    "in_layer",
    "kind_of",
    "layer_of",
    "module_of",
    "nearest",
    "normalised",
    "of_other_senses",
    "part_of",
]

# the multimodal wrapper's roots, and what the text model alone writes in their place
_ROOTS = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head", "lm_head"),
)
_WRAPPED = tuple(root for root, _ in _ROOTS)
_PARAMETERS = ("weight", "bias")
# vision and audio towers and what joins them to the text model
_SENSES = re.compile(r"(?:^|\.)(?:visual|vision_\w+|audio_\w+|image_\w+|\w*projector)(?:\.|$)")
_LAYER = re.compile(r"(model|mtp)\.layers\.([0-9]{1,9})\.")
# in whatever stack of layers: a head may name its own `mtp_layers`
_IN_LAYER = re.compile(r"(?:\b|_)layers\.([0-9]+)\.")
_EXPERT = re.compile(r"\bexperts\.[0-9]+\b")
_COMPARED = 500  # characters of names that may be told for neighbours
_EMBEDDINGS = {"embed_tokens", "embed", "wte", "word_embeddings", "tok_embeddings", "embeddings"}
_HEADS = {"lm_head", "head", "output"}


def normalised(name: str) -> str:
    """The name under the text model's own root: `model.language_model.layers.0` becomes `model.layers.0`."""
    if name.startswith(_WRAPPED):  # few names are, and this is asked of every one, often
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
    layers, extra = _behind(text_config(config))
    return (*ROOTS, *(f"model.layers.{layers + i}." for i in range(extra)))


def draft_globs(names: Iterable[str], config: dict[str, Any]) -> tuple[str, ...]:
    """Globs that cover the draft head among these names and nothing else: `mtp.*`, `model.layers.61.*`."""
    found, prefixes = set(), draft_prefixes(config)
    for name in names:
        plain = normalised(name)
        prefix = next((each for each in prefixes if plain.startswith(each)), None)
        if prefix is not None:
            found.add(name.removesuffix(plain.removeprefix(prefix)) + "*")
    return tuple(sorted(found))


def _behind(text: dict[str, Any]) -> tuple[int, int]:
    """(decoder layers, draft layers named behind them), 0 where config.json says nothing that can be used."""
    layers, extra = text.get("num_hidden_layers"), text.get(BEHIND_COUNT)
    if type(layers) is not int or not 0 < layers < 100_000:
        return 0, 0
    return layers, extra if type(extra) is int and 0 < extra <= 64 else 0


class Reach:
    """Which modules a run of the text model reads, as far as config.json counts layers."""

    def __init__(self, config: dict[str, Any]) -> None:
        text = text_config(config)
        heads = text.get(OWN_COUNT)
        if heads is None and str(text.get("model_type", config.get("model_type"))).startswith("qwen3_5"):
            heads = 0  # what its readers take it for
        self.heads = heads if type(heads) is int else None
        self._counts = {"model": sum(_behind(text)) or None, "mtp": self.heads}

    def unread(self, module: str) -> str | None:
        """Why no run reads the module, or None."""
        name = normalised(module)
        if of_other_senses(module):
            return "part of the vision tower or its like, and only the text model is run"
        if self.heads == 0 and name.startswith("mtp."):
            return f"of an MTP head, of which config.json counts 0 ({OWN_COUNT})"
        layer = _LAYER.match(name)
        count = self._counts[layer[1]] if layer else None
        if layer is None or count is None or int(layer[2]) < count:
            return None
        key = {"model": "num_hidden_layers", "mtp": OWN_COUNT}[layer[1]]
        return f"behind the last layer that config.json counts ({count}, by {key})"


def layer_of(module: str) -> int | None:
    """The number of the decoder layer that a module of the target belongs to, as names on disk count them."""
    layer = _LAYER.match(normalised(module))
    return int(layer[2]) if layer and layer[1] == "model" else None


class InLayer(NamedTuple):
    """A module's name, taken apart at its layer's number."""

    root: str  # `model.layers.`
    number: str
    rest: str  # `mlp.down_proj`


def in_layer(module: str) -> InLayer | None:
    """Where a module's name, as it stands on disk, says its layer, of the target or of a head; None for no layer."""
    found = _IN_LAYER.search(module)
    return InLayer(module[: found.start(1)], found[1], module[found.end() :]) if found else None


def experts_together(module: str) -> str:
    """The name with `experts.*` in place of one expert's: what all experts of a layer share."""
    return _EXPERT.sub("experts.*", module)


def of_other_senses(name: str) -> bool:
    """Whether a module or tensor belongs to what a multimodal model sees or hears with, not to its text model."""
    return _SENSES.search(name) is not None


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
    if len(name) > _COMPARED:
        return []
    candidates = list(dict.fromkeys(item for item in names if len(item) <= _COMPARED))
    if len(candidates) > 2000:
        words = set(re.findall(r"[A-Za-z]\w*", name))
        candidates.sort(key=lambda item: -len(words & set(re.findall(r"[A-Za-z]\w*", item))))
        candidates = candidates[:2000]
    return difflib.get_close_matches(name, candidates, n=count, cutoff=0.3)
