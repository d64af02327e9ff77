"""Which linear modules are quantised or kept together: the units of a search for exclusions.

By default what engines build as one (q, k and v; gate and up), since a list that keeps only a part of it is refused or
misread by some. Knows plans, names and bytes; nothing of models or measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from mtplab.checkpoint.names import experts_together, in_layer, nearest, normalised
from mtplab.errors import CheckpointError, ConfigError

__all__ = ["GROUPINGS", "ModuleGroup", "module_groups", "never_fp8"]

GROUPINGS = ("fused", "module", "kind", "layer", "part")

# what vLLM, SGLang and TensorRT-LLM build as one module of Qwen3.5 and its like, and of DeepSeek-V3
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("in_proj_qkv", "in_proj_z"),
          ("in_proj_b", "in_proj_a"), ("q_a_proj", "kv_a_proj_with_mqa"))  # fmt: skip
# what engines build in BF16 whatever a list says, by the end of its name: vocabulary heads, routers and gates
_NEVER = ("lm_head", "shared_head.head", "shared_head.output", "mlp.gate", "moe.gate", "shared_expert_gate")
_FAMILY = {name: family for family in _FUSED for name in family}


@dataclass(frozen=True)
class ModuleGroup:
    """Linear modules of one part ("target" or "draft") by their names on disk; `nbytes` is what FP8 saves on them."""

    name: str
    part: str
    modules: tuple[str, ...]
    nbytes: int

    def __str__(self) -> str:
        return self.name


def module_groups(
    checkpoint: Any, grouping: str | Sequence[str] = "fused", keep: Sequence[str] = ()
) -> list[ModuleGroup]:
    """Every linear module that can be FP8, grouped, in the plan's order.

    Args:
        checkpoint: an open BF16 checkpoint.
        grouping: "fused" (what engines build as one, a layer's experts together), "module" (each by itself), "kind"
            (one projection over all layers), "layer", "part" (the target's, the draft's), or a list of names and
            globs: a group each, and a module that none covers is FP8 in every set.
        keep: modules, by their names on disk, that stay BF16 in every set and are in no group.

    A vocabulary head and routers, which engines build in BF16 whatever a list says, are in no group but one that
    names them, and BF16 in every set. Raises CheckpointError for a checkpoint that is quantised,
    ConfigError for an unknown grouping, a glob that covers nothing and two that cover the same module.
    """
    if checkpoint.quantization is not None:
        raise CheckpointError(
            f"{checkpoint.path}: expected a BF16 checkpoint, found quant_method {checkpoint.quantization.method!r}: "
            "what FP8 lost cannot be brought back by keeping a module out of it. Give the checkpoint that this one "
            "was made from."
        )
    stored = checkpoint.plan().by_name
    plan = checkpoint.plan(exclude="none", model_format="fp8")
    kept = set(keep)
    saved = {m.name: stored[m.name].loaded_nbytes - m.loaded_nbytes for m in plan.modules if m.weight == "fp8"}
    for name in kept:
        if saved.pop(name, None) is None:
            raise ConfigError(f"keep: {name!r:.80} is no linear module of the checkpoint; expected names as on disk")
    parts = {m.name: "draft" if m.part == "draft" else "target" for m in plan.modules}
    if not saved:
        raise CheckpointError(f"{checkpoint.path}: expected linear weights that FP8 could hold, found none.")
    found: dict[tuple[str, str], list[str]] = {}
    for module, name in _named(list(saved), grouping):
        found.setdefault((parts[module], name), []).append(module)
    # a head behind the target's layers is named as those are
    targets = {name for part, name in found if part == "target"}
    return [
        ModuleGroup(
            _name(_of_layers(name, modules) if part == "draft" and name in targets else name, modules),
            part,
            tuple(modules),
            sum(map(saved.get, modules)),
        )
        for (part, name), modules in found.items()
    ]


def _name(name: str, modules: Sequence[str]) -> str:
    return name if len(modules) > 1 else modules[0]


def never_fp8(module: str) -> bool:
    """Whether engines build a module in BF16 whatever a list says."""
    return module.endswith(tuple(f".{end}" for end in _NEVER)) or module in _NEVER


def _named(modules: list[str], grouping: str | Sequence[str]) -> list[tuple[str, str]]:
    """(module, its group's name)."""
    if isinstance(grouping, str) and grouping in GROUPINGS:
        name_of = {"fused": _fused, "module": str, "kind": _kind, "layer": _layer, "part": lambda module: "*"}[grouping]
        return [(module, name_of(module)) for module in modules if not never_fp8(module)]
    globs = [grouping] if isinstance(grouping, str) else list(grouping) if isinstance(grouping, Sequence) else []
    if not globs or not all(isinstance(glob, str) and glob for glob in globs):
        raise ConfigError(f"groups is {grouping!r:.60}; expected one of {', '.join(GROUPINGS)}, or names and globs")
    found = []
    for glob in dict.fromkeys(globs):
        hits = [module for module in modules if fnmatchcase(normalised(module), normalised(glob))]
        if not hits:
            near = nearest(glob, modules)
            words = f"Nearest: {', '.join(near)}." if near else f"Or one of {', '.join(GROUPINGS)}."
            raise ConfigError(f"groups: {glob!r} covers no linear module of the checkpoint. {words}")
        found += [(module, glob) for module in hits]
    taken: dict[str, str] = {}
    for module, glob in found:
        if taken.setdefault(module, glob) != glob:
            raise ConfigError(f"groups: {taken[module]!r} and {glob!r} both cover {module}; expected each module once")
    return found


def _fused(module: str) -> str:
    before, experts, _ = experts_together(module).partition("experts.*")
    if experts:
        return before + experts
    at, _, last = module.rpartition(".")
    return f"{at}.{'+'.join(_FAMILY[last])}" if last in _FAMILY else module


def _kind(module: str) -> str:
    found = in_layer(module)
    return experts_together(f"{found.root}*.{found.rest}") if found else module


def _of_layers(name: str, modules: Sequence[str]) -> str:
    """The name of a kind with the numbers of its layers in place of the star; of what is no kind, as it is."""
    numbers = dict.fromkeys(found.number for found in map(in_layer, modules) if found)
    return name.replace("layers.*.", f"layers.{'+'.join(numbers)}.", 1)


def _layer(module: str) -> str:
    found = in_layer(module)
    return f"{found.root}{found.number}.*" if found else module
