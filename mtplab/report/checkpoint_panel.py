"""The checkpoint panel: what each module becomes under an exclusion set, as a map and a table.

Reads a plan and its modules; opens nothing but headers and knows no rule.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import ipywidgets as widgets

from mtplab.report.maps import checkpoint_map, map_key
from mtplab.report.module_globs import module_globs
from mtplab.report.opened import opened_checkpoint
from mtplab.report.panels import Panel, Progress
from mtplab.report.plan_tables import plan_table
from mtplab.report.text import human_bytes, plain

__all__ = ["CheckpointPanel"]

AS_PUBLISHED, OWN = "as published", "the modules picked below"
AS_STORED, ONLINE = "as stored", "FP8, quantised as it is loaded"


class CheckpointPanel(Panel):
    """Which module is FP8, which is not, and the rule that decided; shown at once, and anew after every choice.

    Args:
        checkpoint: a path, or a checkpoint that `mtplab.open_checkpoint` gave.
        model_format: "fp8" to start with a BF16 checkpoint quantised as it is loaded.
    """

    title = "Checkpoint"
    run_label = "Show"
    label_width = "130px"
    input_width = "min(480px, 98%)"

    def __init__(self, checkpoint: Any, model_format: str | None = None):
        self.checkpoint = opened_checkpoint(checkpoint)
        self._format = AS_STORED if model_format is None else ONLINE
        self._globs = module_globs(self.checkpoint.plan())
        super().__init__()
        self.follow()

    def inputs(self) -> dict[str, widgets.Widget]:
        return {
            "format": widgets.Dropdown(
                options=(AS_STORED, ONLINE),
                value=self._format,
                description="Weights",
                **self.look(),
            ),
            "exclude": widgets.Dropdown(
                options=[(each, each) for each in (AS_PUBLISHED, "none")] + [("MTP head", "mtp.*"), (OWN, OWN)],
                description="Kept out of FP8",
                **self.look(),
            ),
            "modules": widgets.SelectMultiple(
                options=[(plain(glob), glob) for glob in self._globs],
                description="Modules",
                rows=6,
                **self.look(),
            ),
            "search": widgets.Text(
                placeholder="part of a name",
                description="List only",
                continuous_update=False,
                **self.look(),
            ),
        }

    def work(self, config: Mapping[str, Any], progress: Progress, cancel: threading.Event) -> Any:
        choice = config["exclude"]
        exclude = {AS_PUBLISHED: None, "none": "none", OWN: list(config["modules"])}.get(choice)
        if choice == "mtp.*":
            exclude = list(self.checkpoint.draft_globs) or [choice]
        return self.checkpoint.plan(exclude=exclude, model_format="fp8" if config["format"] == ONLINE else None)

    def draw(self, result: Any) -> None:
        self.show_if_new(self.figure, map_key(result), lambda: checkpoint_map(result))
        part = self._widgets["search"].value.strip().lower()
        found = [module for module in result.modules if part in module.name.lower()]
        stored = human_bytes(sum(module.nbytes for module in found))
        planned = human_bytes(sum(module.loaded_nbytes for module in found))
        caption = f"{len(found)} of {len(result.modules)} modules, {stored} as stored, {planned} as planned"
        self.table.value = plan_table(found, caption)
