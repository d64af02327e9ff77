"""Names to list as kept out of FP8, and what readers make of what is written that may not be what was wanted.

Knows the plan and what was decided; nothing of why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mtplab.checkpoint import ModulePlan
from mtplab.checkpoint.convert.layouts import Recipe
from mtplab.checkpoint.convert.pieces import Piece
from mtplab.checkpoint.lenses import View, recommended_exclusions
from mtplab.checkpoint.strict_json import shown

__all__ = ["added_names", "kept_names", "ragged_warnings", "stack_warnings"]

# readers that do not take a block at the edge for what it is, by layout
_RAGGED_READERS = {
    "hf": "transformers takes a block to be shape over grid, and reads them wrong or not at all",
    "modelopt": "vLLM refuses them",
}


def _views(modules: Iterable[ModulePlan], quantised: set[str]) -> list[View]:
    """The modules as they will lie in what is written."""
    return [View(m.name, m.kind, m.part, m.name in quantised, m.name in quantised) for m in modules]


def _stacks(modules: Iterable[ModulePlan], quantised: set[str]) -> list[ModulePlan]:
    """Stacked experts that are not FP8."""
    return [m for m in modules if len(m.shape) == 3 and _stacks_experts(m) and m.name not in quantised]


def _stacks_experts(module: ModulePlan) -> bool:
    return module.kind == "experts" or "experts." in module.name


def kept_names(modules: Sequence[ModulePlan], quantised: set[str], method: str) -> list[str]:
    """Names to list as kept out of FP8, where `quantised` are those that are FP8."""
    kept = recommended_exclusions(_views(modules, quantised), method)
    stacked = {module.name for module in _stacks(modules, quantised)}
    for module in modules:
        if module.kind in ("conv", "embedding") and module.name not in quantised:
            kept.append(module.name)  # as releases do: some loaders build them as linears
        elif module.name in stacked:
            kept.append(module.name)
            if "experts." in module.name:
                # readers ask with the name of the module that holds the stack
                kept.append(module.name.rpartition(".")[0])
    return list(dict.fromkeys(kept))


def added_names(modules: Sequence[ModulePlan], were: set[str], method: str) -> list[str]:
    """Names to add to the list of a checkpoint whose layout stays: of `were`, which were FP8 and are not any more."""
    views = [view._replace(kind="linear") for view in _views(modules, set()) if view.name in were]
    return [name for name in recommended_exclusions(views, method) if name != "lm_head" or name in were]


def stack_warnings(modules: Sequence[ModulePlan], quantised: set[str]) -> list[str]:
    """That stacked experts stay unquantised, where some do."""
    stacked = sum(module.nbytes for module in _stacks(modules, quantised))
    return [
        f"stacked experts stay as they are stored ({stacked / 1e9:.2f} GB): FP8 layouts hold experts one by one, and "
        "how this model's are stacked is not known"
    ] * bool(stacked)


def ragged_warnings(pieces: Iterable[Piece], recipe: Recipe) -> list[str]:
    """That weights end within a block, where a reader of the layout does not take them as they are."""
    if recipe.granularity != "block" or recipe.layout not in _RAGGED_READERS:
        return []
    ragged = [
        piece.out.name
        for piece in pieces
        if piece.scale is not None
        # one block for a whole side is no last one
        and any(size > block and size % block for size, block in zip(piece.out.shape, recipe.block, strict=True))
    ]
    bm, bn = recipe.block
    return [
        f"{len(ragged)} weights are no multiple of {bm}x{bn} ({shown(name)} first): {_RAGGED_READERS[recipe.layout]}. "
        "Exclude them, or take another --block or --format"
        for name in ragged[:1]
    ]
