"""What engines would make of a BF16 checkpoint written in block FP8 under an exclusion list; nothing is written.

Knows what the writer would list and what each engine builds; nothing of values or of which list is a good one.
"""

from __future__ import annotations

from collections.abc import Sequence

from mtplab.checkpoint.checkpoint import Checkpoint
from mtplab.checkpoint.config_json import with_quantization
from mtplab.checkpoint.convert.decide import Wish, decide
from mtplab.checkpoint.convert.layouts import layouts, recipe_of
from mtplab.checkpoint.lenses.base import View
from mtplab.checkpoint.lenses.looks import Looks, look

__all__ = ["foreseen", "never_fp8_anywhere"]


def foreseen(source: Checkpoint, exclude: str | Sequence[str] | None) -> Looks:
    """Every engine's look at what `quantize_checkpoint(source, …, exclude=exclude)` writes by default.

    Raises ConfigError for a pattern that covers no module, CheckpointError as the writer does.
    """
    wish = Wish(recipe_of("fp8-block", "hf"), False, exclude, None, "like-target")
    config = with_quantization(source.config, layouts()["hf"].config(wish.recipe, decide(source, wish).kept))
    views = [
        View(m.name, m.kind, m.part, m.weight == "fp8", m.weight == "fp8")
        for m in source.plan(exclude=exclude, model_format="fp8").modules
        if m.part != "unused"
    ]
    return look(views, "fp8", config["quantization_config"], config)


def never_fp8_anywhere(source: Checkpoint) -> list[str]:
    """Modules that one engine or another builds in BF16 though no list says so: in FP8 they would not load there, or
    load wrong."""
    found = {name for each in foreseen(source, "none").looks for item in each.disagreements for name in item.modules}
    return sorted(found)
