"""Intel auto-round: `bits` 8 and `data_type` "fp"; `group_size` -1 (channel), 0 (tensor) or [bm, bn].

`X.weight_scale` [n] or `X.weight_scale_inv` [ceil, ceil], F32; `X.input_scale` [1] where activations are static.
`extra_config` overrides keys for single layers, by name or pattern: 16 bits are an exclusion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtplab.checkpoint.formats.base import Format, QuantizationConfig, Scheme, block_sizes
from mtplab.checkpoint.formats.by_module import ByModule
from mtplab.checkpoint.strict_json import shown
from mtplab.errors import CheckpointError

_LIST = "extra_config"
_KEPT = {"bits": 16, "act_bits": 16, "data_type": "float"}  # what it says there of a module
_CODES = {None: "e4m3", "e4m3": "e4m3", "e5m2": "e5m2"}


def _parse(content: dict[str, Any], where: str) -> QuantizationConfig:
    overall = _scheme(content, where)
    extra = content.get(_LIST) or {}
    if not isinstance(extra, dict) or not all(isinstance(own, dict) for own in extra.values()):
        raise CheckpointError(f"{where}: extra_config, expected an object of objects by layer, found {shown(extra)}.")
    own = {name: _scheme({**content, **given}, f"{where}: extra_config.{shown(name)}") for name, given in extra.items()}
    if all(scheme.foreign for scheme in (overall, *own.values())):
        raise CheckpointError(
            f"{where}: auto-round with {overall.foreign}, expected 8 bits of 'fp': what is not FP8 is not read."
        )
    kept = tuple(name for name, scheme in own.items() if scheme.foreign)
    literal = {name: scheme for name, scheme in own.items() if not set(name) & set("\\^$()[]{}|+?*")}
    patterns = [(name, scheme) for name, scheme in own.items() if name not in literal]
    return QuantizationConfig("auto-round", where, ByModule(where, literal, patterns, overall), kept, _LIST)


def _write_list(content: dict[str, Any], names: Sequence[str], add: bool) -> None:
    extra = content.get(_LIST) or {}
    if not add:
        extra = {name: given for name, given in extra.items() if not _scheme({**content, **given}, "").foreign}
    content[_LIST] = extra | {name: dict(_KEPT) for name in names}


def _scheme(content: dict[str, Any], where: str) -> Scheme:
    bits, kind, group = content.get("bits"), content.get("data_type"), content.get("group_size")
    fmt = content.get("fmt")
    if bits != 8 or not isinstance(kind, str) or not kind.startswith("fp"):
        return Scheme("tensor", foreign=f"{shown(bits)} bits of data_type {shown(kind)}")
    if not isinstance(fmt, str | None) or fmt not in _CODES:
        raise CheckpointError(f"{where}: fmt {shown(fmt)}, expected 'e4m3' or 'e5m2'.")
    acts = content.get("act_bits", 8)
    activation = "none" if acts != 8 else "dynamic" if content.get("act_dynamic", True) else "static"
    if group in (-1, 0) and type(group) is int:
        return Scheme("channel" if group else "tensor", activation=activation, codes=_CODES[fmt])
    if isinstance(group, list):
        return Scheme("block", block_sizes(group, where, "group_size"), activation, _CODES[fmt])
    return Scheme("group", block_sizes([1, group], where, "[1, group_size]"), activation, _CODES[fmt])


FORMAT = Format(
    name="auto-round",
    methods=("auto-round",),
    pairs=((".weight", ".weight_scale_inv"), (".weight", ".weight_scale")),
    parse=_parse,
    list_keys=(_LIST,),
    write_list=_write_list,
)
