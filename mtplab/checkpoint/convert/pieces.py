"""What becomes of each tensor of a source: which bytes or values of it go where, or why nothing does.

Knows shapes and schemes; nothing of settings (`decide.py`) and of how bytes are moved (`engine.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from mtplab.checkpoint import Checkpoint, TensorInfo
from mtplab.checkpoint.convert.layouts import Recipe, layouts
from mtplab.checkpoint.header import FP8_DTYPES
from mtplab.checkpoint.pairing import Pair
from mtplab.checkpoint.strict_json import shown
from mtplab.checkpoint.write import data_bytes
from mtplab.errors import ConfigError

__all__ = [
    "CARRY",
    "COPY",
    "DECODE",
    "ENCODE",
    "Output",
    "Piece",
    "Pieces",
    "can_carry",
    "carried",
    "copied",
    "decoded",
    "encoded",
    "is_fp8",
    "keeps_scale",
]

# as stored; codes as stored with their scale laid out anew; values to BF16; values to codes
COPY, CARRY, DECODE, ENCODE = "copied", "carried over", "to BF16", "to FP8"


class Output(NamedTuple):
    """A tensor to be written: its name, dtype as safetensors spells it, and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return data_bytes(self.dtype, self.shape)


class Piece(NamedTuple):
    """One source tensor and what is written of it. `pair` where it is codes, `scale` where codes are written."""

    source: TensorInfo
    action: str
    out: Output
    pair: Pair | None = None
    scale: Output | None = None
    block: tuple[int, int] | None = None  # (bm, bn) of the codes written

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What is written: one tensor, or codes and their scale."""
        return (self.out,) if self.scale is None else (self.out, self.scale)


@dataclass
class Pieces:
    """Every tensor of a source: in `pieces`, or in `left` with the reason why nothing is written of it.

    `merged` are scales whose values went into what was written of their weights.
    """

    pieces: list[Piece] = field(default_factory=list)
    merged: set[str] = field(default_factory=set)
    left: dict[str, str] = field(default_factory=dict)

    def account(self, source: Checkpoint) -> None:
        """That nothing is missing and nothing is written twice. An assertion: settings cannot make this fail."""
        seen = {piece.source.name for piece in self.pieces} | self.merged | self.left.keys()
        missing = source.tensors.keys() - seen
        assert not missing, sorted(missing)[:4]
        names: set[str] = set()
        for output in (output for piece in self.pieces for output in piece.outputs):
            if output.name not in names:
                names.add(output.name)
                continue
            raise ConfigError(
                f"{source.path}: {shown(output.name)} would be written twice: the source has a tensor of that name "
                "beside the one the layout writes. Choose another layout."
            )


def can_carry(pair: Pair, recipe: Recipe, power_of_two: bool) -> bool:
    """Whether codes and scales as they are stored are what the recipe asks for, whatever their names and shapes."""
    shape = pair.codes.shape
    if len(shape) != 2 or pair.dtype != "F8_E4M3" or pair.scheme.granularity != recipe.granularity:
        return False
    if recipe.granularity == "block" and pair.block != recipe.block:
        return False
    return recipe.scales == "float" or power_of_two or pair.scale.dtype in ("F8_E8M0", "U8")


def copied(info: TensorInfo) -> Piece:
    """As it is stored."""
    return Piece(info, COPY, Output(info.name, info.dtype, info.shape))


def carried(pair: Pair, stem: str, recipe: Recipe) -> Piece:
    """The stored codes under the recipe's names, their scale as F32 in the recipe's shape."""
    n, k = pair.codes.shape
    out = Output(f"{stem}.weight", pair.dtype, (n, k))
    return Piece(pair.codes, CARRY, out, pair, _scale(stem, (n, k), recipe), recipe.block_of((n, k)))


def decoded(pair: Pair, name: str) -> Piece:
    """BF16 values of stored codes."""
    return Piece(pair.codes, DECODE, Output(name, "BF16", pair.codes.shape), pair)


def encoded(info: TensorInfo, pair: Pair | None, stem: str, recipe: Recipe) -> Piece:
    """Codes of a stored tensor [n, k], or of the values of stored codes."""
    n, k = info.shape
    out = Output(f"{stem}.weight", "F8_E4M3", (n, k))
    return Piece(info, ENCODE, out, pair, _scale(stem, (n, k), recipe), recipe.block_of((n, k)))


def _scale(stem: str, shape: tuple[int, int], recipe: Recipe) -> Output:
    layout = layouts()[recipe.layout]
    return Output(
        stem + layout.scale_suffix, "F32", layout.scale_shape(recipe.granularity, shape, recipe.block_of(shape))
    )


def keeps_scale(piece: Piece) -> bool:
    """Whether the piece is codes that stay with the scale they have."""
    return piece.pair is not None and piece.action == COPY


def is_fp8(outputs: Iterable[Output]) -> bool:
    """Whether FP8 codes are among what is written."""
    return any(output.dtype in FP8_DTYPES for output in outputs)
