"""From settings and headers to what becomes of every tensor: kept, quantised, dequantised, carried over, or left out.

A plain source follows its plan (`Checkpoint.plan(model_format="fp8")`), so that a file holds what such a load would
have computed; only stacked experts, which a load leaves as they are, become FP8 one by one. An FP8 source keeps what is
FP8 and what is not, but for what the settings name. Reads no values.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtplab.checkpoint import Checkpoint, TensorInfo
from mtplab.checkpoint.convert.layouts import layouts
from mtplab.checkpoint.convert.listing import added_names, kept_names, ragged_warnings, stack_warnings
from mtplab.checkpoint.convert.parameters import pieces_of
from mtplab.checkpoint.convert.pieces import Piece, Pieces, copied, is_fp8, keeps_scale
from mtplab.checkpoint.convert.wish import DRAFTS, Asked, Wish
from mtplab.checkpoint.names import module_of

__all__ = ["DRAFTS", "Decision", "Wish", "decide"]


@dataclass
class Decision:
    """What is to be written. `kept`: names to list as not FP8, under which engines agree."""

    pieces: Pieces
    kept: list[str]
    to_bf16: list[str]  # names to add to a list that stays: of those that were FP8 in the source
    warnings: list[str]


def decide(source: Checkpoint, wish: Wish) -> Decision:
    """Every tensor of `source` under the settings.

    Raises ConfigError for settings that do not fit the checkpoint, CheckpointError for one whose headers are wrong.
    """
    asked = Asked(source, wish)
    found = _sorted_out(source, asked)
    quantised = {_module(source, piece) for piece in found.pieces if is_fp8(piece.outputs)}
    were = {_module(source, piece) for piece in found.pieces if piece.pair is not None and piece.out.dtype == "BF16"}
    recipe, quantization, modules = wish.recipe, source.quantization, asked.plan.modules
    method = layouts()[recipe.layout].method if recipe else quantization.method if quantization else "fp8"
    warnings: list[str] = []
    if recipe is not None:
        warnings = ragged_warnings(found.pieces, recipe) + stack_warnings(modules, quantised)
    return Decision(found, kept_names(modules, quantised, method), added_names(modules, were, method), warnings)


def _module(source: Checkpoint, piece: Piece) -> str:
    return module_of(source.values_name(piece.source.name))


def _sorted_out(source: Checkpoint, asked: Asked) -> Pieces:
    """Every tensor: parameters first, then the scales that their fate leaves over."""
    found = Pieces()
    roles = {name: source.role(name) for name in source.tensors}
    for name, info in source.tensors.items():
        if roles[name] == "parameter":
            found.pieces += pieces_of(info, source, asked)
    in_use = {piece.pair.scale.name for piece in found.pieces if piece.pair is not None and keeps_scale(piece)}
    # a scale may be of several weights, and in use for some of them
    found.merged = {p.pair.scale.name for p in found.pieces if p.pair is not None and not keeps_scale(p)} - in_use
    of_codes = {_module(source, p): p for p in found.pieces if p.pair is not None}
    for name, info in source.tensors.items():
        if roles[name] == "parameter" or name in found.merged:
            continue
        why = _why_left(source, asked, info, roles[name], in_use, of_codes)
        if why:
            found.left[name] = why
        else:
            found.pieces.append(copied(info))
    for name, info in source.files.unindexed.items():
        found.left[name] = f"it lies in {info.file.name}, but not in the index, which decides"
    found.account(source)
    return found


def _why_left(
    source: Checkpoint, asked: Asked, info: TensorInfo, role: str, in_use: set[str], of_codes: dict[str, Piece]
) -> str:
    """Why a scale that its weight did not take up is not written, or "" where it is copied."""
    keeps = asked.wish.keeps_layout
    if role == "scale":
        unused = "a scale beside a weight that is not FP8, which nothing may multiply by"
        return "" if info.name in in_use else unused
    if role == "KV scale":
        return "" if keeps else "a scale of the KV cache, for which the config written has no scheme"
    owner = of_codes.get(source.module_scaled_at_input(info.name) or "")
    if keeps and (owner is None or is_fp8(owner.outputs)):
        return ""
    return "a static activation scale; the config written rounds activations as they come"
