"""The config of an FP8 checkpoint whose layout stays, with more modules listed as kept out of FP8.

Knows how each method writes its list; everything else in its config stays as it stands.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from mtplab.errors import ConfigError

__all__ = ["amended"]

# the key of the list, by method; where several are read, the one that stands there is used
_LISTS: dict[str, tuple[str, ...]] = {
    "fp8": ("modules_to_not_convert", "ignored_layers"),
    "mxfp8": ("modules_to_not_convert", "ignored_layers", "ignore"),
    "fbgemm_fp8": ("modules_to_not_convert",),
    "compressed-tensors": ("ignore",),
    "modelopt": ("ignore", "exclude_modules"),
    "quark": ("exclude",),
}


def amended(content: dict[str, Any], modules: Sequence[str]) -> dict[str, Any]:
    """A copy of a quantisation config in which `modules`, by full name, are not FP8.

    Raises ConfigError for a method whose config has no list that could say so.
    """
    made = copy.deepcopy(content)
    if not modules:
        return made
    method = made.get("quant_method")
    if method == "auto-round":
        extra = dict(made.get("extra_config") or {})
        made["extra_config"] = extra | {name: {"bits": 16, "act_bits": 16, "data_type": "float"} for name in modules}
        return made
    if method not in _LISTS:
        raise ConfigError(
            f"a checkpoint of {method} cannot say in its config that further modules are not FP8: expected one of "
            f"{', '.join([*_LISTS, 'auto-round'])}. Give --format and --layout to write it anew."
        )
    # ModelOpt's own file has the list one level down
    said = made["quantization"] if method == "modelopt" and isinstance(made.get("quantization"), dict) else made
    keys = _LISTS[str(method)]
    key = next((key for key in keys if said.get(key)), None)
    if key is None:
        key = "exclude_modules" if said is not made else next((key for key in keys if key in said), keys[0])
    said[key] = list(dict.fromkeys([*(said.get(key) or []), *modules]))
    layers = said.get("quantized_layers")
    if isinstance(layers, dict):
        said["quantized_layers"] = {name: layer for name, layer in layers.items() if name not in set(modules)}
    return made
