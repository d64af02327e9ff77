"""The acceptance panel: traces made once, and every question that can be asked of them, answered as the control moves.

Shows views of an `AcceptanceSet`; what a view holds is worked out in `mtplab.study.acceptance_views`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import ipywidgets as widgets

from mtplab.report.acceptance_figures import acceptance_chart
from mtplab.report.panels import Panel, Progress
from mtplab.report.table import html_table
from mtplab.report.text import plain
from mtplab.study.acceptance_set import AcceptanceSet
from mtplab.study.acceptance_views import VIEWS, View

__all__ = ["AcceptancePanel"]

ALL, APART = "\0all", "\0apart"


class AcceptancePanel(Panel):
    """Acceptance by depth, position, context, gate or schedule; shown at once, and anew after every choice.

    Args:
        found: an `AcceptanceSet`, or traces at different temperatures of the same prompts.
    """

    title = "Acceptance"
    run_label = "Show"

    def __init__(self, found: Any):
        self.found = found if isinstance(found, AcceptanceSet) else AcceptanceSet(found)
        super().__init__()
        self._warm()
        self.follow()

    def _warm(self) -> None:
        """What the first look at each depth works out, before anyone waits for it."""
        for one in self.found:
            for part in (one, *(one.only(domain) for domain in self.found.domains)):
                for depth in self.found.depths:
                    part.counts(depth)

    def inputs(self) -> dict[str, widgets.Widget]:
        """The widgets that choose: view, temperature, domain, depths, a gate's threshold, a schedule's switch."""
        def choice(label: str, options: Any) -> widgets.Dropdown:
            return widgets.Dropdown(options=options, description=label, **self.look())

        deepest = self.found.depths[-1]
        longest = max(int(one.starts.max(initial=0)) for one in self.found) + 1
        temperatures = [(f"{t:g}" + (" (greedy)" if t == 0 else ""), t) for t in self.found.temperatures]
        domains = [(plain(name) or "no domain", name) for name in self.found.domains]
        if len(temperatures) > 1:
            temperatures.insert(0, ("all of them", ALL))
        if len(domains) > 1:
            domains.append(("each by itself", APART))
        return {
            "view": choice("Show", [(words, name) for name, words in VIEWS.items()]),
            "temperature": choice("Temperature", temperatures),
            "domain": choice("Domain", [("all prompts", ALL), *domains]),
            "depths": widgets.IntRangeSlider(
                value=(1, deepest), min=0, max=deepest, description="Depths", **self.look()
            ),
            "confidence": widgets.FloatSlider(
                value=0.5, min=0.0, max=1.0, step=0.05, description="Gate: confidence", **self.look()
            ),
            "switch": widgets.IntSlider(
                value=longest // 2, min=0, max=longest, description="Schedule: switch at", **self.look()
            ),
        }

    def work(self, config: Mapping[str, Any], progress: Progress, cancel: threading.Event) -> View:
        """The view under the choice."""
        domain = config["domain"]
        return self.found.view(
            config["view"],
            temperatures=None if config["temperature"] == ALL else [config["temperature"]],
            domains=self.found.domains if domain == APART else [None if domain == ALL else domain],
            depths=config["depths"],
            confidence=round(config["confidence"], 2),
            switch=config["switch"],
        )

    def draw(self, result: View) -> None:
        """Show a view: its chart, and below it the numbers."""
        self.figure.value = acceptance_chart(result).to_html()
        rows = []
        for line in result.lines:
            domain = "all prompts" if line.domain is None else line.domain
            settings = line.setting or ("",) * len(line.x)
            for setting, x, y, low, high in zip(settings, line.x, line.y, line.low, line.high, strict=True):
                told = _told(result, y), "" if low is None else f"{_told(result, low)} to {_told(result, high)}"
                shown = f"{setting:g}" if setting != "" else ""
                rows.append((f"{line.temperature:g}", domain, line.kind, shown, f"{x:.4g}", *told))
        head = ("Temperature", "Domain", "Line", "Gate or switch", result.x_label, result.y_label, "95 % interval")
        self.table.value = html_table(head, rows, result.title, left=3, height="18em")


def _told(view: View, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.1f} %" if view.share else f"{value:.3f}"
