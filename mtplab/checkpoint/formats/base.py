"""What a format description says, and the parsed form of a quantisation config.

Knows no format: each is a file beside this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Format", "QuantizationConfig", "grid_shape"]


@dataclass(frozen=True)
class QuantizationConfig:
    """A checkpoint's quantisation config, in one vocabulary for every format."""

    method: str  # quant_method as it stands
    fmt: str  # the codes: "e4m3"
    activation_scheme: str  # "dynamic": activations are quantised per token and group as they come
    weight_block_size: tuple[int, int]  # (bm, bn) rows and columns that share a scale
    exclusions: tuple[str, ...]  # modules kept in high precision, as listed
    where: str  # file and key path
    exclusions_key: str = "modules_to_not_convert"


@dataclass(frozen=True)
class Format:
    """One layout of quantised weights: everything the readers need to know of it."""

    name: str
    methods: tuple[str, ...]  # quant_method strings it answers to
    code_dtypes: tuple[str, ...]  # storage dtypes of the codes
    weight_suffix: str
    scale_suffix: str  # in place of weight_suffix; the tensor is the multiplier
    scale_dtypes: tuple[str, ...]
    parse: Callable[[dict[str, Any], str], QuantizationConfig]
    scale_shape: Callable[[tuple[int, ...], QuantizationConfig], tuple[int, ...]]


def grid_shape(shape: tuple[int, ...], config: QuantizationConfig) -> tuple[int, ...]:
    """Shape of the scales of a weight [n, k]: [ceil(n / bm), ceil(k / bn)]."""
    return tuple(-(-size // block) for size, block in zip(shape, config.weight_block_size, strict=True))
