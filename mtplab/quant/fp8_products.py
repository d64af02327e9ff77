"""Products with a weight that stays FP8 in memory: codes times codes on a GPU's matrix unit, or dequantised every time.

Knows nothing of names or what a product is for. The kernels are in `mtplab.kernels.gemm` and `quantize`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtplab.errors import ConfigError
from mtplab.kernels import launch
from mtplab.kernels.fnuz import to_fnuz
from mtplab.kernels.gemm import gemm_block, gemm_scaled
from mtplab.kernels.quantize import quantize
from mtplab.quant.block import BLOCK, ScaledTensor
from mtplab.quant.rounding import BY_GROUP, Rounding


def uses_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run on this device. Raises ConfigError for a MTPLAB_KERNELS that cannot be obeyed."""
    try:
        return launch.chosen(device) == "triton"
    except ValueError as problem:
        raise ConfigError(str(problem)) from None


def e4m3_of(device: torch.device) -> torch.dtype:
    """The E4M3 that this device's matrix unit multiplies: its FNUZ form on gfx942 (`kernels/fnuz.py`)."""
    return torch.float8_e4m3fnuz if launch.target(device).e4m3 == "fp8e4b8" else torch.float8_e4m3fn


class Fp8Gemm:
    """W8A8: x in E4M3 with one scale a token and 128 values, times E4M3 weights in blocks of 128 × 128.

    The rounding of x is that of `round_activation`, so a run on a GPU has a CPU's quantisation error; sums differ in
    order, and the result is rounded to `dtype` once.
    """

    def __init__(self, weights: list[ScaledTensor], dtype: torch.dtype):
        """Weights [n_i, k], one below the other."""
        self._dtype = dtype
        self._e4m3 = e4m3_of(weights[0].data.device)
        if self._e4m3 == torch.float8_e4m3fnuz:
            weights = [ScaledTensor(*to_fnuz(w.data, w.scale)) for w in weights]
        self._weights = _joined(weights)

    @staticmethod
    def takes(weight: ScaledTensor, rounding: Rounding) -> bool:
        """Whether there is a kernel for weights held like this one."""
        return rounding == BY_GROUP and weight.block == BLOCK and weight.data.dtype == torch.float8_e4m3fn

    def __call__(self, x: Tensor) -> Tensor:
        codes, scale = self._codes(x)
        out = [gemm_block(codes, scale, w.data, w.scale, self._dtype) for w in self._weights]
        return out[0] if len(out) == 1 else torch.cat(out, dim=-1)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        codes, scale = self._codes(x)
        out, start = [], 0
        for w in self._weights:
            rest = residual[:, start : start + w.shape[0]]
            out.append(gemm_block(codes, scale, w.data, w.scale, self._dtype, rest))
            start += w.shape[0]
        return out[0] if len(out) == 1 else torch.cat(out, dim=-1)

    def dense(self) -> Tensor:
        return torch.cat([w.dequantize(self._dtype) for w in self._weights])

    def prepare_compiled(self) -> None:
        pass

    def _codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize(x, BY_GROUP.group, self._e4m3, scale_by_group=True)


class Fp8ScaledGemm:
    """W8A8: x in E4M3 with one scale a token, or a stored one for all, times E4M3 weights with one a row or a matrix.

    The rounding of x is that of `Rounding`; sums differ in order, and the result is rounded to `dtype` once.
    """

    def __init__(self, weights: list[ScaledTensor], dtype: torch.dtype, rounding: Rounding):
        """Weights [n_i, k], one below the other."""
        self._dtype = dtype
        device = weights[0].data.device
        scale = torch.cat([w.scale.float().reshape(-1, 1).expand(w.shape[0], 1) for w in weights]).contiguous()
        data = torch.cat([w.data.view(torch.uint8) for w in weights]).view(torch.float8_e4m3fn)
        self._e4m3 = e4m3_of(device)
        if self._e4m3 == torch.float8_e4m3fnuz:
            data, scale = to_fnuz(data, scale)
        self._data, self._scale = data, scale
        self._static = None if rounding.scale is None else torch.tensor([rounding.scale], device=device)

    @staticmethod
    def takes(weight: ScaledTensor, rounding: Rounding) -> bool:
        """Whether there is a kernel for weights held like this one."""
        by_row = weight.block[1] >= weight.shape[1] and weight.scale.shape[0] in (1, weight.shape[0])
        whole = rounding.scale is not None or not rounding.group
        return whole and by_row and weight.data.dtype == torch.float8_e4m3fn

    def __call__(self, x: Tensor) -> Tensor:
        return gemm_scaled(*self._codes(x), self._data, self._scale, self._dtype)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self(x)

    def dense(self) -> Tensor:
        return (self._data.float() * self._scale).to(self._dtype)

    def prepare_compiled(self) -> None:
        pass

    def _codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self._static is None:
            return quantize(x, None, self._e4m3)
        # cut at 448 stored scales whatever the codes: FNUZ ends at 240 and means half as much
        codes = (x.float() / self._static).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)
        return (codes, self._static) if self._e4m3 == codes.dtype else to_fnuz(codes, self._static)


class Fp8Product:
    """Inputs as they are times FP8 weights, dequantised by every product: W8A16, for which there is no kernel."""

    def __init__(self, weights: list[ScaledTensor], dtype: torch.dtype):
        self._weights, self._dtype = weights, dtype

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dense())

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return torch.addmm(residual, x, self.dense().t())

    def dense(self) -> Tensor:
        return torch.cat([w.dequantize(self._dtype) for w in self._weights])

    def prepare_compiled(self) -> None:
        pass


def _joined(weights: list[ScaledTensor]) -> list[ScaledTensor]:
    """As few matrices as their grids of scales allow: one can be put below another that ends with a whole block."""
    found = [weights[0]]
    for weight in weights[1:]:
        above = found[-1]
        if above.shape[0] % BLOCK[0]:
            found.append(weight)
            continue
        found[-1] = ScaledTensor(
            torch.cat([above.data.view(torch.uint8), weight.data.view(torch.uint8)]).view(above.data.dtype),
            torch.cat([above.scale, weight.scale]),
        )
    return found
