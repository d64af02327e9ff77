"""The same quantisation said in several files, brought under common names so that they can be compared.

Knows where configs stand and how formats call their lists; nothing of which copy is right.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mtplab.checkpoint.config_json import BESIDE_FILES, CONFIG_FILE, stated_quantizations
from mtplab.checkpoint.formats import formats
from mtplab.checkpoint.strict_json import read_json_object
from mtplab.errors import CheckpointError

__all__ = ["quantization_copies"]


def quantization_copies(config: dict[str, Any], folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """(file, what it says under names common to all) for every place that has a quantisation config.

    Common are the algorithm, the exclusions (sorted) and the KV cache's, so that ModelOpt's two files, which name them
    differently, can be compared; auto-round's quantization_config.json is a copy of config.json's.
    """
    places = [(f"{CONFIG_FILE}: {'.'.join(place)}", value) for place, value in stated_quantizations(config)]
    for name in BESIDE_FILES:
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
    lists = [content[key] for key in {key for fmt in formats() for key in fmt.list_keys} if key in content]
    lists = [names for names in lists if isinstance(names, list)]
    if lists:
        said["exclusions"] = sorted({str(name) for names in lists for name in names})
    if "kv_cache_quant_algo" in content or "kv_cache_scheme" in content:
        said["a quantised KV cache"] = bool(content.get("kv_cache_quant_algo") or content.get("kv_cache_scheme"))
    return said
