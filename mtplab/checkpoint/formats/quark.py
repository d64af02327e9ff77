"""AMD Quark: `global_quant_config.weight`, and overrides by glob in `layer_quant_config`.

`X.weight` F8_E4M3, `X.weight_scale` [] or [n], BF16, `X.input_scale` []; KV scales are `k_proj.output_scale`. Its
"custom mode" writes quant_method `fp8` instead (`hf_fp8.py`).
"""

from __future__ import annotations

from typing import Any

from mtplab.checkpoint.formats.base import Format, QuantizationConfig, Scheme, block_sizes, names_listed
from mtplab.checkpoint.formats.by_module import ByModule
from mtplab.checkpoint.strict_json import shown
from mtplab.errors import CheckpointError

_LISTS = ("exclude",)
_DTYPES = {"fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
_QSCHEMES = {"per_tensor": "tensor", "per_channel": "channel", "per_group": "group"}


def _parse(content: dict[str, Any], where: str) -> QuantizationConfig:
    overall = _scheme(content.get("global_quant_config"), f"{where}: global_quant_config")
    layers = content.get("layer_quant_config") or {}
    if not isinstance(layers, dict):
        raise CheckpointError(f"{where}: layer_quant_config, expected an object by pattern, found {shown(layers)}.")
    given = ((glob, _scheme(layer, f"{where}: layer_quant_config.{shown(glob)}")) for glob, layer in layers.items())
    own = {glob: scheme or Scheme("tensor", foreign="no weight quantisation") for glob, scheme in given}
    schemes = [scheme for scheme in (overall, *own.values()) if scheme is not None]
    if not schemes or all(scheme.foreign for scheme in schemes):
        found = schemes[0].foreign if schemes else "no weight quantisation"
        raise CheckpointError(f"{where}: quark with {found}, expected weights in {' or '.join(_DTYPES)}.")

    names = {name: scheme for name, scheme in own.items() if not any(char in name for char in "*?[")}
    globs = [(glob, scheme) for glob, scheme in own.items() if glob not in names]
    scheme_of = ByModule(where, names, globs, overall, globs=True)
    entries, key = names_listed(content, _LISTS, where)
    kv = content.get("kv_cache_quant_config")
    return QuantizationConfig("quark", where, scheme_of, entries, key, f"{len(kv)} patterns" if kv else None)


def _scheme(given: Any, where: str) -> Scheme | None:
    if given is None:
        return None
    weight = given.get("weight") if isinstance(given, dict) else given
    if weight is None:
        return None
    if not isinstance(weight, dict):
        raise CheckpointError(f"{where}: weight, expected an object, found {shown(weight)}.")
    dtype, qscheme = weight.get("dtype"), weight.get("qscheme")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        return Scheme("tensor", foreign=f"dtype {shown(dtype)}")
    if not isinstance(qscheme, str) or qscheme not in _QSCHEMES:
        raise CheckpointError(f"{where}: qscheme {shown(qscheme)}, expected one of {', '.join(_QSCHEMES)}.")
    inputs = given.get("input_tensors")
    dynamic = inputs.get("is_dynamic") if isinstance(inputs, dict) else None
    activation = "none" if inputs is None else "dynamic" if dynamic else "static"
    block = (0, 0)
    if qscheme == "per_group":
        block = block_sizes([1, weight.get("group_size")], where, "[1, group_size]")
    return Scheme(_QSCHEMES[qscheme], block, activation, _DTYPES[dtype])


FORMAT = Format(
    name="Quark",
    methods=("quark",),
    pairs=((".weight", ".weight_scale"), ("", "_weight_scale")),
    parse=_parse,
    list_keys=_LISTS,
)
