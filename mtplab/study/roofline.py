"""The least time a matrix product can take on a GPU: its operations or its bytes, whichever takes longer.

The roofline of Williams, Waterman and Patterson (2009). Knows no kernel: what one reaches of it has to be measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtplab.errors import ConfigError
from mtplab.study.gpus import GemmShape, Gpu

__all__ = ["Roof", "roof", "turning_point"]

# bytes of one weight, of one activation read, of one output written: W8A8 reads 1-byte activations, all write BF16
_BYTES = {"fp8": (1.0, 1.0, 2.0), "bf16": (2.0, 2.0, 2.0)}
# one float32 scale for 128 × 128 weights and for 1 × 128 activations
_SCALES = {"fp8": (4 / 128**2, 4 / 128), "bf16": (0.0, 0.0)}

MOST_ROWS = 1 << 30


@dataclass(frozen=True)
class Roof:
    """What bounds one product: operations and bytes, and the seconds either takes at the GPU's best."""

    operations: float
    nbytes: float
    compute_seconds: float
    memory_seconds: float

    @property
    def seconds(self) -> float:
        """The least time."""
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def bound(self) -> str:
        """"memory" or "compute"."""
        return "memory" if self.memory_seconds > self.compute_seconds else "compute"

    @property
    def tflops(self) -> float:
        """TFLOP/s at the least time."""
        return self.operations / self.seconds / 1e12


def roof(shape: GemmShape, m: int, gpu: Gpu, dtype: str) -> Roof:
    """m rows of x times the shape's weight, in "fp8" (block scales) or "bf16". Raises ConfigError for an m below 1 or
    beyond any pass."""
    if not isinstance(m, int) or isinstance(m, bool) or not 1 <= m <= MOST_ROWS:
        raise ConfigError(f"rows m is {m!r:.60}; expected a whole number from 1 to {MOST_ROWS}")
    weight, activation, output = _BYTES[dtype]
    weight_scale, activation_scale = _SCALES[dtype]
    operations = 2.0 * m * shape.n * shape.k
    nbytes = shape.n * shape.k * (weight + weight_scale) + m * shape.k * (activation + activation_scale)
    nbytes += m * shape.n * output
    return Roof(operations, nbytes, operations / (gpu.rate(dtype) * 1e12), nbytes / (gpu.bandwidth * 1e12))


def turning_point(shape: GemmShape, gpu: Gpu, dtype: str) -> int | None:
    """The least m whose product is bound by the matrix unit; None where none is: it moves too many bytes."""
    low, high = 1, 1 << 20
    if roof(shape, high, gpu, dtype).bound == "memory":
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if roof(shape, middle, gpu, dtype).bound == "compute" else (middle + 1, high)
    return low
