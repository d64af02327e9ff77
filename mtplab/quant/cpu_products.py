"""float32 products on a CPU with a weight packed once, for few rows.

With either packing a row's result does not depend on how many rows are beside it, which exact decoding needs, and few
rows take a fraction of the time of `F.linear` (LOG.md, 2026-11-30). A weight whose every value is a power of two times
an FP16 number, as a BF16 checkpoint's are, is packed as FP16 for FBGEMM: half the bytes to read, the same function.
Any other is packed for oneDNN. Knows nothing of names, activations or what a product is for.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

# rows that the packing is optimised for; every number of rows is served
_PACK_ROWS = 8


def _linear():
    """oneDNN's product with a packed weight; a torch build may lack it, so it is looked up when needed."""
    return torch.ops.mkldnn._linear_pointwise


class PackedProduct:
    """float32 on a CPU: weight [n, k] in oneDNN's own layout, no other copy kept."""

    def __init__(self, weight: Tensor):
        self._out_features = weight.shape[0]
        self._linear = _linear()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)

    def prepare_compiled(self) -> None:
        pass

    def __call__(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.mtplab.packed_linear(x, self._packed, self._out_features)
        return self._linear(x, self._packed, None, "none", [], "")

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.mtplab.packed_linear_add(x, residual, self._packed)
        return self._linear.binary(x, residual, self._packed, None, "add")

    def dense(self) -> Tensor:
        return self._packed.to_dense()


# the same operators under names of ours: torch.compile has a lowering of its own for oneDNN's, which wants constants
_library = torch.library.Library("mtplab", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor packed, int n) -> Tensor")
_library.define("packed_linear_add(Tensor x, Tensor residual, Tensor packed) -> Tensor")
_every = "CompositeExplicitAutograd"
_library.impl("packed_linear", lambda x, packed, n: _linear()(x, packed, None, "none", [], ""), _every)
_library.impl("packed_linear_add", lambda x, res, packed: _linear().binary(x, res, packed, None, "add"), _every)
torch.library.register_fake("mtplab::packed_linear", lambda x, packed, n: x.new_empty(x.shape[0], n), lib=_library)
torch.library.register_fake(
    "mtplab::packed_linear_add", lambda x, residual, packed: torch.empty_like(residual), lib=_library
)


class HalfProduct:
    """float32 on a CPU: weight [n, k] = 2^−s · an FP16 matrix exactly, packed by FBGEMM, summed in float32."""

    def __init__(self, scaled: Tensor, unscale: float):
        """scaled = 2^s · weight, exact in FP16; unscale = 2^−s."""
        self._unscale = unscale
        self._packed = torch.ops.quantized.linear_prepack_fp16(scaled, None)
        self._compiled: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, weight: Tensor, own: bool = False) -> HalfProduct | None:
        """The product; None where FP16 would round the weight, or this torch build has no FBGEMM.

        `own`: the weight may be changed, which saves a copy of it; where the result is None it stays as it is.
        """
        if torch.backends.quantized.engine not in ("x86", "fbgemm") or not weight.numel():
            return None
        # FP16 ends at 65504: the largest value comes to lie in [2^14, 2^15)
        largest = max(-float(weight.amin()), float(weight.amax()))
        exponent = 15 - math.frexp(largest)[1] if math.isfinite(largest) else _MOST
        # one row shows most that do not fit
        if abs(exponent) >= _MOST or not all(_is_half(band * 2.0**exponent) for band in (weight[:1], *_bands(weight))):
            return None
        return cls(weight.mul_(2.0**exponent) if own else weight * 2.0**exponent, 2.0**-exponent)

    def prepare_compiled(self) -> None:
        """Pack the weight for the form of the same product that torch.compile calls without going through Python."""
        if self._compiled is None and _has_compiled_half():
            weight, _ = torch.ops.quantized.linear_unpack_fp16(self._packed)
            packed = torch.ops._quantized.wrapped_fbgemm_pack_gemm_matrix_fp16(weight)
            self._compiled = packed, weight.new_zeros(len(weight))

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x).mul_(self._unscale)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return torch.add(residual, self._product(x), alpha=self._unscale)

    def _product(self, x: Tensor) -> Tensor:
        if self._compiled is not None and torch.compiler.is_compiling():
            packed, zeros = self._compiled
            return torch.ops._quantized.wrapped_fbgemm_linear_fp16_weight(x, packed, zeros, len(zeros))
        return torch.ops.quantized.linear_dynamic_fp16(x, self._packed)

    def dense(self) -> Tensor:
        return torch.ops.quantized.linear_unpack_fp16(self._packed)[0] * self._unscale


# powers of two up to here leave the exponents of float32 room on both sides
_MOST = 60


def _bands(weight: Tensor) -> Iterator[Tensor]:
    """Rows, about a million values at a time: what is made of a band stays small, and in cache."""
    rows = max(1, (1 << 20) // max(1, weight.shape[1]))
    yield from (weight[start : start + rows] for start in range(0, len(weight), rows))


def _is_half(values: Tensor) -> bool:
    return torch.equal(values.half().float(), values)


@cache
def _has_compiled_half() -> bool:
    """Whether torch has the FP16 product as an operator of tensors only; tried once.

    It warns, once in a process, that a coming release may drop it. Autograd makes that a Python warning, which can be
    kept from the user, who can do nothing about it: without the operator a compiled pass calls the eager form.
    """

    class Try(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            packed = torch.ops._quantized.wrapped_fbgemm_pack_gemm_matrix_fp16(x)
            return torch.ops._quantized.wrapped_fbgemm_linear_fp16_weight(x, packed, x[0], len(x))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return bool((Try.apply(torch.ones(8, 8)) == 9).all())
        except (AttributeError, RuntimeError):
            return False


def packed_product(weight: Tensor, own: bool = False) -> HalfProduct | PackedProduct | None:
    """The best of the packings for weight [n, k] float32; None where this torch build has neither library.

    `own`: the weight is nobody else's, and may be changed where there is one.
    """
    half = HalfProduct.of(weight, own)
    if half is not None:
        return half
    packs = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return PackedProduct(weight) if packs else None
