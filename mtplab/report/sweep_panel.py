"""The sweep panel: pick depths, exclusions, cache policies and prompts, run, and see lines grow.

Turns widgets into the arguments of `mtplab.sweep` and draws its rows; how a row is measured is not known
here, and tests give a sweep of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ipywidgets as widgets

from mtplab.errors import CheckpointError, ConfigError
from mtplab.models.cache_fit import fitting
from mtplab.models.config import parse_config
from mtplab.report.figures import acceptance_by_depth
from mtplab.report.module_tree import ModuleTree
from mtplab.report.opened import opened_checkpoint
from mtplab.report.panels import Panel, Progress
from mtplab.report.rows_table import acceptance_table
from mtplab.report.text import plain

__all__ = ["SweepPanel"]

POLICIES = ("none", "int8", "int4", "fp8_e4m3", "fp8_e5m2", "turboquant")
PRESETS = ("published", "none", "mtp.*")
_WORDS = {"mtp.*": "MTP head"}  # which other families name otherwise (`Checkpoint.draft_globs`)
SAME = "same as target"
ALL_PROMPTS, OWN_TEXT = "all bundled prompts", "my own text below"

_COLUMN = {"width": "min(480px, 100%)", "overflow": "visible"}


class SweepPanel(Panel):
    """Acceptance length by depth for the settings chosen, live in a notebook.

    Args:
        checkpoint: path of a checkpoint folder (or a loaded model, as `mtplab.sweep` takes it).
        depths: lowest and highest depth to start with, 0 … 16.
        exclude: preset exclusion sets that are ticked to start with, from "published", "none", "mtp.*".
        policies: cache policies offered, in this order; the first one is chosen. When None, those of `POLICIES` that
            the checkpoint's caches can be kept under.
        modules: globs offered for an exclusion set of one's own; all of the checkpoint's modules, as a tree, when None.
        recommended: names and globs that the tree's preset chooses, `found.exclude` of a search say; when None, what
            one engine or another builds in BF16 whatever a list says.
        prompts: whatever `mtplab.sweep` takes; None for the bundled prompts, which are offered by domain.
        domains: names of the domains among the prompts, offered one by one.
        model_format: "fp8" to quantise a BF16 checkpoint as it is loaded.
        results: folder in which finished points are kept and found again.
        sweep: the function that does the work; `mtplab.sweep` when None.
        options: further arguments of the sweep, passed on as they are.
    """

    title = "Sweep"
    run_label = "Run sweep"
    label_width = "130px"
    # as wide as its column lets it be: 100 % would stand out by its own margin
    input_width = "auto"

    def __init__(
        self,
        checkpoint: Any,
        *,
        depths: tuple[int, int] = (0, 6),
        exclude: Sequence[str] = ("published",),
        policies: Sequence[str] | None = None,
        modules: Sequence[str] | None = None,
        recommended: Sequence[str] | None = None,
        prompts: Any = None,
        domains: Sequence[str] = (),
        max_new_tokens: int = 48,
        model_format: str | None = None,
        results: str | Path = "results",
        sweep: Callable[..., Any] | None = None,
        **options: Any,
    ):
        self.checkpoint = checkpoint
        self.prompts, self.results, self.model_format = prompts, results, model_format
        self._sweep, self._options = sweep, options
        offered = self._fitting() if policies is None else tuple(policies)
        self._start = (depths, tuple(exclude), offered, tuple(domains), max_new_tokens)
        self._modules, self._recommended = modules, recommended
        self._last_draw = 0.0
        super().__init__()

    def inputs(self) -> dict[str, widgets.Widget]:
        depths, exclude, policies, domains, max_new_tokens = self._start
        return {
            "depths": widgets.IntRangeSlider(
                value=depths, min=0, max=16, description="Draft depths", **self.look()
            ),
            **{
                f"preset {name}": widgets.Checkbox(
                    value=name in exclude,
                    description=_WORDS.get(name, name),
                    indent=False,
                    layout=widgets.Layout(width="auto"),
                )
                for name in PRESETS
            },
            "modules": self._module_input(),
            "policies": widgets.SelectMultiple(
                options=policies,
                value=policies[:1],
                description="Target KV cache",
                rows=len(policies),
                **self.look(),
            ),
            "draft_policy": widgets.Dropdown(
                options=(SAME, *policies), description="Draft KV cache", **self.look()
            ),
            "temperature": widgets.FloatSlider(
                value=0.0,
                min=0.0,
                max=1.5,
                step=0.1,
                description="Temperature",
                **self.look(),
            ),
            "new_tokens": widgets.IntSlider(
                value=max_new_tokens,
                min=8,
                max=256,
                step=8,
                description="New tokens",
                **self.look(),
            ),
            "prompts": widgets.Dropdown(
                options=[(plain(name), name) for name in (ALL_PROMPTS, *domains, OWN_TEXT)],
                description="Prompts",
                **self.look(),
            ),
            "text": widgets.Textarea(
                placeholder="Your own prompts, an empty line between two of them",
                description="Own text",
                rows=3,
                **self.look(),
            ),
        }

    @cached_property
    def _opened(self) -> Any:
        return opened_checkpoint(self.checkpoint)

    def _fitting(self) -> tuple[str, ...]:
        try:
            return tuple(fitting(parse_config(self._opened.config, names=self._opened.tensors), POLICIES))
        except CheckpointError:
            return POLICIES  # what is wrong with the path, or is no model of ours, the sweep says

    def _module_input(self) -> widgets.Widget:
        """What chooses an exclusion set of one's own: `value` holds names and globs."""
        if self._modules is None:
            recommended, why = self._recommended, "what the search found"
            if recommended is None:
                recommended, why = _portable(self._opened), "what engines build in BF16 whatever a list says"
            return ModuleTree(self._opened.plan(), recommended, why, title="Also keep out")
        return widgets.SelectMultiple(
            options=[(plain(glob), glob) for glob in self._modules],
            description="Also keep out",
            rows=6,
            **self.look(),
        )

    def layout(self) -> widgets.Widget:
        w = self._widgets
        label = widgets.HTML(
            '<div style="text-align:right">Kept out of FP8</div>',
            layout=widgets.Layout(width=self.label_width, margin="2px 6px 2px 2px"),
        )
        wrap = {"display": "flex", "flex_flow": "row wrap"}
        presets = widgets.Box(
            [label, *(w[f"preset {name}"] for name in PRESETS)], layout=widgets.Layout(**wrap, grid_gap="0 14px")
        )
        left = [w["depths"], w["temperature"], presets, w["modules"]]
        right = [w["policies"], w["draft_policy"], w["new_tokens"], w["prompts"], w["text"]]
        columns = [widgets.VBox(side, layout=widgets.Layout(**_COLUMN)) for side in (left, right)]
        inputs = widgets.Box(columns, layout=widgets.Layout(**wrap, align_items="flex-start", grid_gap="4px 18px"))
        return widgets.VBox([inputs, self.actions(), self.figure, self.table])

    @property
    def config(self) -> Mapping[str, Any]:
        """The settings as keyword arguments of `mtplab.sweep`, a read-only snapshot.

        Raises:
            ConfigError: nothing is chosen where something must be.
        """
        value = {name: widget.value for name, widget in self._widgets.items()}
        exclude: list[Any] = [self._preset(name) for name in PRESETS if value[f"preset {name}"]]
        if value["modules"]:
            exclude.append(list(value["modules"]))
        if not exclude:
            raise ConfigError("no exclusion set is chosen; tick at least one, or pick modules to keep out of FP8")
        if not value["policies"]:
            raise ConfigError("no cache policy is chosen; pick at least one for the target")
        low, high = value["depths"]
        settings = {
            "depths": tuple(range(low, high + 1)),
            "exclude": tuple(exclude),
            "quant_policy": tuple(value["policies"]),
            "temperature": (value["temperature"],),
            "max_new_tokens": value["new_tokens"],
            "prompts": self._chosen_prompts(value["prompts"], value["text"]),
            "model_format": self.model_format,
            "results": self.results,
            **self._options,
        }
        if value["draft_policy"] != SAME:
            settings["draft_quant_policy"] = (value["draft_policy"],)
        return MappingProxyType(settings)

    def _preset(self, name: str) -> Any:
        if name != "mtp.*":
            return name
        try:
            return list(self._opened.draft_globs) or [name]
        except CheckpointError:
            return [name]  # what is wrong with the path, the sweep says

    def _chosen_prompts(self, choice: str, text: str) -> Any:
        if choice == ALL_PROMPTS:
            return self.prompts
        if choice == OWN_TEXT:
            own = [part.strip() for part in text.split("\n\n") if part.strip()]
            if not own:
                raise ConfigError("own text is chosen but the box is empty; write a prompt or choose a domain")
            return own
        from mtplab.study.prompts import load_prompts

        return load_prompts(self.prompts).narrowed([choice])

    def work(self, config: Mapping[str, Any], progress: Progress, cancel: threading.Event) -> Any:
        sweep = self._sweep
        if sweep is None:
            from mtplab.study import sweep
        rows: list[Any] = []

        def on_row(row: Any) -> None:
            rows.append(row)
            # a drawing takes a third of a second: not for every row
            if time.monotonic() - self._last_draw > 1.0 and not cancel.is_set():
                self.draw(rows)

        def on_progress(step: Any) -> None:
            progress(step.done + step.fraction, step.total, step.current, step.remaining)

        self._last_draw = time.monotonic()
        try:
            return sweep(self.checkpoint, on_row=on_row, on_progress=on_progress, cancel=cancel, **config)
        except Exception:
            if not cancel.is_set():
                raise
            return rows  # cancelled: what is done stays, in the panel and on disk

    def draw(self, result: Any) -> None:
        self.show_picture(acceptance_by_depth(result))
        self.table.value = acceptance_table(result)
        self._last_draw = time.monotonic()


def _portable(opened: Any) -> Callable[[], list[str]]:
    """Modules that must stay BF16 for every engine to load what is written; looked for when it is asked for."""

    def names() -> list[str]:
        from mtplab.checkpoint.convert.foresee import never_fp8_anywhere

        # of a quantised one that is what its own file holds in BF16, which stays so
        return [] if opened.quantization is not None else never_fp8_anywhere(opened)

    return names
