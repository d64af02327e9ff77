"""What to do where an engine reads a checkpoint otherwise than it is stored: tried on the lenses before it is said.

A change of the list, then modules kept out of FP8, then another layout; where none helps, that is what is said.
Reads headers only; knows no engine, and of layouts what their configs say.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mtplab.checkpoint.audit.finding import listed
from mtplab.checkpoint.audit.subject import Subject
from mtplab.checkpoint.lenses import Look, View, lenses, recommended_exclusions
from mtplab.checkpoint.lenses.fused import GROUPS
from mtplab.checkpoint.lenses.judge import judge
from mtplab.checkpoint.lenses.names import Shaped, shaped
from mtplab.errors import ConfigError

if TYPE_CHECKING:
    from mtplab.checkpoint.convert.layouts import Recipe

__all__ = ["Remedies", "anew", "quantize_command", "without_fp8"]

_LAYOUTS = ("hf", "compressed-tensors", "modelopt")
_FEW = 8  # names that a command may hold


def quantize_command(subject: Subject, *options: str) -> str:
    """The command that writes this checkpoint anew, in backquotes."""
    parts = ["mtplab", "quantize", str(subject.ckpt.path), "NEW", *options]
    return f"`{' '.join(map(shlex.quote, parts))}`"


def without_fp8(subject: Subject, modules: Sequence[str], *options: str) -> str:
    """The command that makes these FP8 modules BF16 and lists them."""
    names = list(modules)
    if len(names) > _FEW:  # all layers' alike: what is FP8 in one is in most
        names = sorted({f"*.{name.rpartition('.')[2]}" for name in names})
    return quantize_command(subject, "--exclude", ",".join(names), *options)


def anew(subject: Subject, layout: str | None = None) -> str:
    """The command that writes scales, config and list anew, in the layout of the checkpoint's method or this one."""
    recipes = _recipes(subject, layout)
    return quantize_command(subject, *_options(recipes[0])) if recipes else ""


def _options(recipe: Recipe) -> list[str]:
    made = ["--format", f"fp8-{recipe.granularity}", "--layout", recipe.layout]
    if recipe.granularity == "block" and recipe.block != (128, 128):
        made += ["--block", "x".join(map(str, recipe.block))]
    return made


def _recipes(subject: Subject, layout: str | None = None) -> list[Recipe]:
    """What the checkpoint can be written as: its own scheme first, whose codes stay as they are, then blocks."""
    from mtplab.checkpoint.convert.layouts import layouts, recipe_of

    own = [layout] if layout else [name for name in _LAYOUTS if layouts()[name].method == subject.method]
    scheme = _scheme(subject)
    found: list[Recipe] = []
    for name in dict.fromkeys([*own, *(() if layout else _LAYOUTS)]):
        for format, block in dict.fromkeys([scheme, ("fp8-block", (128, 128)), ("fp8-channel", None)]):
            try:
                recipe = recipe_of(format, name, block=block)
            except ConfigError:  # the layout has no place for it
                continue
            if recipe not in found:
                found.append(recipe)
    return found


def _scheme(subject: Subject) -> tuple[str, tuple[int, int] | None]:
    """(format, block) that most FP8 weights have, as `mtplab quantize` spells them."""
    kinds: Counter[tuple[str, tuple[int, int] | None]] = Counter()
    quantization = subject.quantization
    for module in subject.linears if quantization is not None else ():
        scheme = quantization.scheme_of(module.name) if module.weight == "fp8" and quantization is not None else None
        if scheme is None or module.block is None or len(module.block) != 2:
            continue
        if scheme.granularity in ("channel", "tensor"):
            kinds[f"fp8-{scheme.granularity}", None] += 1
        else:  # groups within a row are no blocks that an engine reads
            kinds["fp8-block", module.block if module.block[0] > 1 else (128, 128)] += 1
    return kinds.most_common(1)[0][0] if kinds else ("fp8-block", (128, 128))


