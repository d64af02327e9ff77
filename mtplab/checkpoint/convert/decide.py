"""From settings and headers to what becomes of every tensor: kept, quantised, dequantised, carried over, or left out.

A plain source follows its plan (`Checkpoint.plan(model_format="fp8")`), so that a file holds what such a load would
have computed; only stacked experts, which a load leaves as they are, become FP8 one by one. An FP8 source keeps what is
FP8 and what is not, but for what the settings name. Reads no values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtplab.checkpoint import Checkpoint, ModulePlan, Plan, TensorInfo
from mtplab.checkpoint.convert.experts import single_experts
from mtplab.checkpoint.convert.layouts import Recipe, layouts
from mtplab.checkpoint.convert.pieces import (
    Piece,
    Pieces,
    can_carry,
    carried,
    copied,
    decoded,
    encoded,
    is_fp8,
    keeps_scale,
)
from mtplab.checkpoint.exclusions import PUBLISHED, UserPatterns, parse_exclude
from mtplab.checkpoint.header import PLAIN_FLOATS
from mtplab.checkpoint.lenses import View, recommended_exclusions
from mtplab.checkpoint.names import draft_prefixes, module_of, part_of
from mtplab.checkpoint.pairing import Pair
from mtplab.checkpoint.strict_json import shown
from mtplab.errors import ConfigError

__all__ = ["DRAFTS", "Decision", "Wish", "decide"]

DRAFTS = ("like-target", "keep", "quantize", "bf16")


@dataclass
class Decision:
    """What is to be written. `kept`: names to list as not FP8, under which engines agree."""

    pieces: Pieces
    kept: list[str]
    to_bf16: list[str]  # names to add to a list that stays: of those that were FP8 in the source
    warnings: list[str]


@dataclass(frozen=True)
class Wish:
    """The settings. `recipe` None: FP8 stays in the layout it has, or, with `all_bf16`, none is left."""

    recipe: Recipe | None
    all_bf16: bool = False
    exclude: str | Sequence[str] | None = None
    draft_exclude: str | Sequence[str] | None = None
    draft: str = "like-target"


def decide(source: Checkpoint, wish: Wish) -> Decision:
    """Every tensor of `source` under the settings.

    Raises ConfigError for settings that do not fit the checkpoint, CheckpointError for one whose headers are wrong.
    """
    if wish.draft not in DRAFTS:
        raise ConfigError(f"draft={wish.draft!r}: expected one of {', '.join(DRAFTS)}.")
    plain = source.quantization is None
    plan = source.plan(exclude=wish.exclude, draft_exclude=wish.draft_exclude, model_format="fp8" if plain else None)
    return _Decider(source, wish, plan).run()


class _Decider:
    def __init__(self, source: Checkpoint, wish: Wish, plan: Plan) -> None:
        self.source, self.wish, self.plan = source, wish, plan
        self.plain = source.quantization is None
        self.drafts = draft_prefixes(source.config)
        target = parse_exclude(wish.exclude)
        draft = target if wish.draft_exclude is None else parse_exclude(wish.draft_exclude, "draft_exclude")
        # by whether a module is of the draft head
        self.lists = {False: target, True: draft}
        self.user = {key: UserPatterns(items, ()) for key, items in self.lists.items()}
        self.preset = UserPatterns(None, PUBLISHED)
        self.found = Pieces()
        self.warnings: list[str] = []
        said = source.found.content if source.found is not None else {}
        self.power_of_two = said.get("scale_fmt") == "ue8m0"

    def run(self) -> Decision:
        if self.wish.draft != "like-target" and not any(map(self.is_draft, self.plan.by_name)):
            raise ConfigError(
                f"draft={self.wish.draft!r}, but {self.source.path} has no draft head: expected 'like-target'. "
                "Leave it out."
            )
        self.by_module = {module.name: module for module in self.plan.modules}
        for name, info in self.source.tensors.items():
            role = self.source.role(name)
            if role == "parameter":
                for piece in self.apart(info) or [self.parameter(info)]:
                    self.add(piece)
        self.in_use = {p.pair.scale.name for p in self.found.pieces if p.pair is not None and keeps_scale(p)}
        self.of_codes = {self.module_name(p.source): p for p in self.found.pieces if p.pair is not None}
        for name, info in self.source.tensors.items():
            role = self.source.role(name)
            if role != "parameter" and (name in self.in_use or name not in self.found.merged):
                self.beside(info, role)
        for name, info in self.source.files.unindexed.items():
            self.found.left[name] = f"it lies in {info.file.name}, but not in the index, which decides"
        self.found.account(self.source)
        self.found.merged -= self.in_use
        recipe, quantization = self.wish.recipe, self.source.quantization
        method = layouts()[recipe.layout].method if recipe else quantization.method if quantization else "fp8"
        if recipe is not None:
            self.warn_of_ragged(recipe)
        return Decision(self.found, self.names(method), self.newly_kept(method), self.warnings)

    def module_name(self, info: TensorInfo) -> str:
        return module_of(self.source.values_name(info.name))

    def is_draft(self, module: str) -> bool:
        return part_of(module, self.drafts) == "draft"

    def add(self, piece: Piece) -> None:
        if piece.pair is not None and not keeps_scale(piece):
            self.found.merged.add(piece.pair.scale.name)
        self.found.pieces.append(piece)

    # parameters

    def parameter(self, info: TensorInfo) -> Piece:
        name = self.module_name(info)
        module = self.by_module.get(name)
        pair = self.source.pair(info.name)
        if pair is not None:
            return self.stored_fp8(name, pair)
        if module is not None and self.is_weight(info, module) and self.to_be_quantised(name, module):
            return encoded(info, None, name, self.recipe_for(name))
        return copied(info)

    def apart(self, info: TensorInfo) -> list[Piece]:
        """A plain stack of experts as the FP8 weights of single ones, where it is to be quantised and can be."""
        recipe, draft = self.wish.recipe, self.is_draft(info.name)
        how = self.wish.draft if draft else "like-target"
        module = self.by_module.get(info.name)
        if not self.plain or recipe is None or info.dtype not in PLAIN_FLOATS:
            return []
        if module is None or module.part == "unused":
            return []
        if how in ("keep", "bf16") or self.user[draft].own_pattern(info.name) is not None:
            return []
        return [encoded(one, None, name, recipe) for name, one in single_experts(info, self.source.config)]

    @staticmethod
    def is_weight(info: TensorInfo, module: ModulePlan) -> bool:
        return info.name == f"{module.name}.weight" and info.dtype in PLAIN_FLOATS and len(info.shape) == 2

    def to_be_quantised(self, name: str, module: ModulePlan) -> bool:
        if self.wish.all_bf16:
            return False
        draft = self.is_draft(name)
        how = self.wish.draft if draft else "like-target"
        if how in ("keep", "bf16"):
            return False
        if self.plain:
            return module.weight == "fp8"
        if module.kind != "linear" or module.part == "unused":
            return False
        if self.lists[draft] == ("none",):
            return True
        listed = self.user[draft].own_pattern(name) or self.preset.published_pattern(name)
        return how == "quantize" and not listed

    def recipe_for(self, name: str) -> Recipe:
        if self.wish.recipe is None:
            raise ConfigError(
                f"{shown(name)} is to be quantised, but FP8 is to stay in the layout it has: expected a format to "
                "quantise to. Give --format and --layout, or keep the module as it is stored."
            )
        return self.wish.recipe

    def stored_fp8(self, name: str, pair: Pair) -> Piece:
        draft = self.is_draft(name)
        values = self.source.values_name(pair.codes.name)
        how = self.wish.draft if draft else "like-target"
        if how == "keep":
            return self.kept_fp8(name, pair)
        if self.wish.all_bf16 or how == "bf16" or self.user[draft].own_pattern(name) is not None:
            return decoded(pair, values)
        recipe = self.wish.recipe
        if recipe is None:
            return self.as_stored(name, pair)
        module = self.by_module.get(name)
        if len(pair.codes.shape) == 2 and (module is None or module.kind != "linear"):
            return decoded(pair, values)  # an embedding, say: the layouts written here are of linear weights
        if can_carry(pair, recipe, self.power_of_two):
            return carried(pair, name, recipe)
        if len(pair.codes.shape) != 2:
            raise ConfigError(
                f"{shown(pair.codes.name)} holds stacked FP8 experts {list(pair.codes.shape)}, which no layout written "
                "here has: expected experts one by one. Leave --format out to keep them, or write --format bf16."
            )
        return encoded(pair.codes, pair, name, recipe)

    def kept_fp8(self, name: str, pair: Pair) -> Piece:
        """A module of a draft head that is to stay as it is."""
        recipe = self.wish.recipe
        if recipe is None and not self.wish.all_bf16:
            return self.as_stored(name, pair)
        if recipe is not None and can_carry(pair, recipe, self.power_of_two):
            return carried(pair, name, recipe)
        wanted = "BF16, which has no scales" if recipe is None else f"a scale per {recipe.granularity}"
        raise ConfigError(
            f"draft='keep': {shown(name)} is stored as FP8 with {pair.scheme}, and the checkpoint is to be {wanted}: "
            "expected one scheme for both. Take 'like-target' or 'bf16'."
        )

    def as_stored(self, name: str, pair: Pair) -> Piece:
        piece = copied(pair.codes)._replace(pair=pair)
        if pair.dtype != pair.codes.dtype:  # bytes that an old writer called integers
            piece = piece._replace(out=piece.out._replace(dtype=pair.dtype))
        return piece

    # what lies beside parameters

    def beside(self, info: TensorInfo, role: str) -> None:
        """Scales that were not taken up by their weights."""
        name = info.name
        keeps = self.wish.recipe is None and not self.wish.all_bf16
        if role == "scale":
            if name in self.in_use:
                self.found.pieces.append(copied(info))
            else:
                self.found.left[name] = "a scale beside a weight that is not FP8, which nothing may multiply by"
        elif role == "KV scale":
            if keeps:
                self.found.pieces.append(copied(info))
            else:
                self.found.left[name] = "a scale of the KV cache, for which the config written has no scheme"
        else:
            owner = self.of_codes.get(self.source.module_scaled_at_input(name) or "")
            if keeps and (owner is None or is_fp8(owner.outputs)):
                self.found.pieces.append(copied(info))
            else:
                self.found.left[name] = "a static activation scale; the config written rounds activations as they come"

    # names

    def views(self, quantised: set[str]) -> list[View]:
        """The modules as they will lie in what is written."""
        return [
            View(module.name, module.kind, module.part, module.name in quantised, module.name in quantised)
            for module in self.plan.modules
        ]

    def names(self, method: str) -> list[str]:
        """Names to list as kept out of FP8."""
        quantised = {self.module_name(piece.source) for piece in self.found.pieces if is_fp8(piece.outputs)}
        kept = recommended_exclusions(self.views(quantised), method)
        stacked = 0
        for module in self.plan.modules:
            if module.name in quantised:
                continue
            if module.kind in ("conv", "embedding"):
                kept.append(module.name)  # as releases do: some loaders build them as linears
            elif len(module.shape) == 3 and "experts." in module.name:
                stacked += module.nbytes
                # readers ask with the name of the module that holds the stack
                kept += [module.name, module.name.rpartition(".")[0]]
        if stacked and self.wish.recipe is not None:
            self.warnings.append(
                f"stacked experts stay as they are stored ({stacked / 1e9:.2f} GB): FP8 layouts hold experts one by "
                "one, and how this model's are stacked is not known"
            )
        return list(dict.fromkeys(kept))

    def warn_of_ragged(self, recipe: Recipe) -> None:
        """Readers that do not take a block at the edge for what it is."""
        readers = {
            "hf": "transformers takes a block to be shape over grid, and reads them wrong or not at all",
            "modelopt": "vLLM refuses them",
        }
        if recipe.granularity != "block" or recipe.layout not in readers:
            return
        ragged = [
            piece.out.name
            for piece in self.found.pieces
            if piece.scale is not None
            # one block for a whole side is no last one
            and any(size > block and size % block for size, block in zip(piece.out.shape, recipe.block, strict=True))
        ]
        if ragged:
            bm, bn = recipe.block
            self.warnings.append(
                f"{len(ragged)} weights are no multiple of {bm}x{bn} ({shown(ragged[0])} first): "
                f"{readers[recipe.layout]}. Exclude them, or take another --block or --format"
            )

    def newly_kept(self, method: str) -> list[str]:
        """Names to add to the list of a checkpoint whose layout stays: what was FP8 and is not any more."""
        were = {self.module_name(p.source) for p in self.found.pieces if p.pair is not None and p.out.dtype == "BF16"}
        views = [view._replace(kind="linear") for view in self.views(set()) if view.name in were]
        listed = recommended_exclusions(views, method)
        return [name for name in listed if name != "lm_head" or name in were]
