"""FBGEMM FP8: `X.weight` [n, k], `X.weight_scale` F32 [n, 1]; activations per token, clipped at a bound in the config.

Llama 4's stacked experts lie transposed: `experts.gate_up_proj` [e, h, 2i] with `…_scale` [e, 1, 2i], and `down_proj`
[e, i, h] with `…_scale` [e, h, 1], which belongs to the last axis all the same. Source: transformers'
FbgemmFp8Linear and its Llama 4 experts.
"""

from __future__ import annotations

from typing import Any

from mtplab.checkpoint.formats.base import Format, QuantizationConfig, Scheme, names_listed

_LISTS = ("modules_to_not_convert",)
_SCHEME = Scheme("channel", transposed=True)


def _parse(content: dict[str, Any], where: str) -> QuantizationConfig:
    entries, key = names_listed(content, _LISTS, where)
    return QuantizationConfig("fbgemm_fp8", where, lambda module: _SCHEME, entries, key)


FORMAT = Format(
    name="FBGEMM FP8",
    methods=("fbgemm_fp8",),
    pairs=((".weight", ".weight_scale"), ("", "_scale"), ("", "_weight_scale")),
    parse=_parse,
    list_keys=_LISTS,
)
