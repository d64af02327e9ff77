"""HF `fp8`, in the four dialects that share the method's name; the tensors' names tell them apart.

block: `X.weight` [n, k] and `X.weight_scale_inv` [ceil(n/bm), ceil(k/bn)], which despite its name is the multiplier
(DeepSeek-V3, README_WEIGHTS.md), F32, BF16, or powers of two as F32 or F8_E8M0 (`scale_fmt` "ue8m0"). Ragged last
blocks are zero-padded ones, cut off. per tensor: `X.weight_scale_inv` and `X.activation_scale` (transformers,
Mistral), or `X.weight_scale` and `X.input_scale` (AutoFP8, Quark's custom mode; auto-round per channel). DeepSeek-V4:
`X.scale`. Experts are one by one; transformers' writer leaves their scales stacked under the experts' own name
(`experts.gate_up_proj_scale_inv` [e, 2 ceil(i/bm), ceil(h/bn)], gate rows first), which it cannot read back itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mtplab.checkpoint.formats.base import Format, QuantizationConfig, Scheme, SharedScale, block_sizes, names_listed
from mtplab.checkpoint.header import TensorInfo
from mtplab.checkpoint.strict_json import shown
from mtplab.errors import CheckpointError

_LISTS = ("modules_to_not_convert", "ignored_layers")
# transformers writes no fmt at all, MiniMax writes torch's name
_FMT = {None: "e4m3", "e4m3": "e4m3", "float8_e4m3fn": "e4m3", "e5m2": "e5m2", "float8_e5m2": "e5m2"}
_SCHEMES = ("dynamic", "static")
_EXPERT = re.compile(r"(.*\.experts)\.([0-9]{1,6})\.(gate|up|down)_proj\.weight")


def _parse(content: dict[str, Any], where: str) -> QuantizationConfig:
    fmt, activation = content.get("fmt"), content.get("activation_scheme", "dynamic")
    if not isinstance(fmt, str | None) or fmt not in _FMT:
        raise CheckpointError(f"{where}: fmt {shown(fmt)}, expected 'e4m3' or 'e5m2'.")
    if activation not in _SCHEMES:
        raise CheckpointError(f"{where}: activation_scheme {shown(activation)}, expected 'dynamic' or 'static'.")
    block = content.get("weight_block_size")
    if block is not None:
        scheme = Scheme("block", block_sizes(block, where, "weight_block_size"), activation, _FMT[fmt])
    else:  # auto-round says so where a scale is a channel's
        grain = "channel" if content.get("group_size") == -1 else "tensor"
        scheme = Scheme(grain, activation=activation, codes=_FMT[fmt])
    entries, key = names_listed(content, _LISTS, where)
    kv = content.get("kv_cache_scheme")
    return QuantizationConfig("fp8", where, lambda module: scheme, entries, key, shown(kv) if kv else None)


def _stacked(info: TensorInfo, tensors: Mapping[str, TensorInfo], scheme: Scheme) -> SharedScale | None:
    expert = _EXPERT.fullmatch(info.name)
    if expert is None or scheme.granularity != "block" or len(info.shape) != 2:
        return None
    group, number, which = expert[1], int(expert[2]), expert[3]
    scale = tensors.get(f"{group}.{'down_proj' if which == 'down' else 'gate_up_proj'}_scale_inv")
    if scale is None or len(scale.shape) != 3 or number >= scale.shape[0]:
        return None
    rows, columns = (-(-size // block) for size, block in zip(info.shape, scheme.block, strict=True))
    # a gate whose rows end within a block shares that block with the up projection: such a file cannot be told apart
    if which != "down" and info.shape[0] % scheme.block[0]:
        return None
    start = rows if which == "up" else 0
    if scale.shape[1:] != (rows * (1 if which == "down" else 2), columns):
        return None
    return SharedScale(scale, ((number, number + 1), (start, start + rows), (0, columns)))


FORMAT = Format(
    name="HF fp8",
    methods=("fp8",),
    pairs=(
        (".weight", ".weight_scale_inv"),
        (".weight", ".weight_scale"),
        (".weight", ".qscale_weight"),
        (".weight", ".scale"),
        ("", "_scale_inv"),
        ("", "_weight_scale"),
    ),
    parse=_parse,
    shared_scale=_stacked,
    list_keys=_LISTS,
)
