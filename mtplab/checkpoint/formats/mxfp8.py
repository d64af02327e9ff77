"""MXFP8: `X.weight` F8_E4M3 [n, k] and a power of two per 32 columns, as U8 or F8_E8M0 [n, k/32], 2**(byte - 127).

Source: OCP Microscaling Formats (MX) specification v1.0, section 5.
"""

from __future__ import annotations

from typing import Any

from mtplab.checkpoint.formats.base import Format, QuantizationConfig, Scheme, names_listed

_LISTS = ("modules_to_not_convert", "ignored_layers", "ignore")
_SCHEME = Scheme("group", (1, 32))


def _parse(content: dict[str, Any], where: str) -> QuantizationConfig:
    entries, key = names_listed(content, _LISTS, where)
    return QuantizationConfig("mxfp8", where, lambda module: _SCHEME, entries, key)


FORMAT = Format(
    name="MXFP8",
    methods=("mxfp8",),
    pairs=((".weight", ".weight_scale"), (".weight", ".weight_scale_inv"), (".weight", ".scale")),
    parse=_parse,
    list_keys=_LISTS,
)
