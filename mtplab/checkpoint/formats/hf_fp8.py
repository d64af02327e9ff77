"""HF `fp8` with block scales, as DeepSeek-V3 and Qwen publish it.

`X.weight` F8_E4M3 [n, k] and `X.weight_scale_inv` [ceil(n/bm), ceil(k/bn)], which despite its name is the
multiplier (DeepSeek-V3, README_WEIGHTS.md). Ragged last blocks are zero-padded ones, cut off. Knows nothing
of the dialects that share the method's name with other scales (per-tensor, static); it names them and
refuses.
"""

from __future__ import annotations

from typing import Any

from mtplab.checkpoint.formats.base import Format, QuantizationConfig, grid_shape
from mtplab.checkpoint.strict_json import shown
from mtplab.errors import CheckpointError

# transformers writes no fmt at all, MiniMax writes torch's name
_E4M3_NAMES = (None, "e4m3", "float8_e4m3fn")
_EXCLUSION_KEYS = ("modules_to_not_convert", "ignored_layers")
_MAX_BLOCK = 1 << 20


def _parse(content: dict[str, Any], where: str) -> QuantizationConfig:
    fmt = content.get("fmt")
    if fmt not in _E4M3_NAMES:
        raise CheckpointError(f"{where}: fmt {shown(fmt)}, expected 'e4m3'.")
    scheme = content.get("activation_scheme", "dynamic")
    if scheme != "dynamic":
        raise CheckpointError(
            f"{where}: activation_scheme {shown(scheme)}, expected 'dynamic': static activation scales are not read "
            "yet."
        )
    block = content.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(b) is int and 0 < b <= _MAX_BLOCK for b in block)):
        told = "per-tensor scales are not read yet" if block is None else "two positive whole numbers"
        raise CheckpointError(f"{where}: weight_block_size {shown(block)}, expected like [128, 128]: {told}.")
    entries: list[str] = []
    used = _EXCLUSION_KEYS[0]
    for key in _EXCLUSION_KEYS:
        listed = content.get(key)
        if listed is None:
            continue
        if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
            raise CheckpointError(f"{where}: {key}, expected a list of module names, found {shown(listed)}.")
        used = key if not entries else used
        entries += listed
    return QuantizationConfig(
        method="fp8",
        fmt="e4m3",
        activation_scheme="dynamic",
        weight_block_size=(block[0], block[1]),
        exclusions=tuple(dict.fromkeys(entries)),
        where=where,
        exclusions_key=used,
    )


FORMAT = Format(
    name="HF fp8, block scales",
    methods=("fp8",),
    code_dtypes=("F8_E4M3",),
    weight_suffix=".weight",
    scale_suffix=".weight_scale_inv",
    scale_dtypes=("F32", "BF16", "F16"),
    parse=_parse,
    scale_shape=grid_shape,
)
