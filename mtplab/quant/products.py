"""One matrix product x · wᵀ with a weight held the way its device likes best.

Knows nothing of names, activations or what the product is for.

On a CPU in float32 the weight is packed once for oneDNN (what torch.compile's CPU backend does when it freezes a
model). For 2 to 32 rows this halves the time of `F.linear` on the bundled model's shapes, and a row's result does not
depend on how many rows are beside it (LOG.md, 2026-11-30); both are what speculative decoding needs. Elsewhere, and
where a torch build has no oneDNN, the weight stays as it is.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mtplab.quant.block import ScaledTensor

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

# rows that the packing is optimised for; every number of rows is served
_PACK_ROWS = 8


def _linear():
    """oneDNN's product with a packed weight; a torch build may lack it, so it is looked up when needed."""
    return torch.ops.mkldnn._linear_pointwise


class Product(Protocol):
    """x [m, k] → x · wᵀ [m, n]."""

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [m, n] + the product."""

    def dense(self) -> Tensor:
        """The weight's values [n, k]."""

    def prepare_compiled(self) -> None:
        """Get ready for passes under torch.compile."""


class PackedProduct:
    """float32 on a CPU: weight [n, k] in oneDNN's own layout, no other copy kept."""

    def __init__(self, weight: Tensor):
        self._out_features = weight.shape[0]
        self._linear = _linear()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)

        self._plain: Tensor | None = None

    def prepare_compiled(self) -> None:
        """Keep the weight unpacked too, for the one-row products that a compiled pass writes out itself.

        torch.compile's own loop over one row reads the weight about twice as fast as oneDNN's product does. BF16 where
        that holds every value, as it does for a BF16 checkpoint: half the bytes, the same numbers.
        """
        if self._plain is None:
            dense = self.dense()
            short = dense.bfloat16()
            self._plain = short if torch.equal(short.float(), dense) else dense

    def __call__(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            if x.shape[0] == 1 and self._plain is not None:
                return (x * self._plain.float()).sum(-1).unsqueeze(0)
            return torch.ops.mtplab.packed_linear(x, self._packed, self._out_features)
        return self._linear(x, self._packed, None, "none", [], "")

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            if x.shape[0] == 1 and self._plain is not None:
                return residual + (x * self._plain.float()).sum(-1)
            return torch.ops.mtplab.packed_linear_add(x, residual, self._packed)
        return self._linear.binary(x, residual, self._packed, None, "add")

    def dense(self) -> Tensor:
        return self._packed.to_dense()


class DenseProduct:
    """Any device and dtype: weight [n, k] as torch keeps it."""

    def __init__(self, weight: Tensor):
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return torch.addmm(residual, x, self._weight.t())

    def dense(self) -> Tensor:
        return self._weight

    def prepare_compiled(self) -> None:
        pass


class Fp8Product:
    """FP8 in memory, dequantised by every product: what a GPU uses until a kernel multiplies the codes themselves."""

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


def make_product(weights: list[Tensor | ScaledTensor], dtype: torch.dtype, device: torch.device) -> Product:
    """The product with these weights one below the other, computed in `dtype` on `device`."""
    if device.type != "cpu" and all(isinstance(w, ScaledTensor) for w in weights):
        return Fp8Product([w.to(device) for w in weights], dtype)
    dense = [(w.dequantize(dtype) if isinstance(w, ScaledTensor) else w.to(dtype)).to(device) for w in weights]
    weight = torch.cat(dense) if len(dense) > 1 else dense[0]
    if device.type == "cpu" and dtype == torch.float32 and _packs():
        return PackedProduct(weight)
    return DenseProduct(weight)


def _packs() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
