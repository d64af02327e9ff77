"""What becomes of one parameter: copied, quantised, dequantised, or carried over into another layout.

Knows schemes and shapes, and asks `wish.py` what is wanted of a module. Reads no values.
"""

from __future__ import annotations

from mtplab.checkpoint import Checkpoint, TensorInfo
from mtplab.checkpoint.convert.layouts import Recipe
from mtplab.checkpoint.convert.pieces import Piece, can_carry, carried, copied, decoded, encoded
from mtplab.checkpoint.convert.wish import Asked
from mtplab.checkpoint.experts import single_experts
from mtplab.checkpoint.header import PLAIN_FLOATS
from mtplab.checkpoint.names import module_of
from mtplab.checkpoint.pairing import Pair
from mtplab.checkpoint.strict_json import shown
from mtplab.errors import ConfigError

__all__ = ["pieces_of"]


def pieces_of(info: TensorInfo, source: Checkpoint, asked: Asked) -> list[Piece]:
    """The pieces of one parameter of `source`: one, or one for each expert of a stack that is taken apart.

    Raises ConfigError where the settings ask for what cannot be written, CheckpointError for a weight whose scale is
    missing or does not fit.
    """
    pair = source.pair(info.name)
    if pair is not None:
        return [_of_fp8(pair, source, asked)]
    apart = _apart(info, source, asked)
    if apart:
        return apart
    name = module_of(source.values_name(info.name))
    module = asked.module(name)
    # a weight without values has none to take a scale of
    is_weight = info.name == f"{name}.weight" and info.dtype in PLAIN_FLOATS and len(info.shape) == 2 and info.nbytes
    if module is not None and is_weight and asked.quantises(module):
        return [encoded(info, None, name, _recipe_for(name, asked))]
    return [copied(info)]


def _apart(info: TensorInfo, source: Checkpoint, asked: Asked) -> list[Piece]:
    """A plain stack of experts as the FP8 weights of single ones, where it is to be quantised and can be."""
    name = module_of(source.values_name(info.name))
    recipe, module = asked.wish.recipe, asked.module(name)
    if not asked.plain or recipe is None or info.dtype not in PLAIN_FLOATS:
        return []
    if module is None or module.part == "unused":
        return []
    if asked.how(name) in ("keep", "bf16") or asked.excludes(name):
        return []
    return [encoded(one, None, expert, recipe) for expert, one in single_experts(info, source.config)]


def _recipe_for(name: str, asked: Asked) -> Recipe:
    if asked.wish.recipe is None:
        raise ConfigError(
            f"{shown(name)} is to be quantised, but FP8 is to stay in the layout it has: expected a format to "
            "quantise to. Give --format and --layout, or keep the module as it is stored."
        )
    return asked.wish.recipe


def _of_fp8(pair: Pair, source: Checkpoint, asked: Asked) -> Piece:
    values = source.values_name(pair.codes.name)
    name, recipe = module_of(values), asked.wish.recipe
    power_of_two = source.found is not None and source.found.content.get("scale_fmt") == "ue8m0"
    how = asked.how(name)
    if how == "keep":
        return _kept(name, pair, asked, power_of_two)
    if asked.wish.all_bf16 or how == "bf16" or asked.excludes(name):
        return decoded(pair, values)
    if recipe is None:
        return _as_stored(pair)
    module = asked.module(name)
    if len(pair.codes.shape) == 2 and (module is None or module.kind != "linear"):
        return decoded(pair, values)  # an embedding, say: the layouts written here are of linear weights
    if can_carry(pair, recipe, power_of_two):
        return carried(pair, name, recipe)
    if len(pair.codes.shape) != 2:
        raise ConfigError(
            f"{shown(pair.codes.name)} holds stacked FP8 experts {list(pair.codes.shape)}, which no layout written "
            "here has: expected experts one by one. Leave --format out to keep them, or write --format bf16."
        )
    return encoded(pair.codes, pair, name, recipe)


def _kept(name: str, pair: Pair, asked: Asked, power_of_two: bool) -> Piece:
    """A module of a draft head that is to stay as it is."""
    recipe = asked.wish.recipe
    if asked.wish.keeps_layout:
        return _as_stored(pair)
    if recipe is not None and can_carry(pair, recipe, power_of_two):
        return carried(pair, name, recipe)
    wanted = "BF16, which has no scales" if recipe is None else f"a scale per {recipe.granularity}"
    raise ConfigError(
        f"draft='keep': {shown(name)} is stored as FP8 with {pair.scheme}, and the checkpoint is to be {wanted}: "
        "expected one scheme for both. Take 'like-target' or 'bf16'."
    )


def _as_stored(pair: Pair) -> Piece:
    piece = copied(pair.codes)._replace(pair=pair)
    if pair.dtype != pair.codes.dtype:  # bytes that an old writer called integers
        piece = piece._replace(out=piece.out._replace(dtype=pair.dtype))
    return piece
