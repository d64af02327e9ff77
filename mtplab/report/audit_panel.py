"""The audit panel: a checkpoint under another exclusion list, and how its bytes, findings and engines' readings move.

Thin over `Checkpoint.plan`, `Checkpoint.with_exclusions` and the audit; reads headers only and knows no rule.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

import ipywidgets as widgets

from mtplab.checkpoint.audit import Audit, rewritten
from mtplab.checkpoint.audit.html import engines_html, findings_html
from mtplab.checkpoint.audit.sizes import part_shown
from mtplab.checkpoint.lenses import recommended_exclusions, views_of
from mtplab.report.maps import checkpoint_map, map_key
from mtplab.report.module_globs import module_globs
from mtplab.report.opened import opened_checkpoint
from mtplab.report.panels import Panel, Progress
from mtplab.report.table import html_table
from mtplab.report.text import human_bytes, plain

__all__ = ["AuditPanel"]

AS_IS, NOTHING, OWN = "as in the file", "an empty list", "picked below"
RECOMMENDED = "the one under which engines agree"
EDIT, WRITE = "only the list is edited", "the checkpoint is written again"


class AuditPanel(Panel):
    """What engines make of a checkpoint under another exclusion list; shown at once, and anew after every choice.

    With "only the list is edited" the tensors stay as they are: what a wrong list does can be seen. With "written
    again" the modules change with it, as `mtplab quantize` would write them: what it costs in bytes can be seen.

    Args:
        checkpoint: a path, or a checkpoint that `mtplab.open_checkpoint` gave.
    """

    title = "Audit"
    run_label = "Show"
    label_width = "130px"
    input_width = "min(480px, 98%)"

    def __init__(self, checkpoint: Any):
        self.checkpoint = opened_checkpoint(checkpoint, lenient=True)
        self._globs = module_globs(self.checkpoint.look())
        self.findings = widgets.HTML()
        super().__init__()
        self.follow()

    def _suppositions(self) -> tuple[str, ...]:
        """Nothing is written of a quantisation that is not read, and a plain checkpoint has no list to edit."""
        ckpt = self.checkpoint
        if ckpt.refused is not None:
            return (EDIT,)
        sound = not any(problem.severity == "error" for problem in ckpt.problems)
        return (WRITE,) if ckpt.quantization is None and sound else (EDIT, WRITE)

    def inputs(self) -> dict[str, widgets.Widget]:
        """The widgets that choose: what is supposed, under which list, of which modules."""
        return {
            "what": widgets.ToggleButtons(
                options=self._suppositions(),
                description="Suppose",
                style=self.look()["style"] | {"button_width": "max-content"},  # words are not cut
            ),
            "exclude": widgets.Dropdown(
                options=(AS_IS, NOTHING, RECOMMENDED, OWN),
                description="Exclusion list",
                **self.look(),
            ),
            "modules": widgets.SelectMultiple(
                options=[(plain(glob), glob) for glob in self._globs],
                description="Modules",
                rows=8,
                **self.look(),
            ),
        }

    def layout(self) -> widgets.Widget:
        """Choices above, then sizes, engines and findings, then the map."""
        shown = [self.actions(), self.table, self.findings, self.figure]
        return widgets.VBox([self.head(), *self._widgets.values(), *shown])

    def work(self, config: Mapping[str, Any], progress: Progress, cancel: threading.Event) -> Audit:
        """The audit under the choice. Raises MtplabError where the checkpoint allows no such choice."""
        choice, ckpt = config["exclude"], self.checkpoint
        if config["what"] == WRITE:
            if choice == NOTHING or (choice == OWN and not config["modules"]):
                return rewritten(ckpt, "none", "fp8-block")  # what was BF16 becomes FP8, so its kind is to be said
            return rewritten(ckpt, list(config["modules"]) if choice == OWN else None)
        if choice == AS_IS:
            return ckpt.audit()
        entries: list[str] = []
        if choice == RECOMMENDED:
            entries = recommended_exclusions(views_of(ckpt.look().modules), ckpt.quantization.method)
        elif choice == OWN:
            entries = self._names(config["modules"])
        return ckpt.with_exclusions(entries).audit()

    def draw(self, result: Audit) -> None:
        """Show an audit."""
        fp8: Counter[str] = Counter()
        for module in result.modules:
            if module.weight == "fp8" or module.stored.startswith("F8_"):
                fp8[part_shown(module)] += module.nbytes
        rows = [
            (part, human_bytes(sum(row.values())), human_bytes(fp8[part]))
            for part, row in result.bytes_by_part.items()
        ]
        total = sum(sum(row.values()) for row in result.bytes_by_part.values())
        caption = f"{human_bytes(total)} in all"
        self.table.value = html_table(("part", "bytes", "of which FP8"), rows, caption=caption)
        self.findings.value = engines_html(result) + findings_html(result.findings)
        self.show_if_new(self.figure, map_key(result.plan), lambda: checkpoint_map(result.plan))

    def _names(self, globs: tuple[str, ...]) -> list[str]:
        import fnmatch

        names = [module.name for module in self.checkpoint.look().modules]
        return [name for name in names if any(fnmatch.fnmatchcase(name, glob) for glob in globs)]
