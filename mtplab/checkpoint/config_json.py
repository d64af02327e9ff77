"""config.json, and where a checkpoint keeps its quantisation config.

Knows nothing of what a quantisation config means (`formats/`) nor of tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mtplab.checkpoint.strict_json import read_json_object, shown
from mtplab.errors import CheckpointError

__all__ = [
    "BESIDE_FILES",
    "CONFIG_FILE",
    "SEPARATE_FILE",
    "Found",
    "find_quantization",
    "read_config",
    "stated_quantizations",
    "stored_dtype",
    "text_config",
    "with_quantization",
]

# in the order in which vLLM looks; `compression_config` is what old compressed-tensors files have
_PLACES: tuple[tuple[str, ...], ...] = (
    ("quantization_config",),
    ("text_config", "quantization_config"),
    ("llm_config", "quantization_config"),
    ("compression_config",),
)
_TEXT_KEYS = ("text_config", "llm_config", "language_config")
CONFIG_FILE = "config.json"
SEPARATE_FILE = "hf_quant_config.json"  # ModelOpt
# what says the same beside config.json; auto-round leaves a copy
BESIDE_FILES = (SEPARATE_FILE, "quantization_config.json")


class Found(NamedTuple):
    """A quantisation config as it stands, and where it was found: the file's path and the key in it."""

    content: dict[str, Any]
    where: str


def read_config(folder: Path, required: bool) -> dict[str, Any]:
    """config.json of the folder; {} where there is none and none is required (a single file).

    Raises CheckpointError for one that is missing, unreadable or no JSON object.
    """
    path = folder / CONFIG_FILE
    if not required and not os.path.lexists(path):
        return {}
    return read_json_object(path, CONFIG_FILE)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says of the text model: `text_config` of a multimodal one, else all of it."""
    for key in _TEXT_KEYS:
        if isinstance(config.get(key), dict):
            return config[key]
    return config


def stored_dtype(config: dict[str, Any]) -> Any:
    """The dtype that a config.json says the checkpoint is written for; BF16, as Qwen releases are, if it says none."""
    text = text_config(config)
    return text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or "bfloat16"


def stated_quantizations(config: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(keys from the outermost in, what stands there) for every place of config.json that states a quantisation."""
    for place in _PLACES:
        value: Any = config
        for key in place:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            yield place, value


def find_quantization(config: dict[str, Any], folder: Path) -> Found | None:
    """The first quantisation config of config.json or hf_quant_config.json, or None.

    Raises CheckpointError where one is there but is no JSON object.
    """
    for place, value in stated_quantizations(config):
        file, key = folder / CONFIG_FILE, ".".join(place)
        if not isinstance(value, dict):
            raise CheckpointError(f"{file}: expected {key} to be an object, found {shown(value)}.")
        return Found(value, f"{file}: {key}")
    path = folder / SEPARATE_FILE
    if os.path.lexists(path):
        content = read_json_object(path, "a ModelOpt quantisation config")
        return Found({"quant_method": "modelopt", **content}, str(path))
    return None


def with_quantization(config: dict[str, Any], content: dict[str, Any] | None) -> dict[str, Any]:
    """A copy of config.json in which `content` is the quantisation config: where one stands already, that one's place
    is kept, and any further one goes; None takes all out."""
    made = dict(config)
    for place, _ in stated_quantizations(config):
        holder = made
        for key in place[:-1]:
            holder[key] = dict(holder[key])
            holder = holder[key]
        if content is None:
            del holder[place[-1]]
        else:
            holder[place[-1]], content = content, None
    if content is not None:
        made["quantization_config"] = content
    return made
