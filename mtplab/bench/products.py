"""The matrix products of one decoding pass: torch's own against the packed ones, and whose rows stand alone.

Knows nothing of how the report is printed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtplab.bench.timing import interleave
from mtplab.models import Model
from mtplab.quant.cpu_products import HalfProduct, PackedProduct
from mtplab.quant.products import DenseProduct

ROWS = (1, 2, 3, 4, 5, 8, 16, 32, 128)


KINDS = {"F.linear": DenseProduct, "oneDNN": PackedProduct, "FBGEMM FP16": HalfProduct.of}


@dataclass(frozen=True)
class ProductLine:
    """m rows: by kind, the median milliseconds of all products of a pass, and how many of them have a row with other
    bits than the same row of a product of 256."""

    rows: int
    milliseconds: dict[str, float]
    differ: dict[str, int]


@torch.inference_mode()
def products(model: Model, rounds: int) -> list[ProductLine]:
    """Every linear layer of a float32 model on a CPU, whose weights FP16 holds, at each number of rows."""
    weights = [torch.cat(linear.weights()) for linear in model.target.linears()]
    kinds = [[make(w) for w in weights] for make in KINDS.values()]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(256, w.shape[1], generator=generator) for w in weights]
    whole = [[product(x) for product, x in zip(kind, inputs, strict=True)] for kind in kinds]
    lines = []
    for m in ROWS:
        few = [x[:m] for x in inputs]

        def run(kind: list, few: list = few) -> list:
            return [product(x) for product, x in zip(kind, few, strict=True)]

        timed = interleave(
            {name: (m, lambda kind=kind: run(kind)) for name, kind in zip(KINDS, kinds, strict=True)}, rounds
        )
        differ = [
            sum(not torch.equal(out, all_rows[:m]) for out, all_rows in zip(run(kind), wide, strict=True))
            for kind, wide in zip(kinds, whole, strict=True)
        ]
        milliseconds = {name: timing.median * 1e3 for name, timing in timed.items()}
        lines.append(ProductLine(m, milliseconds, dict(zip(KINDS, differ, strict=True))))
    return lines