class Remedies:
    """What helps against one engine's reading of one checkpoint."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._engines = {engine.name: engine for engine in lenses()}

    @cached_property
    def _views(self) -> list[View]:
        return self._subject.views

    @cached_property
    def _shaped(self) -> list[Shaped]:
        return shaped(self._views)

    @cached_property
    def _recipes(self) -> list[Recipe]:
        return _recipes(self._subject)

    @cached_property
    def _places(self) -> dict[str, int]:
        """Linear module → where its shape stands in `_shaped`."""
        return {view.name: place for place, group in enumerate(self._shaped) for view, _ in group.members}

    @cached_property
    def _recommended(self) -> list[str]:
        return recommended_exclusions(self._views, self._subject.method)

    @cached_property
    def _writable(self) -> bool:
        """Whether `mtplab quantize` can write it anew: FP8 experts that are stacked, and what is wrong, it refuses."""
        if not self._subject.as_on_disk:
            return False
        usable = all(m.weight != "unusable" and (m.weight != "fp8" or len(m.shape) == 2) for m in self._subject.modules)
        return usable and not any(problem.severity == "error" for problem in self._subject.ckpt.problems)

    def against(self, look: Look, modules: Sequence[str]) -> str:
        """A sentence or two on what makes the engine build `modules` as they are stored."""
        ways = (self._longer_list, self._other_list, self._less_fp8, self._other_layout, self._no_fp8)
        for way in ways:
            said = next(way(look, tuple(modules)), None)
            if said is not None:
                return said
        return f"No list and no layout written here changes it: use another engine than {look.engine} {look.version}."

    def layout_for(self, look: Look) -> str:
        """The same for an engine that refuses the config, or reads no file of its method."""
        modules = tuple(view.name for view in self._views)
        return next(self._other_layout(look, modules), "Use an engine that reads the format.")

    def _longer_list(self, look: Look, modules: tuple[str, ...]) -> Iterator[str]:
        listed_now = self._subject.listed_entries
        plain = {view.name for view in self._views if not view.stored_fp8}
        wanted = set(modules) & plain
        if not wanted or listed_now is None:
            return
        views = [view for view in self._views if view.name in wanted]
        more = [name for name in recommended_exclusions(views, self._subject.method) if name not in listed_now]
        if set(more) <= {"lm_head"} - wanted:
            return
        if self._cured(look, modules, self._shaped, self._with_list([*listed_now, *more])):
            yield f"Add them by full name to {self._subject.list_key}: {listed(more)}."

    def _other_list(self, look: Look, modules: tuple[str, ...]) -> Iterator[str]:
        if self._subject.listed_entries is None:
            return
        if self._cured(look, modules, self._shaped, self._with_list(self._recommended)):
            recipe = self._recipe_that_cures(look, modules, own=True)
            command = quantize_command(self._subject, *_options(recipe)) if recipe is not None else ""
            yield (
                f"In {self._subject.list_key}, name the {len(self._recommended)} linear modules that are not FP8 in "
                "full, and nothing else" + (f" ({command} writes that list)." if command else ".")
            )

    def _less_fp8(self, look: Look, modules: tuple[str, ...]) -> Iterator[str]:
        """BF16 instead of FP8 where modules that are built as one are stored apart."""
        gone = self._fused_with(modules)
        command = self._without(look, modules, gone)
        if command:
            yield (
                "No list alone helps, since what is built as one is stored in part as FP8: "
                f"{command} makes all of it BF16 and lists it."
            )

    def _without(self, look: Look, modules: tuple[str, ...], gone: set[str]) -> str:
        """The command that writes `gone` as BF16, where the engine then builds `modules` as they are stored."""
        if not gone or not self._writable or self._subject.listed_entries is None:
            return ""
        bare = {"stored_fp8": False, "has_scale": False, "scale": ""}
        views = [view._replace(**bare) if view.name in gone else view for view in self._views]
        shapes = shaped(views)
        more = recommended_exclusions([view for view in views if view.name in gone], self._subject.method)
        kept = [*(self._subject.listed_entries or ()), *(name for name in more if name != "lm_head" or name in gone)]
        if self._cured(look, modules, shapes, self._with_list(kept)):
            return without_fp8(self._subject, sorted(gone))
        recipe = self._recipe_that_cures(look, modules, views=views)  # the list is wrong as well
        return "" if recipe is None else without_fp8(self._subject, sorted(gone), *_options(recipe))

    def _no_fp8(self, look: Look, modules: tuple[str, ...]) -> Iterator[str]:
        """BF16 for all of them, where the engine builds them unquantised whatever the list says."""
        gone = {view.name for view in self._views if view.stored_fp8} & set(modules)
        command = self._without(look, modules, gone)
        if command:
            yield f"No list alone helps: {command} makes them BF16."

    def _fused_with(self, modules: tuple[str, ...]) -> set[str]:
        """The FP8 modules that are fused with plain ones, where either is among `modules`."""
        stored = {view.name: view.stored_fp8 for view in self._views}
        found: set[str] = set()
        for name in modules:
            parent, dot, last = name.rpartition(".")
            for group in GROUPS:
                members = [m for one in group if (m := parent + dot + one) in stored] if last in group else []
                if len({stored[member] for member in members}) == 2:
                    found |= {member for member in members if stored[member]}
        return found

    def _other_layout(self, look: Look, modules: tuple[str, ...]) -> Iterator[str]:
        recipe = self._recipe_that_cures(look, modules)
        if recipe is not None:
            same = (f"fp8-{recipe.granularity}", recipe.block if recipe.granularity == "block" else None)
            rounded = "" if same == _scheme(self._subject) else "; its values are rounded a second time"
            yield (
                f"Write it in a layout that {look.engine} reads: {quantize_command(self._subject, *_options(recipe))}"
                f"{rounded}."
            )

    def _recipe_that_cures(
        self, look: Look, modules: tuple[str, ...], own: bool = False, views: list[View] | None = None
    ) -> Recipe | None:
        """What the checkpoint, with `views` for what is FP8 in it, can be written as so that the engine reads it."""
        from mtplab.checkpoint.convert.layouts import layouts

        views, shapes = (self._views, self._shaped) if views is None else (views, shaped(views))
        for recipe in self._recipes if self._writable else ():
            layout = layouts()[recipe.layout]
            if own and layout.method != self._subject.method:
                continue
            content = layout.config(recipe, recommended_exclusions(views, layout.method))
            if self._cured(look, modules, shapes, content, layout.scale_suffix.removeprefix(".")):
                return recipe
        return None

    def _with_list(self, entries: Sequence[str]) -> dict[str, Any]:
        found = self._subject.ckpt.with_exclusions(entries).found
        assert found is not None
        return found.content

    def _cured(
        self, look: Look, modules: tuple[str, ...], shapes: list[Shaped], content: dict[str, Any], scale: str = ""
    ) -> bool:
        """Whether the engine, asked anew, builds all of `modules` as stored. `scale`: its name in what is written."""
        engine, method = self._engines[look.engine], str(content.get("quant_method", self._subject.method))
        # names are the same whatever is said of them, and so are their shapes' places
        asked = [shapes[place] for place in sorted({self._places[name] for name in modules if name in self._places})]
        if scale and method in engine.methods and engine.methods[method].scale is not None:
            asked = [_written(group, scale) for group in asked]
        made = judge(engine, asked, method, content, self._subject.config)
        still = {name for found in made.disagreements for name in found.modules}
        return made.status == "judged" and still.isdisjoint(modules)


def _written(group: Shaped, scale: str) -> Shaped:
    """Modules as they are written anew: every scale under the layout's name, and none beside what is plain."""
    members = [(view._replace(scale=scale if view.stored_fp8 else ""), numbers) for view, numbers in group.members]
    return group._replace(members=members)
