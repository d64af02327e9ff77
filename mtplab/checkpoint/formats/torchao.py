"""torchao's Float8Tensor in safetensors: `X.weight` split into `X._weight_qdata` and `X._weight_scale`.

Scales are F32 [n, 1] (PerRow) or [1, 1] (PerTensor). Source: torchao.prototype.safetensors and its files.
"""

from __future__ import annotations

from typing import Any

from mtplab.checkpoint.formats.base import Format, QuantizationConfig, Scheme, block_sizes, names_listed
from mtplab.checkpoint.strict_json import shown
from mtplab.errors import CheckpointError

_LISTS = ("modules_to_not_convert",)
_ACTIVATIONS = {"Float8WeightOnlyConfig": "none", "Float8DynamicActivationFloat8WeightConfig": "dynamic"}
_CODES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}


def _parse(content: dict[str, Any], where: str) -> QuantizationConfig:
    kind = content.get("quant_type")
    entries, key = names_listed(content, _LISTS, where)
    given = kind.get("default", kind) if isinstance(kind, dict) else kind
    scheme = _scheme(given, where)
    return QuantizationConfig("torchao", where, lambda module: scheme, entries, key)


def _scheme(given: Any, where: str) -> Scheme:
    name, data = (given.get("_type"), given.get("_data")) if isinstance(given, dict) else (given, None)
    data = data if isinstance(data, dict) else {}
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise CheckpointError(
            f"{where}: quant_type {shown(name)}, expected one of {', '.join(_ACTIVATIONS)} for all layers: what is not "
            "FP8, and one config per layer (FqnToConfig), are not read."
        )
    dtype = data.get("weight_dtype")
    dtype = dtype.get("_data") if isinstance(dtype, dict) else dtype
    if dtype is not None and (not isinstance(dtype, str) or dtype not in _CODES):
        raise CheckpointError(f"{where}: weight_dtype {shown(dtype)}, expected one of {', '.join(_CODES)}.")
    codes = _CODES.get(dtype or "", "e4m3")
    grain = data.get("granularity")
    grain = grain[-1] if isinstance(grain, list) and grain else grain  # [activation, weight]
    kind = grain.get("_type", "PerTensor") if isinstance(grain, dict) else grain or "PerTensor"
    if kind == "PerRow":
        return Scheme("channel", activation=_ACTIVATIONS[name], codes=codes)
    if kind == "PerTensor":
        return Scheme("tensor", activation=_ACTIVATIONS[name], codes=codes)
    sizes = grain.get("_data") if isinstance(grain, dict) else None
    sizes = sizes.get("block_size") if isinstance(sizes, dict) else None
    if kind != "PerBlock":
        raise CheckpointError(f"{where}: granularity {shown(kind)}, expected PerRow, PerTensor or PerBlock.")
    return Scheme("block", block_sizes(sizes, where, "block_size"), _ACTIVATIONS[name], codes)


FORMAT = Format(
    name="torchao",
    methods=("torchao",),
    pairs=(("._weight_qdata", "._weight_scale"),),
    parse=_parse,
    list_keys=_LISTS,
    can_keep_more=False,  # the files' metadata says too which tensors are codes
)
