"""The cache panel: target policies, the draft's policy, a depth and a context, and at once what they cost.

Everything was measured before (`mtplab.study.cache_study`): a control only asks the traces again.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import ipywidgets as widgets

from mtplab.checkpoint.text_table import html_table, scrolling
from mtplab.errors import ConfigError
from mtplab.report.cache_figures import MEASURES, cache_pictures
from mtplab.report.panels import Panel, Progress
from mtplab.study.cache_study import CacheStudy, context_edges
from mtplab.study.numbers import NATS, rounded
from mtplab.study.words import cache_words

__all__ = ["CachePanel"]

FINEST = (16, 32, 64, 128, 256)


class CachePanel(Panel):
    """What cache policies cost by context and depth; shown at once, and anew after every choice.

    Args:
        study: what `mtplab.compare_caches` measured.
    """

    title = "Cache policy × context"
    run_label = "Show"
    label_width = "190px"

    def __init__(self, study: CacheStudy):
        self.study = study
        super().__init__()
        self.follow()

    def inputs(self) -> dict[str, widgets.Widget]:
        study = self.study
        targets = study.policies
        drafts = [name for name in study.draft_policies if all((target, name) in study.lines for target in targets)]
        options = [(cache_words(name), name) for name in targets]
        return {
            "policies": widgets.SelectMultiple(
                options=options, value=targets, rows=len(targets), description="Target's KV cache", **self.look(),
            ),
            "draft": widgets.Dropdown(
                options=[("as the target's", ""), *((cache_words(name), name) for name in drafts)], value="",
                description="Draft's KV cache", **self.look(),
            ),
            "depth": widgets.IntSlider(
                value=min(3, study.max_depth), min=1, max=study.max_depth, description="Draft depth", **self.look(),
            ),
            "measure": widgets.Dropdown(
                options=[(words, key) for key, (words, _) in MEASURES.items()], value="kl", description="Quality",
                **self.look(),
            ),
            "first": widgets.Dropdown(options=FINEST, value=64, description="First range (tokens)", **self.look()),
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
        head = ("KV cache", "bytes a token, target + draft", f"tokens a round, depth {depth}", f"KL ({NATS})")
        rows = []
        for line in lines:
            length, nbytes = line.acceptance.length(depth), f"{line.nbytes:,} + {line.draft_nbytes:,}"
            told = "–" if length is None else f"{length:.2f}", rounded(line.quality.mean_kl or 0.0)[0]
            rows.append((cache_words(line.policy, line.draft_policy), nbytes, *told))
        self.table.value = scrolling(html_table(head, rows, head[1:]), "Cache policies")
