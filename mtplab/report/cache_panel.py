"""The cache panel: target policies, the draft's policy, a depth and a context, and at once what they cost.

Everything was measured before (`mtplab.study.cache_study`): a control only asks the traces again.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import ipywidgets as widgets

from mtplab.errors import ConfigError
from mtplab.report.cache_figures import MEASURES, cache_pictures
from mtplab.report.panels import Panel, Progress
from mtplab.report.text import escape
from mtplab.study.cache_study import CacheStudy, context_edges
from mtplab.study.numbers import NATS, rounded
from mtplab.study.words import cache_words

__all__ = ["CachePanel"]

_LABEL = {"description_width": "190px"}
_WIDE = {"width": "min(520px, 98%)"}
FINEST = (16, 32, 64, 128, 256)


class CachePanel(Panel):
    """What cache policies cost by context and depth; shown at once, and anew after every choice.

    Args:
        study: what `mtplab.compare_caches` measured.
    """

    title = "Cache policy × context"
    run_label = "Show"

    def __init__(self, study: CacheStudy):
        self.study = study
        super().__init__()
        self.follow()

    def inputs(self) -> dict[str, widgets.Widget]:
        study, layout = self.study, widgets.Layout(**_WIDE)
        targets = study.policies
        drafts = [name for name in study.draft_policies if all((target, name) in study.lines for target in targets)]
        options = [(cache_words(name), name) for name in targets]
        return {
            "policies": widgets.SelectMultiple(
                options=options, value=targets, rows=len(targets), description="Target's KV cache", style=_LABEL,
                layout=layout,
            ),
            "draft": widgets.Dropdown(
                options=[("as the target's", ""), *((cache_words(name), name) for name in drafts)], value="",
                description="Draft's KV cache", style=_LABEL, layout=layout,
            ),
            "depth": widgets.IntSlider(
                value=min(3, study.max_depth), min=1, max=study.max_depth, description="Draft depth", style=_LABEL,
                layout=layout,
            ),
            "measure": widgets.Dropdown(
                options=[(words, key) for key, (words, _) in MEASURES.items()], value="kl", description="Quality",
                style=_LABEL, layout=layout,
            ),
            "first": widgets.Dropdown(
                options=FINEST, value=64, description="First range (tokens)", style=_LABEL, layout=layout
            ),
        }  # fmt: skip

    def work(self, config: Mapping[str, Any], progress: Progress, cancel: threading.Event) -> Any:
        if not config["policies"]:
            raise ConfigError("no policy is chosen; pick at least one for the target")
        edges = context_edges(self.study.longest, config["first"])
        draft = config["draft"] or None
        picture = cache_pictures(self.study, config["policies"], draft, config["depth"], edges, config["measure"])
        lines = [self.study.line(policy, draft) for policy in config["policies"]]
        return picture, lines, config["depth"]

    def draw(self, result: Any) -> None:
        picture, lines, depth = result
        self.show_picture(picture)
        cells = "".join(
            f"<tr><td>{escape(cache_words(line.policy, line.draft_policy))}</td>"
            f'<td style="text-align:right">{line.nbytes:,} + {line.draft_nbytes:,}</td>'
            f'<td style="text-align:right">{line.acceptance.length(depth) or 0:.2f}</td>'
            f'<td style="text-align:right">{rounded(line.quality.mean_kl or 0.0)[0]}</td></tr>'
            for line in lines
        )
        self.table.value = (
            "<table><thead><tr><th>KV cache</th><th>bytes a token, target + draft</th>"
            f"<th>tokens a round, depth {depth}</th><th>KL ({NATS})</th></tr></thead><tbody>{cells}</tbody>"
            "</table>"
        )
