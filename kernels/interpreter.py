"""Where Triton's interpreter computes something else than a GPU does, corrected in one place.

The interpreter of Triton 3.6 to 3.9 (`triton/runtime/interpreter.py`) gets four things wrong, most of them in silence:

- Casts to FP8 lose the carry of a rounding (127.94 becomes 64), break ties away from zero and wrap on overflow; casts
  to BF16 cut instead of rounding to nearest even; FP8's NaN and infinity read back as numbers
  (github.com/triton-lang/triton/issues/8322). Here torch converts, after clamping as the GPUs' saturating casts do.
- `tl.dot` of BF16 operands multiplies their bit patterns as integers (pull request 11585, closed unmerged). Here
  operands narrower than 32 bits are multiplied in float32, where the products of FP8, FP16 and BF16 are exact.
- FNUZ types cannot be cast to at all.
- Arithmetic on BF16 or FP8 works on bit patterns too. Here it raises: a kernel computes in float32.

This file can go when Triton's own interpreter passes `tests/test_kernel_interpreter.py`. It knows no kernel of ours.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

__all__ = ["correct"]

_TORCH = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
_BITS = {  # by bytes
    1: (torch.uint8, np.uint8),
    2: (torch.int16, np.uint16),
    4: (torch.int32, np.uint32),
    8: (torch.int64, np.uint64),
}
_AS_BITS = (tl.bfloat16, tl.float8e4nv, tl.float8e5, tl.float8e4b8, tl.float8e5b16, tl.float8e4b15)


def correct() -> None:
    """Correct the interpreter of this process; does nothing where kernels are compiled, or a second time."""
    if not triton.knobs.runtime.interpret:
        return
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "_corrected", False):
        return
    builder._corrected = True
    interpreter._patch_lang_core = _with_fnuz(interpreter._patch_lang_core)
    interpreter._convert_float = _convert
    builder.create_dot = _dot
    builder.cast_impl = _quiet(builder.cast_impl)
    interpreter.ReduceOps.min_max = _without_warning(interpreter.ReduceOps.min_max)
    builder.binary_op = _checked_float(builder.binary_op)
    builder.ternary_op = _checked_float(builder.ternary_op)
    builder.unary_op = _checked_float(builder.unary_op)
    builder.create_select = lambda self, cond, lhs, rhs: interpreter.TensorHandle(
        np.where(cond.data, lhs.data, rhs.data), rhs.dtype.scalar
    )


def _convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding_mode: object) -> np.ndarray:
    """Bits of `source` → bits of `target`, to nearest even; FP8 saturates, NaN stays NaN."""
    shape = data.shape
    values = torch.from_numpy(np.ascontiguousarray(data).view(_BITS[source.primitive_bitwidth // 8][1]).copy())
    values = values.view(_dtype(source))
    wanted = _dtype(target)
    if target.primitive_bitwidth == 8:
        top = torch.finfo(wanted).max
        values = values.float().clamp(-top, top)
    elif source.primitive_bitwidth == 8:
        values = values.float()
    to_bits, as_numpy = _BITS[target.primitive_bitwidth // 8]
    return values.to(wanted).view(to_bits).numpy().view(as_numpy).reshape(shape)


def _dtype(dtype: tl.dtype) -> torch.dtype:
    if dtype not in _TORCH:
        raise NotImplementedError(f"a cast from or to {dtype}: expected one of {', '.join(map(str, _TORCH))}")
    return _TORCH[dtype]


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    from triton.runtime import interpreter

    operands = []
    for x in (a, b):
        data = x.data
        if x.dtype.is_floating() and x.dtype.primitive_bitwidth < 32:
            data = _convert(data, x.dtype.scalar, tl.float32, None).view(np.float32)
        operands.append(data)
    with np.errstate(all="ignore"):  # a GPU does not warn of a NaN either
        product = np.matmul(*operands, dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _with_fnuz(patch_core):
    def patched(lang, scope):
        patch_core(lang, scope)
        to_ir = lang.dtype.to_ir
        fnuz = {"fp8e4b8": "get_fp8e4b8_ty", "fp8e5b16": "get_fp8e5b16_ty"}
        scope.set_attr(
            lang.dtype,
            "to_ir",
            lambda self, builder: getattr(builder, fnuz[self.name])() if self.name in fnuz else to_ir(self, builder),
        )

    return patched


def _quiet(operation):
    """A cast that overflows does so without a warning, as on a GPU."""

    def quiet(self, *arguments):
        with np.errstate(all="ignore"):
            return operation(self, *arguments)

    return quiet


def _without_warning(min_max):
    """numpy warns of a maximum of NaN alone; these two functions give the same and do not."""
    silent = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}

    def patched(self, input, val_reduce_op, idx_reduce_op=None):
        with np.errstate(all="ignore"):
            return min_max(self, input, silent.get(val_reduce_op, val_reduce_op), idx_reduce_op)

    return patched


def _checked_float(operation):
    def checked(self, *arguments):
        for argument in arguments:
            dtype = getattr(getattr(argument, "dtype", None), "scalar", None)
            if dtype in _AS_BITS:
                raise NotImplementedError(f"arithmetic on {dtype} in Triton's interpreter: compute in float32")
        with np.errstate(all="ignore"):  # a GPU does not warn of a NaN either
            return operation(self, *arguments)

    return checked
