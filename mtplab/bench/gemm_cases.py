"""The matrix products that are measured on a GPU: ours, torch's, and those of libraries that happen to be installed.

A case is one weight of a real model and a number of rows; a contestant is a call that gives its product, or quantises x
first. Knows nothing of clocks and tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch
from torch import Tensor

from mtplab.kernels.fnuz import to_fnuz
from mtplab.kernels.fp8_reference import dequantize_block, quantize_block
from mtplab.kernels.gemm import gemm_block, gemm_scaled
from mtplab.kernels.launch import target
from mtplab.kernels.quantize import quantize
from mtplab.study.gpus import GemmShape

__all__ = ["GemmCase", "make_case", "wrong"]

# ‖got − expected‖ / ‖expected‖ that a right product stays under: BF16's rounding of the output is 1.7e-3
TOLERANCE = 5e-3
CHECKED_ROWS = 64


@dataclass
class GemmCase:
    """Contestants of one product: name → call that gives [m, n] BF16. `expected` holds the right values of `rows`, by
    the group of scales that a contestant uses ("block", "scaled" or "bf16")."""

    shape: GemmShape
    m: int
    contestants: dict[str, Callable[[], Tensor]]
    group: dict[str, str]
    rows: Tensor
    expected: dict[str, Tensor]
    refused: dict[str, str] = field(default_factory=dict)  # contestants that cannot run this, and why

    @property
    def operations(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.m * self.shape.n * self.shape.k

    def nbytes(self, name: str) -> float:
        """Bytes that must be moved: operands once, the output once."""
        width = 2 if self.group[name] == "bf16" else 1
        x_width = 2 if name.startswith("quantise") else width
        n, k = self.shape.n, self.shape.k
        return n * k * width + self.m * k * x_width + 2 * self.m * n


def make_case(shape: GemmShape, m: int, device: torch.device, seed: int = 0) -> GemmCase:
    """Random operands of the shape on the device, quantised, and everything that can multiply them."""
    generator = torch.Generator(device).manual_seed(seed)
    n, k = shape.n, shape.k
    x = torch.randn(m, k, generator=generator, device=device).bfloat16()
    w = (torch.randn(n, k, generator=generator, device=device) * k**-0.5).bfloat16()
    fnuz = target(device).e4m3 == "fp8e4b8"
    e4m3 = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    w_code, w_scale = quantize_block(w)
    dense_block = dequantize_block(w_code, w_scale)
    row_code, row_scale = quantize(w, None)
    dense_row = row_code.float() * row_scale
    if fnuz:
        (w_code, w_scale), (row_code, row_scale) = to_fnuz(w_code, w_scale), to_fnuz(row_code, row_scale)
    x_code, x_scale = quantize(x, 128, e4m3, scale_by_group=True)
    t_code, t_scale = quantize(x, None, e4m3)
    # spread over all tiles, the first and the last row among them
    rows = torch.linspace(0, m - 1, min(m, CHECKED_ROWS), device=device).round().long()
    x_block = x_code[rows].float() * x_scale[rows].repeat_interleave(128, 1)[:, :k]
    x_token = t_code[rows].float() * t_scale[rows]
    case = GemmCase(shape, m, {}, {}, rows, {
        "block": x_block @ dense_block.t(), "scaled": x_token @ dense_row.t(), "bf16": x[rows].float() @ w.float().t(),
    })  # fmt: skip

    def add(name: str, group: str, call: Callable[[], Tensor]) -> None:
        try:
            call()
        except Exception as problem:  # compilers and libraries raise kinds of their own; the others go on
            case.refused[name] = f"{type(problem).__name__}: {str(problem).strip().splitlines()[:1]}"[:160]
            return
        case.contestants[name], case.group[name] = call, group

    def quantise_first() -> Tensor:
        code, scale = quantize(x, 128, e4m3, scale_by_group=True)
        return gemm_block(code, scale, w_code, w_scale)

    add("block scales", "block", lambda: gemm_block(x_code, x_scale, w_code, w_scale))
    add("quantise + block scales", "block", quantise_first)
    add("token and channel scales", "scaled", lambda: gemm_scaled(t_code, t_scale, row_code, row_scale))
    add("torch.matmul BF16", "bf16", lambda: x @ w.t())
    add(
        "torch._scaled_mm, token and channel",
        "scaled",
        lambda: torch._scaled_mm(t_code, row_code.t(), t_scale, row_scale.t(), out_dtype=torch.bfloat16),
    )
    add(
        "torch._scaled_mm, blocks",
        "block",
        lambda: torch._scaled_mm(x_code, w_code.t(), x_scale, w_scale.t(), out_dtype=torch.bfloat16),
    )
    if find_spec("deep_gemm") is not None:
        add("DeepGEMM", "block", _deep_gemm(x_code, x_scale, w_code, w_scale))
    if find_spec("vllm") is not None:
        add("vLLM cutlass_scaled_mm", "scaled", _cutlass(t_code, t_scale, row_code, row_scale))
    return case


def wrong(case: GemmCase, name: str) -> str | None:
    """What is wrong with a contestant's product; None where nothing is. Its two runs must have the same bits, too."""
    got = case.contestants[name]().clone()  # a contestant may have but one output
    again = case.contestants[name]()
    expected = case.expected[case.group[name]]
    error = float((got[case.rows].float() - expected).norm() / expected.norm())
    if not error <= TOLERANCE:
        return f"relative error {error:.1e}, at most {TOLERANCE:.0e} is right"
    if not torch.equal(got, again):
        return "two runs differ"
    return None


def _deep_gemm(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor) -> Callable[[], Tensor]:
    import deep_gemm

    out = torch.empty(x.shape[0], w.shape[0], dtype=torch.bfloat16, device=x.device)

    def call() -> Tensor:
        deep_gemm.fp8_gemm_nt((x, x_scale), (w, w_scale), out)
        return out

    return call


def _cutlass(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor) -> Callable[[], Tensor]:
    from vllm import _custom_ops

    return lambda: _custom_ops.cutlass_scaled_mm(x, w.t(), x_scale, w_scale.t(), torch.bfloat16)
