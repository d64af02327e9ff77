"""The products of a mixture's experts: every token's rows through gate, up and down of the experts it was sent to.

Knows nothing of how experts are chosen, nor of how their results are weighted and added. On a CPU each expert that was
chosen multiplies its rows with weights packed as any other's; on a GPU that has kernels, FP8 experts are one grouped
product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mtplab.kernels.fnuz import to_fnuz
from mtplab.kernels.gemm_grouped import MOST_ROWS, Routing, gemm_grouped
from mtplab.kernels.quantize import quantize
from mtplab.kernels.silu_quantize import silu_quantize
from mtplab.quant.block import ScaledTensor
from mtplab.quant.fp8_products import Fp8Gemm, e4m3_of, uses_kernels
from mtplab.quant.gating import gated
from mtplab.quant.linear import LinearWeight, PackedLinear
from mtplab.quant.rounding import BY_GROUP

__all__ = ["ExpertWeights", "Experts", "make_experts"]

# vectorised functions work on this many numbers at a time and treat a remainder otherwise (`models/rows.py`)
_LANES = 8

# gate [i, hidden], up [i, hidden] and down [hidden, i] of one expert
ExpertWeights = tuple[LinearWeight, LinearWeight, LinearWeight]


class Experts(Protocol):
    """down(silu(gate(x)) · up(x)) of each row's expert."""

    names: tuple[str, ...]  # the modules that hold the weights, each once

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """x [m, hidden] of tokens → [t, hidden], a row for each of routing's t rows in their order."""

    def linears(self) -> Iterator[PackedLinear]:
        """Every linear layer there is one by one."""


def make_experts(
    weights: Sequence[ExpertWeights], dtype: torch.dtype, device: torch.device, limit: float | None = None
) -> Experts:
    """All experts of one layer, computed in `dtype` on `device`; `limit` clamps them (`gating.py`)."""
    if uses_kernels(device) and limit is None and GroupedExperts.takes(weights):
        return GroupedExperts(weights, dtype, device)
    return LoopedExperts(weights, dtype, device, limit)


def _names(weights: Sequence[ExpertWeights]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(weight.name for expert in weights for weight in expert))


class LoopedExperts:
    """Any device and dtype: one product for each expert that has rows."""

    def __init__(
        self, weights: Sequence[ExpertWeights], dtype: torch.dtype, device: torch.device, limit: float | None = None
    ):
        self.names, self.limit = _names(weights), limit
        up, down = [expert[:2] for expert in weights], [expert[2:] for expert in weights]
        # a token's row is the same for all its experts: where they round it alike, it is rounded once
        self._round_up, up = _common_rounding(up)
        self._round_down, down = _common_rounding(down)
        self._up = [PackedLinear(list(members), dtype, device) for members in up]
        self._down = [PackedLinear(list(members), dtype, device) for members in down]
        self._inner = weights[0][0].value.shape[0]

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        x = (x if self._round_up is None else self._round_up(x))[routing.token]
        sizes = routing.offsets.diff().tolist()
        # whole vectors: how many rows there are must not decide how one is computed
        both = _pad(self._multiplied(self._up, x, sizes))
        mixed = gated(both[:, : self._inner], both[:, self._inner :], self.limit)
        if self._round_down is not None:
            mixed = self._round_down(mixed)
        return self._multiplied(self._down, mixed[: len(x)], sizes)

    @staticmethod
    def _multiplied(experts: list[PackedLinear], x: Tensor, sizes: list[int]) -> Tensor:
        """Each expert's product with its rows of x, in their order."""
        rows = torch.split_with_sizes(x, sizes)
        return torch.cat([expert.joined(mine) for expert, mine, n in zip(experts, rows, sizes, strict=True) if n])

    def linears(self) -> Iterator[PackedLinear]:
        for up, down in zip(self._up, self._down, strict=True):
            yield from (up, down)


def _pad(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, -len(x) % _LANES))


def _common_rounding(experts: list[tuple[LinearWeight, ...]]):
    """How all experts round their input, if they do it alike, and their weights without it; else None and as given."""
    found = {weight.rounding if weight.rounded else None for members in experts for weight in members}
    rounding = found.pop()
    if found or rounding is None:
        return None, experts
    return rounding, [tuple(replace(weight, rounded=False) for weight in members) for members in experts]


class GroupedExperts:
    """W8A8 of E4M3 weights in blocks of 128 × 128: two grouped products, with the activation quantised between."""

    def __init__(self, weights: Sequence[ExpertWeights], dtype: torch.dtype, device: torch.device):
        self.names, self._dtype = _names(weights), dtype
        self._e4m3 = e4m3_of(device)
        self._up = _stacked([expert[:2] for expert in weights], device, self._e4m3)
        self._down = _stacked([expert[2:] for expert in weights], device, self._e4m3)

    @staticmethod
    def takes(weights: Sequence[ExpertWeights]) -> bool:
        """Whether there is a kernel for weights held like these."""
        each = [weight for expert in weights for weight in expert]
        fp8 = all(w.rounded and isinstance(w.value, ScaledTensor) and Fp8Gemm.takes(w.value, w.rounding) for w in each)
        inner, hidden = weights[0][0].value.shape
        # up lies below gate, whose last block must be whole
        return fp8 and inner % BY_GROUP.group == 0 and len(weights) * max(2 * inner, hidden) <= MOST_ROWS

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        codes, scale = quantize(x, BY_GROUP.group, self._e4m3)
        codes = codes.view(torch.uint8)[routing.token].view(self._e4m3)
        both = gemm_grouped(codes, scale[routing.token], *self._up, routing, self._dtype)
        mixed, mixed_scale = silu_quantize(both, self._e4m3)
        return gemm_grouped(mixed, mixed_scale, *self._down, routing, self._dtype)

    def linears(self) -> Iterator[PackedLinear]:
        return iter(())


def _stacked(
    experts: list[tuple[LinearWeight, ...]], device: torch.device, e4m3: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Codes [e, n, k] and scales [e, n/128, k/128] of the experts' matrices, one below the other within an expert."""
    data = torch.stack([torch.cat([w.value.data.view(torch.uint8) for w in members]) for members in experts])
    scale = torch.stack([torch.cat([w.value.scale for w in members]) for members in experts])
    data, scale = data.view(torch.float8_e4m3fn).to(device), scale.to(device)
    return (data, scale) if data.dtype == e4m3 else to_fnuz(data, scale)
