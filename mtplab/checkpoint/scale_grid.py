"""Which values of a weight share a scale, by the scheme and both shapes.

The block is given in the weight's own axes as they lie on disk; a tensor-wide or channel scale is a block like any
other. The block size is the config's, never shape over grid: that is wrong for ragged last blocks. Knows nothing of
names or values.
"""

from __future__ import annotations

from mtplab.checkpoint.formats import Scheme

__all__ = ["expected_shapes", "scale_block"]

Shape = tuple[int, ...]


def scale_block(weight: Shape, scale: Shape, scheme: Scheme) -> Shape | None:
    """Sizes, by axis of the weight, of what shares a scale; None where the scale's shape is none the scheme has."""
    return next((block for shape, block in _layouts(weight, scheme) if shape == scale), None)


def expected_shapes(weight: Shape, scheme: Scheme) -> list[Shape]:
    """The shapes a scale of this weight may have, the usual one first."""
    return list(dict.fromkeys(shape for shape, _ in _layouts(weight, scheme)))


def _layouts(weight: Shape, scheme: Scheme) -> list[tuple[Shape, Shape]]:
    """(shape of the scale, block) of every layout some writer has for a weight [n, k] or stacked experts [e, a, b]."""
    if len(weight) == 2:
        return _matrix(weight, scheme)
    experts, a, b = weight
    if scheme.granularity == "tensor":
        whole = [(shape, weight) for shape in ((), (1,), (1, 1), (1, 1, 1))]
        return [*whole, ((experts,), (1, a, b)), ((experts, 1, 1), (1, a, b))]
    if scheme.granularity == "channel":
        last = ((experts, 1, b), (1, a, 1))
        if scheme.transposed:
            # Llama 4 by FBGEMM: the last axis is the output, also where the scale stands upright
            return [last, ((experts, b, 1), (1, a, 1))]
        return [((experts, a, 1), (1, 1, b)), ((experts, a), (1, 1, b)), *([last] if a != 1 else [])]
    bm, bn = scheme.block
    return [((experts, -(-a // bm), -(-b // bn)), (1, bm, bn))]


def _matrix(weight: Shape, scheme: Scheme) -> list[tuple[Shape, Shape]]:
    n, k = weight
    if scheme.granularity == "tensor":
        return [(shape, (n, k)) for shape in ((), (1,), (1, 1))]
    if scheme.granularity == "channel":
        return [((n, 1), (1, k)), ((n,), (1, k))]
    bm, bn = scheme.block
    rows, columns = -(-n // bm), -(-k // bn)
    found = [((rows, columns), (bm, bn))]
    if scheme.granularity == "block":
        found.append(((rows, 1, columns, 1), (bm, bn)))  # ModelOpt
    return found
