"""NVIDIA ModelOpt: `quant_algo` says the scheme, in config.json or hf_quant_config.json.

FP8: `weight_scale` and `input_scale` []. FP8_PER_CHANNEL_PER_TOKEN: `weight_scale` [n]. FP8_PB_WO: [n/128, 1, k/128,
1], weights only. MXFP8: U8 [n, k/32]. MIXED_PRECISION gives each layer its own under `quantized_layers`. Llama 4's
stacked experts: `experts.gate_up_proj` with `…_weight_scale` []. Case varies; source: modelopt.torch.export, its files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtplab.checkpoint.formats.base import Format, QuantizationConfig, Scheme, list_names, names_listed
from mtplab.checkpoint.formats.by_module import ByModule
from mtplab.checkpoint.strict_json import shown
from mtplab.errors import CheckpointError

# in its own file the list is called exclude_modules, one level down; in config.json it is ignore
_LISTS = ("ignore", "exclude_modules")
_NESTED_LISTS = ("exclude_modules", "ignore")
_ALGOS: dict[str, Scheme] = {
    "FP8": Scheme("tensor", activation="static"),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("channel"),
    "FP8_PB_WO": Scheme("block", (128, 128), activation="none"),
    "FP8_PB_REAL": Scheme("block", (128, 128)),
    "MXFP8": Scheme("group", (1, 32)),
}
_MIXED = "MIXED_PRECISION"


def _parse(content: dict[str, Any], where: str) -> QuantizationConfig:
    said, lists = _said(content)
    algo = _named(said.get("quant_algo", said.get("quant_method")), where)
    layers: dict[str, Scheme] = {}
    if algo == _MIXED:
        given = said.get("quantized_layers")
        if not isinstance(given, dict) or not given:
            raise CheckpointError(f"{where}: quantized_layers, expected an object by layer, found {shown(given)}.")
        for name, layer in given.items():
            found = _named(layer.get("quant_algo") if isinstance(layer, dict) else layer, where)
            layers[name] = _ALGOS.get(found) or Scheme("tensor", foreign=found)
    overall = _ALGOS.get(algo)
    if overall is None and not any(not scheme.foreign for scheme in layers.values()):
        raise CheckpointError(
            f"{where}: quant_algo {shown(algo)}, expected {', '.join(_ALGOS)} or {_MIXED} with one of them: what is "
            "not FP8 is not read. Take the checkpoint's BF16 or FP8 release."
        )
    entries, key = names_listed(said, lists, where)
    kv = said.get("kv_cache_quant_algo") or said.get("kv_cache_scheme")
    return QuantizationConfig(
        "modelopt", where, ByModule(where, layers, default=overall, below=True), entries, key, shown(kv) if kv else None
    )


def _said(content: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(What holds the settings, the keys that list modules in it)."""
    inner = content.get("quantization")
    return (inner, _NESTED_LISTS) if isinstance(inner, dict) else (content, _LISTS)


def _write_list(content: dict[str, Any], names: Sequence[str], add: bool) -> None:
    said, lists = _said(content)
    list_names(said, lists, names, add)
    layers = said.get("quantized_layers")
    if add and isinstance(layers, dict):
        gone = set(names)
        said["quantized_layers"] = {name: layer for name, layer in layers.items() if name not in gone}


def _named(algo: Any, where: str) -> str:
    if not isinstance(algo, str):
        raise CheckpointError(f"{where}: quant_algo {shown(algo)}, expected the name of one, like 'FP8'.")
    return algo.upper()


FORMAT = Format(
    name="ModelOpt",
    methods=("modelopt", "modelopt_fp8", "modelopt_mxfp8", "modelopt_mixed"),
    pairs=((".weight", ".weight_scale"), ("", "_weight_scale")),
    parse=_parse,
    list_keys=_LISTS,
    write_list=_write_list,
)
