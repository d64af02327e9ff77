"""The settings of a conversion, and what they ask of each module by name.

Knows names and the plan; nothing of what is stored, of shapes or of layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtplab.checkpoint import Checkpoint, ModulePlan, Plan
from mtplab.checkpoint.convert.layouts import Recipe
from mtplab.checkpoint.exclusions import PUBLISHED, UserPatterns, parse_exclude
from mtplab.checkpoint.names import draft_prefixes, part_of
from mtplab.errors import ConfigError

__all__ = ["DRAFTS", "Asked", "Wish"]

DRAFTS = ("like-target", "keep", "quantize", "bf16")


@dataclass(frozen=True)
class Wish:
    """The settings. `recipe` None: FP8 stays in the layout it has, or, with `all_bf16`, none is left."""

    recipe: Recipe | None
    all_bf16: bool = False
    exclude: str | Sequence[str] | None = None
    draft_exclude: str | Sequence[str] | None = None
    draft: str = "like-target"

    @property
    def keeps_layout(self) -> bool:
        """Whether what is FP8 stays as it is stored."""
        return self.recipe is None and not self.all_bf16


class Asked:
    """What a wish asks of the modules of one checkpoint.

    Raises ConfigError for settings that do not fit it, CheckpointError for headers that are wrong.
    """

    def __init__(self, source: Checkpoint, wish: Wish) -> None:
        if wish.draft not in DRAFTS:
            raise ConfigError(f"draft={wish.draft!r}: expected one of {', '.join(DRAFTS)}.")
        self.wish = wish
        self.plain = source.quantization is None
        self.plan: Plan = source.plan(
            exclude=wish.exclude, draft_exclude=wish.draft_exclude, model_format="fp8" if self.plain else None
        )
        self._drafts = draft_prefixes(source.config)
        if wish.draft != "like-target" and not any(map(self._is_draft, self.plan.by_name)):
            raise ConfigError(
                f"draft={wish.draft!r}, but {source.path} has no draft head: expected 'like-target'. Leave it out."
            )
        target = parse_exclude(wish.exclude)
        draft = target if wish.draft_exclude is None else parse_exclude(wish.draft_exclude, "draft_exclude")
        # by whether a module is of the draft head
        self._lists = {False: target, True: draft}
        self._own = {key: UserPatterns(items, ()) for key, items in self._lists.items()}
        self._preset = UserPatterns(None, PUBLISHED)

    def module(self, name: str) -> ModulePlan | None:
        """The module's plan, or None where what has the name is no module of its own."""
        return self.plan.by_name.get(name)

    def _is_draft(self, module: str) -> bool:
        return part_of(module, self._drafts) == "draft"

    def how(self, module: str) -> str:
        """What `draft` says of the module; "like-target" for what is not of the draft head."""
        return self.wish.draft if self._is_draft(module) else "like-target"

    def excludes(self, module: str) -> bool:
        """Whether a name or glob of the user's own covers the module."""
        return self._own[self._is_draft(module)].own_pattern(module) is not None

    def quantises(self, module: ModulePlan) -> bool:
        """Whether the module's plain weight is to become FP8."""
        how = self.how(module.name)
        if self.wish.all_bf16 or how in ("keep", "bf16"):
            return False
        if self.plain:
            return module.weight == "fp8"
        if module.kind != "linear" or module.part == "unused":
            return False
        if self._lists[self._is_draft(module.name)] == ("none",):
            return True
        published = self._preset.published_pattern(module.name) is not None
        return how == "quantize" and not published and not self.excludes(module.name)
