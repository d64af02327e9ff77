"""Bytes of weights as `load_model` holds them: from a plan, a device and the dtype that is computed in.

Arithmetic over headers: reads no values and imports no torch. How weights are held is `quant/products.py`'s to decide
and said again here by its rules; `tests/test_memory.py` holds the two together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mtplab.checkpoint import ModulePlan, Plan
from mtplab.checkpoint.audit.sizes import PARTS, part_shown

__all__ = ["DTYPE_BYTES", "Held", "held_weights", "largest_product"]

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# stored so, every value is a power of two times an FP16 number unless the largest is 2^31 times the smallest
_SHORT = ("BF16", "F16")
# what a head may hold a copy of (`build.py`): its module's last name → the part whose it is
_COPIES = {"embed_tokens": "embedding", "head": "head", "lm_head": "head"}
_POWERS = ("F8_E8M0", "U8")  # scales that are powers of two


@dataclass(frozen=True)
class Held:
    """Weights of one part held one way. `at_most`: where values do not fit the way expected, or a head's embedding and
    output matrix are not the target's, which only values say."""

    part: str  # as `checkpoint.audit.sizes.PARTS`
    dtype: str
    nbytes: int
    at_most: int


def held_weights(
    plan: Plan,
    device: str,
    dtype: str,
    tied: tuple[int, int] | None = None,
    biases: Mapping[str, int] = MappingProxyType({}),
) -> list[Held]:
    """Every part's weights by the way they are held, in the order of PARTS.

    `dtype` is the compute dtype; `tied`: the shape of a vocabulary head that has no tensor of its own; `biases`: values
    of the biases that modules have beside their weights.
    """
    found: dict[tuple[str, str], list[int]] = {}

    def add(part: str, how: str, nbytes: int, at_most: int = 0) -> None:
        sums = found.setdefault((part, how), [0, 0])
        sums[0] += nbytes
        sums[1] += max(nbytes, at_most)

    packs = device.startswith("cpu") and dtype == "float32"
    targets = {(m.part, m.shape, m.stored) for m in plan.modules if m.part in ("embedding", "head")}
    for module in plan.modules:
        if module.part == "unused":
            continue
        how, *nbytes = _held(module, device, dtype, packs)
        copied = _COPIES.get(module.name.rpartition(".")[2])
        if module.part == "draft" and (copied, module.shape, module.stored) in targets:
            nbytes = [0, max(nbytes)]  # values say whether it is a copy, and then the target's serves
        add(part_shown(module), how, *nbytes)
        if module.name in biases:
            add(part_shown(module), dtype, DTYPE_BYTES[dtype] * biases[module.name])
    if tied is not None and packs:  # anywhere else the embedding itself is used
        add("head", *_packed(tied, True))
    held = [Held(part, how, *sums) for (part, how), sums in found.items()]
    return sorted(held, key=lambda each: (PARTS.index(each.part), -each.nbytes))


def _held(module: ModulePlan, device: str, dtype: str, packs: bool) -> tuple[str, int] | tuple[str, int, int]:
    """(how, bytes[, at most])."""
    count, size = math.prod(module.shape), DTYPE_BYTES[dtype]
    if module.kind == "norm":
        return "float32", 8 * count  # the weight, and times √n (`models/norm.py`)
    if module.kind == "other" and len(module.shape) < 2:
        return "float32", 4 * count
    if module.name.endswith(".kv_b_proj"):  # values, on a GPU too (`quant/headwise.py`)
        return dtype, size * count
    if module.weight == "fp8" and not device.startswith("cpu"):
        scales = math.prod(-(-n // block) for n, block in zip(module.shape, module.block or (), strict=True))
        return "FP8 and float32 scales", count + 4 * scales
    if not (packs and _multiplies(module)):
        return dtype, size * count
    exact = module.stored in _SHORT and module.weight != "fp8"
    exact |= module.weight == "fp8" and module.scale is not None and module.scale.dtype in _POWERS
    return _packed(module.shape, exact)


def _multiplies(module: ModulePlan) -> bool:
    """Whether its weight is that of products: a matrix, or a stack of experts' that is packed one by one, also where
    the family's stacks are not known to `ModulePlan.multiplies`: a size is told of what is not run, too."""
    return len(module.shape) >= 2 and module.kind not in ("embedding", "conv")


def _packed(shape: tuple[int, ...], exact: bool) -> tuple[str, int] | tuple[str, int, int]:
    *lead, k = shape
    n = math.prod(lead)
    if not exact:
        return "float32, packed", 4 * n * k
    # FBGEMM fills up blocks of 512 inputs and 16 outputs (its PackMatrix and PackedGemmMatrixB)
    return "FP16, packed", 2 * -(-n // 16) * 16 * (-(-k // 512) * 512), 4 * n * k


def largest_product(plan: Plan) -> int:
    """Values of the largest matrix made while loading: a module's, or those of neighbours that share an input, which
    become one product. At most so many: neighbours of one input width are counted together."""
    joined: dict[tuple[str, int], int] = {}
    for module in plan.modules:
        if _multiplies(module) and module.part != "unused":
            key = module.name.rpartition(".")[0], module.shape[-1]
            joined[key] = joined.get(key, 0) + math.prod(module.shape[-2:])  # one expert of a stack at a time
    return max(joined.values(), default=0)
