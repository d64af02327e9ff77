"""What a family of models is to mtplab, and which one a config.json belongs to.

Knows nothing of sizes: those are each family's file's to read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from mtplab.checkpoint.draft_layouts import Layout
from mtplab.config import HiddenStage
from mtplab.errors import CheckpointError
from mtplab.models.fields import Fields
from mtplab.models.spec import LayerSpec

__all__ = ["Family", "Sizes", "as_markdown", "family_of", "registered"]


@dataclass(frozen=True)
class Sizes:
    """What only the family can read: the target's layers, the head's, and how norms are stored."""

    layers: tuple[LayerSpec, ...]
    draft_layers: tuple[LayerSpec, ...]
    one_plus_norms: bool = False


@dataclass(frozen=True)
class Family:
    """One family. `read` raises CheckpointError for a config that asks for what the layers do not compute."""

    name: str
    model_types: tuple[str, ...]  # as config.json or its text_config names it
    layout: Layout  # how the head is named
    read: Callable[[Fields], Sizes]
    target: str  # what its target is made of, for people
    head: str  # likewise
    oracle: str  # what its tests compare with
    hidden_first: bool = False  # the hidden state's half of fc's input comes before the embedding's
    chained: bool = True  # of a head with a module per depth: each reads what the one before gave
    first_masked: bool = False  # the head reads zeros in place of the embedding at position 0
    # what engines give the head of the target, and feed back of its own: from before the final norm or after it
    target_hidden: HiddenStage = "post_norm"
    draft_hidden: HiddenStage = "post_norm"


@cache
def registered() -> tuple[Family, ...]:
    """Every family, in the order of their names."""
    package = import_module("mtplab.models.families")
    modules = (import_module(f"{package.__name__}.{found.name}") for found in iter_modules(package.__path__))
    return tuple(sorted((m.FAMILY for m in modules if hasattr(m, "FAMILY")), key=lambda family: family.name))


def family_of(config: dict[str, Any], file: object = "config.json") -> tuple[Family, str]:
    """(family, model_type) of a parsed config.json. Raises CheckpointError for one that is not run."""
    text = Fields(config, file).text
    model_type = text.get("model_type", config.get("model_type"))
    for family in registered():
        if isinstance(model_type, str) and model_type in family.model_types:
            return family, model_type
    known = "; ".join(f"{family.name} ({', '.join(family.model_types)})" for family in registered())
    raise CheckpointError(
        f"{file}: model_type is {model_type!r:.60}; mtplab runs {known}. The checkpoint can be opened, planned and "
        "audited all the same: mtplab.open_checkpoint(), `mtplab audit`. CONTRIBUTING.md says how a family is added."
    )


def as_markdown() -> str:
    """A table of every family: README's, which a test holds to this."""
    lines = ["| family | `model_type` | target | MTP head | tested against |", "|---|---|---|---|---|"]
    for family in registered():
        types = ", ".join(f"`{name}`" for name in family.model_types)
        lines.append(f"| {family.name} | {types} | {family.target} | {family.head} | {family.oracle} |")
    return "\n".join(lines)
