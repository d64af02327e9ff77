"""Globs that a list of modules to choose from offers: a kind of module in every layer, and single ones.

Reads a plan's names; chooses nothing. `module_choice.py` has the tree that takes the place of such a list.
"""

from __future__ import annotations

from typing import Any

from mtplab.checkpoint.names import experts_together, in_layer

__all__ = ["module_globs"]

MAX_SINGLE = 600  # a list of ten thousand experts helps nobody, and a browser takes long over it


def module_globs(plan: Any) -> list[str]:
    """Globs worth offering for a plan: one per kind of module that multiplies, then (if few) every such module.

    Names are as they stand on disk; `*.mlp.down_proj` stands for that module in every layer, the draft's too.
    """
    linear = [module.name for module in plan.modules if module.multiplies]
    kinds: dict[str, int] = {}
    for name in linear:
        found = in_layer(name)
        if found:
            kind = f"*.{experts_together(found.rest)}"
            kinds[kind] = kinds.get(kind, 0) + 1
    singles = linear if len(linear) <= MAX_SINGLE else []
    return [glob for glob, count in kinds.items() if count > 1] + singles
