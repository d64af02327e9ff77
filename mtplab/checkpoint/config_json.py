"""config.json, and where a checkpoint keeps its quantisation config.

Knows nothing of what a quantisation config means (`formats/`) nor of tensors.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from mtplab.checkpoint.strict_json import read_json_object, shown
from mtplab.errors import CheckpointError

__all__ = [
    "SEPARATE_FILE",
    "Found",
    "find_quantization",
    "quantization_copies",
    "read_config",
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
SEPARATE_FILE = "hf_quant_config.json"  # ModelOpt


class Found(NamedTuple):
    """A quantisation config as it stands, and where it was found: the file's path and the key in it."""

    content: dict[str, Any]
    where: str


def read_config(folder: Path, required: bool) -> dict[str, Any]:
    """config.json of the folder; {} where there is none and none is required (a single file).

    Raises CheckpointError for one that is missing, unreadable or no JSON object.
    """
    path = folder / "config.json"
    if not required and not os.path.lexists(path):
        return {}
    return read_json_object(path, "config.json")


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


def find_quantization(config: dict[str, Any], folder: Path) -> Found | None:
    """The first quantisation config of config.json or hf_quant_config.json, or None.

    Raises CheckpointError where one is there but is no JSON object.
    """
    for place in _PLACES:
        value: Any = config
        for key in place:
            value = value.get(key) if isinstance(value, dict) else None
        if value is None:
            continue
        file, key = folder / "config.json", ".".join(place)
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
    for place in _PLACES:
        holder = made
        for key in place[:-1]:
            if not isinstance(holder.get(key), dict):
                break
            holder[key] = dict(holder[key])
            holder = holder[key]
        else:
            if holder.get(place[-1]) is None:
                continue
            if content is None:
                del holder[place[-1]]
            else:
                holder[place[-1]], content = content, None
    if content is not None:
        made["quantization_config"] = content
    return made


def quantization_copies(config: dict[str, Any], folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """(file, what it says under names common to all) for every place that has a quantisation config.

    Common are the algorithm, the exclusions (sorted) and the KV cache's, so that ModelOpt's two files, which name them
    differently, can be compared; auto-round's quantization_config.json is a copy of config.json's.
    """
    places: list[tuple[str, Any]] = []
    for place in _PLACES:
        value: Any = config
        for key in place:
            value = value.get(key) if isinstance(value, dict) else None
        places.append((f"config.json: {'.'.join(place)}", value))
    for name in (SEPARATE_FILE, "quantization_config.json"):
        path = folder / name
        try:
            content = read_json_object(path, "a quantisation config") if os.path.lexists(path) else None
        except CheckpointError:
            continue
        inner = content.get("quantization") if content is not None else None
        places.append((name, inner if isinstance(inner, dict) else content))
    return [(where, _common(value)) for where, value in places if isinstance(value, dict)]


def _common(content: dict[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = {}
    algo = content.get("quant_algo")
    if isinstance(algo, str):
        said["quant_algo"] = algo.upper()
    for key in ("weight_block_size", "group_size", "fmt", "activation_scheme"):
        if key in content and content[key] is not None:
            said[key] = content[key]
    for key in ("exclude_modules", "ignore", "modules_to_not_convert", "ignored_layers"):
        if isinstance(content.get(key), list):
            said["exclusions"] = sorted(map(str, content[key]))
    if "kv_cache_quant_algo" in content or "kv_cache_scheme" in content:
        said["a quantised KV cache"] = bool(content.get("kv_cache_quant_algo") or content.get("kv_cache_scheme"))
    return said
