"""What is compiled: one kernel with one choice of everything that is fixed at compile time.

Every `*_jit.py` says with `variants(target)` which of these its launcher can choose on that GPU, so that what is
compiled ahead of time and what runs come from one list: same types, same constants, same knowledge of alignment.
Whole tensors lie at multiples of 16 bytes, which the lists take for granted; a slice that does not, given where its
alignment matters, compiles its kernel once more. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from mtplab.kernels.targets import Target

__all__ = ["UNITS", "Variant", "integers", "kernel_modules", "with_large"]

# What sizes and strides are given in: 16 elements where all are multiples of 16, 1 otherwise. The compiler then knows
# of vectors what it would otherwise learn from the numbers themselves, compiling anew whenever a batch changes them.
UNITS = (16, 1)


@dataclass(frozen=True)
class Variant:
    """`signature` maps each run-time argument to Triton's type ("*fp8e4nv", "i32", "tensordesc<fp8e4nv[64, 128]>");
    `constants` each `tl.constexpr`; `divisible` names the arguments that are multiples of 16 wherever it is launched;
    `large` the tensors of more than 2 GiB; `label` says in a few characters what sets it apart, as tables print it.
    """

    kernel: Any
    label: str
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...] = ()
    large: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 1
    fp8_mma: bool = False  # the machine code must use the FP8 matrix instruction
    quick: bool = False  # the one that stands for its kernel in the test suite
    options: dict[str, Any] = field(default_factory=dict)  # of the backend

    def attributes(self, target: Target) -> dict[str, list[list[Any]]]:
        """What a launch on the target tells the compiler of each run-time argument."""
        found: dict[str, list[list[Any]]] = {}
        for name, kind in self.signature.items():
            told: list[list[Any]] = [["tt.divisibility", 16]] if name in self.divisible else []
            # Triton's AMD backend says so of tensors whose storage is below 2 GiB, and of no other
            if target.backend == "hip" and kind.startswith("*") and name not in self.large:
                told.append(["tt.pointer_range", 32])
            if told:
                found[name] = told
        return found


def integers(kernel: Any, names: Iterable[str]) -> dict[str, str]:
    """Types of a kernel's integers: 64 bits where its signature says so, 32 as a launch has them otherwise."""
    said = kernel.fn.__annotations__
    return {name: "i64" if str(said.get(name)) == "tl.int64" else "i32" for name in names}


def with_large(variants: list[Variant], target: Target, *names: tuple[str, ...]) -> list[Variant]:
    """The variants, and on AMD, where that is compiled anew, those for each set of tensors of more than 2 GiB.

    For what is kept between launches: caches, states, weights. An activation that large compiles its kernel once more.
    """
    if target.backend != "hip":
        return variants
    large = [
        replace(x, large=which, label=f"{x.label} {'+'.join(which)} >2 GiB", quick=False)
        for which in names
        for x in variants
    ]
    return variants + large


def kernel_modules() -> list[str]:
    """Names of the modules beside this one that hold kernels."""
    from pathlib import Path

    return sorted(path.stem for path in Path(__file__).parent.glob("*_jit.py"))
