"""The tree of modules to keep out of FP8: boxes for modules and groups, a search, presets, and what each costs.

A fixed number of lines is made once and written anew: a mixture of 90 000 tensors shows in as many widgets as a small
model, a page at a time. What is chosen, counted and put into globs is `module_choice.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets
import traitlets

from mtplab.errors import MtplabError
from mtplab.report.module_choice import Group, ModuleChoice
from mtplab.report.text import escape, human_bytes, plain

__all__ = ["ModuleTree"]

LINES = 24  # on a page
PRESETS = ("published", "none", "recommended")

_WIDE = {"width": "auto"}
_INDENT = 18  # pixels a level


class ModuleTree(widgets.VBox):
    """Choose modules to keep out of FP8.

    `value` is what is chosen, as names and globs that `exclude=` takes, the fewest that cover it exactly; setting it to
    names, globs or a preset chooses those. Observe it as any widget's. An empty value keeps nothing out.

    Of groups the box is ticked when all below is chosen, and the text says "3 of 12" where some is: ipywidgets has no
    third state. Ticking one that is ticked in part chooses all of it; under a search, all of it that is found.

    Args:
        plan: a checkpoint's plan as stored (`mtplab.open_checkpoint(path).plan()`).
        recommended: names and globs that the preset "recommended" chooses, or a function that gives them when asked
            (a search's `found.exclude`, say); None leaves the preset out.
        why: what the recommendation is, for the button's tooltip.
        value: what is chosen to start with. title: what stands before the presets.
    """

    value = traitlets.Tuple(help="Names and globs that cover what is chosen.")

    def __init__(
        self,
        plan: Any,
        recommended: Sequence[str] | Callable[[], Sequence[str]] | None = None,
        why: str = "",
        value: str | Sequence[str] = (),
        title: str = "Keep out of FP8",
        **options: Any,
    ) -> None:
        self.choice = ModuleChoice(plan)
        self._recommended, self._why = recommended, why
        self._bits, self._open, self._page, self._found = 0, {("target",), ("draft",)}, 0, self.choice.all
        self._setting = False
        self.search = widgets.Text(
            placeholder="part of a name, or a glob: *.o_proj",
            description="Find modules",
            style={"description_width": "initial"},
            layout=widgets.Layout(**_WIDE),
        )
        self.presets = {name: self._preset_button(name) for name in PRESETS}
        self.lines = [_Line(self) for _ in range(LINES)]
        self.previous = widgets.Button(description="Previous page", layout=widgets.Layout(**_WIDE))
        self.next = widgets.Button(description="Next page", layout=widgets.Layout(**_WIDE))
        self.where, self.summary = widgets.HTML(), widgets.HTML()
        super().__init__(**options)
        self.search.observe(lambda change: self._searched(), names="value")
        self.previous.on_click(lambda _: self._turn(-1))
        self.next.on_click(lambda _: self._turn(1))
        row = widgets.Layout(display="flex", flex_flow="row wrap", align_items="center", grid_gap="0 8px")
        self.children = [
            widgets.Box([widgets.HTML(f"{escape(title)}:"), *self.presets.values()], layout=row),
            self.search,
            # a long page scrolls in its own place, and Run below it stays in sight
            widgets.VBox(
                [line.box for line in self.lines], layout=widgets.Layout(max_height="22em", overflow="hidden auto")
            ),
            widgets.Box([self.previous, self.next, self.where], layout=row),
            self.summary,
        ]
        self.observe(lambda change: self._show(), names="value")
        self.set(value or "none")

    # what is chosen

    def set(self, exclude: str | Sequence[str]) -> None:
        """Choose what names, globs or a preset cover. Raises ConfigError for one that covers nothing."""
        self._choose(self.choice.chosen(exclude))

    @property
    def extra_bytes(self) -> int:
        """What the chosen modules cost in BF16 over FP8."""
        return self.choice.nbytes(self._bits)

    def _choose(self, bits: int) -> None:
        self._bits = bits
        self._setting = True  # a value of our own making needs no reading back
        try:
            self.value = tuple(self.choice.patterns(bits))
        finally:
            self._setting = False
        self._show()

    @traitlets.validate("value")
    def _compact(self, proposal: dict[str, Any]) -> tuple[str, ...]:
        """What is set from outside, as the fewest globs; what covers nothing leaves the value as it was."""
        if self._setting:
            return proposal["value"]
        self._bits = self.choice.chosen(list(proposal["value"]) or "none")
        return tuple(self.choice.patterns(self._bits))

    def tick(self, group: Group, chosen: bool) -> None:
        """What a click on a group's box does: all of it that is found by the search, in or out."""
        bits = group.bits & self._found
        self._choose(self._bits | bits if chosen else self._bits & ~bits)

    def toggle(self, group: Group) -> None:
        """Open or close a group."""
        self._open ^= {group.path}
        self._show()

    def preset(self, name: str) -> None:
        """Choose what a preset covers: "published", "none" or "recommended"."""
        if name != "recommended":
            self.set(name)
        elif self._recommended is not None:
            found = self._recommended() if callable(self._recommended) else self._recommended
            self.set(list(found) or "none")

    # what is shown

    def _preset_button(self, name: str) -> widgets.Button:
        quantised = self.choice.quantised
        tips = {
            "published": "nothing beside what the file holds in BF16" if quantised else "what FP8 releases keep",
            "none": "everything in FP8 that can be",
            "recommended": plain(self._why) or "what the caller recommends",
        }
        button = widgets.Button(
            description=name, tooltip=f"{name}: {tips[name]}", disabled=name == "recommended" and not self._recommended
        )
        button.layout.width = "auto"

        def clicked(_: Any) -> None:
            try:
                self.preset(name)
            except MtplabError as problem:
                self.summary.value = f'<span role="alert">{escape(problem)}</span>'

        button.on_click(clicked)
        return button

    def _searched(self) -> None:
        self._found, self._page = self.choice.matching(self.search.value), 0
        self._show()

    def _turn(self, pages: int) -> None:
        self._page += pages
        self._show()

    def _listed(self) -> list[Group]:
        """The groups to show, in order: of what is found, those whose parents are open; under a search, all open."""
        found: list[Group] = []
        searching = bool(self.search.value.strip())

        def walk(group: Group) -> None:
            for child in group.children.values():
                if child.bits & self._found:
                    found.append(child)
                    if searching or child.path in self._open:
                        walk(child)

        walk(self.choice.root)
        return found

    def _show(self) -> None:
        listed = self._listed()
        pages = max(1, -(-len(listed) // LINES))
        self._page = min(max(0, self._page), pages - 1)
        shown = listed[self._page * LINES :][:LINES]
        searching = bool(self.search.value.strip())
        for at, line in enumerate(self.lines):
            line.show(shown[at] if at < len(shown) else None, searching)
        self.previous.disabled, self.next.disabled = self._page == 0, self._page == pages - 1
        turning = "" if pages > 1 else "none"
        self.previous.layout.display = self.next.layout.display = turning
        words = f"{self.choice.count(self._found)} modules found. " if searching else ""
        self.where.value = escape(words + (f"Page {self._page + 1} of {pages}." if pages > 1 else ""))
        self.summary.value = self._sentence()

    def _sentence(self) -> str:
        choice, bits = self.choice, self._bits
        extra, every = choice.nbytes(bits), choice.nbytes(choice.all)
        smallest = choice.total if choice.quantised else choice.total - every
        share = 100 * extra / smallest if smallest else 0.0
        text = (
            f"{choice.count(bits)} of {choice.count(choice.all)} linear modules kept out of FP8: "
            f"{human_bytes(extra)} over FP8, {share:.1f} % of the {human_bytes(smallest)} that the model takes in FP8."
        )
        if choice.quantised and bits:
            text = (
                f"{choice.count(bits)} of {choice.count(choice.all)} linear modules: stored in FP8, they only stop "
                f"rounding their inputs. In a checkpoint made from the original they would take {human_bytes(extra)} "
                f"more, {share:.1f} % of {human_bytes(smallest)}."
            )
        value = ", ".join(self.value) or "nothing"
        value = value if len(value) <= 400 else value[:399] + "…"
        return f'<div aria-live="polite" style="line-height:1.4">{escape(text)}<br>{escape(value)}</div>'


class _Line:
    """One line of the page: a button that opens the group, the box with its name, and what is chosen and costs."""

    def __init__(self, tree: ModuleTree) -> None:
        self._tree, self._group, self._busy = tree, None, False
        self.opener = widgets.Button(layout=widgets.Layout(width="30px", padding="0"))
        self.tick = widgets.Checkbox(indent=False, layout=widgets.Layout(width="auto", flex="0 1 auto"))
        self.text = widgets.HTML(layout=widgets.Layout(margin="0 0 0 8px"))
        self.box = widgets.HBox(
            [self.opener, self.tick, self.text], layout=widgets.Layout(align_items="center", min_height="30px")
        )
        self.opener.on_click(lambda _: self._group is not None and self._tree.toggle(self._group))
        self.tick.observe(self._ticked, names="value")

    def _ticked(self, change: dict[str, Any]) -> None:
        if not self._busy and self._group is not None:
            self._tree.tick(self._group, change["new"])

    def show(self, group: Group | None, searching: bool) -> None:
        """Become the line of this group, or an empty one."""
        self._group = group
        self.box.layout.display = "none" if group is None else "flex"
        if group is None:
            return
        tree, choice = self._tree, self._tree.choice
        bits = group.bits & tree._found
        chosen, all_of_it = tree._bits & bits, choice.count(bits)
        name = plain(choice.units[group.unit].name if group.unit is not None else " / ".join(group.path))
        self._busy = True
        try:
            self.tick.value = chosen == bits
            self.tick.description = plain(group.label)
            self.tick.tooltip = f"keep {name} out of FP8"
        finally:
            self._busy = False
        leaf = not group.children
        opened = searching or group.path in tree._open
        self.opener.description = "–" if opened else "+"
        self.opener.tooltip = f"{'close' if opened else 'open'} {name}"
        self.opener.disabled = searching
        self.opener.layout.visibility = "hidden" if leaf else "visible"
        self.box.layout.padding = f"0 0 0 {_INDENT * (len(group.path) - 1)}px"
        cost = human_bytes(choice.nbytes(bits))
        if leaf:
            self.text.value = escape(f"{cost}")
        else:
            count = choice.count(chosen)
            state = "all" if chosen == bits else "none" if not chosen else f"{count}"
            self.text.value = escape(f"{state} of {all_of_it}, {human_bytes(choice.nbytes(chosen))} of {cost}")
