"""The GPUs that kernels are compiled for, and what is asked of their machine code.

Imports neither torch nor triton, so that it can be read anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TARGETS", "Target"]


@dataclass(frozen=True)
class Target:
    """One GPU architecture.

    `shared_limit` is bytes of shared memory (LDS) a block may have: CUDA C++ Programming Guide, table of technical
    specifications per compute capability (opt-in maximum); AMD's CDNA3 and CDNA4 instruction set guides.
    `fp8_mma` matches the FP8 matrix instruction in the disassembly, `any_mma` any matrix instruction. `e4m3` is
    Triton's name of the E4M3 type that the matrix unit takes: gfx942 has FNUZ.
    """

    name: str
    backend: str  # "cuda" or "hip"
    arch: int | str
    warp: int
    shared_limit: int
    e4m3: str
    e5m2: str
    fp8_mma: str
    any_mma: str
    descriptors: bool  # tensor descriptors are hardware (TMA) rather than emulated with pointers

    def top(self, fp8: str) -> float:
        """The largest number of one of Triton's FP8 types."""
        return {"fp8e4nv": 448.0, "fp8e4b8": 240.0}.get(fp8, 57344.0)


_NVIDIA_MMA = r"\b(UTC[A-Z]*MMA|[QHI]?GMMA|[QHI]MMA)\b"
_AMD_MMA = r"\bv_mfma_\w+"

_FP8 = ("fp8e4nv", "fp8e5")
_FNUZ = ("fp8e4b8", "fp8e5b16")
_CDNA3 = r"\bv_mfma_f32_\w+_(fp8|bf8)_(fp8|bf8)\b"

TARGETS = {
    target.name: target
    for target in (
        Target("sm_89", "cuda", 89, 32, 99 << 10, *_FP8, r"\bQMMA\b", _NVIDIA_MMA, False),
        Target("sm_90", "cuda", 90, 32, 227 << 10, *_FP8, r"\bQGMMA\b", _NVIDIA_MMA, True),
        Target("sm_100", "cuda", 100, 32, 227 << 10, *_FP8, r"\bUTCQMMA\b", _NVIDIA_MMA, True),
        Target("sm_120", "cuda", 120, 32, 99 << 10, *_FP8, r"\bQMMA\b", _NVIDIA_MMA, True),
        Target("gfx942", "hip", "gfx942", 64, 64 << 10, *_FNUZ, _CDNA3, _AMD_MMA, False),
        Target("gfx950", "hip", "gfx950", 64, 160 << 10, *_FP8, rf"{_CDNA3}|_f8f6f4\b", _AMD_MMA, False),
    )
}
