"""What is compiled: one kernel with one choice of everything that is fixed at compile time.

Every `*_jit.py` says with `variants(target)` which of these its launcher can choose on that GPU, so that what is
compiled ahead of time and what runs come from one list. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Variant", "kernel_modules"]


@dataclass(frozen=True)
class Variant:
    """`signature` maps each run-time argument to Triton's type ("*fp8e4nv", "i32", "tensordesc<fp8e4nv[64, 128]>");
    `constants` each `tl.constexpr`; `divisible` names the arguments that are multiples of 16 wherever it is launched;
    `label` says in a few characters what sets it apart, as tables print it.
    """

    kernel: Any
    label: str
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 1
    fp8_mma: bool = False  # the machine code must use the FP8 matrix instruction
    quick: bool = False  # the one that stands for its kernel in the test suite
    options: dict[str, Any] = field(default_factory=dict)  # of the backend


def kernel_modules() -> list[str]:
    """Names of the modules beside this one that hold kernels."""
    from pathlib import Path

    return sorted(path.stem for path in Path(__file__).parent.glob("*_jit.py"))
