"""The advice panel: a model, a GPU, a batch and an acceptance, and at once what draft depth pays there.

The arithmetic is `mtplab.study.advice`'s; follows every control without a run of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import ipywidgets as widgets

from mtplab.errors import ConfigError
from mtplab.report.advise_figures import advice_pictures
from mtplab.report.advise_table import advice_table
from mtplab.report.panels import Panel, Progress
from mtplab.report.text import escape, plain
from mtplab.study.advice import advise, best_map
from mtplab.study.cost import CACHES, Setting
from mtplab.study.curve import Curve
from mtplab.study.gpus import GPUS, gpu
from mtplab.study.model_sizes import WEIGHTS, weights
from mtplab.study.models_catalogue import MODELS, model

__all__ = ["AdvisePanel"]

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_MAP = ((1, 8, 32, 128), (1024, 8192, 65536))
DEEPEST = 8


class AdvisePanel(Panel):
    """What draft depth pays, by model, GPU and acceptance; shown at once, and anew after every choice.

    Args:
        curves: label → acceptance to choose from, besides one conditional share for every position.
        chosen: the label to start with; the last one if None.

    Raises ConfigError for a label that is not there.
    """

    title = "What depth pays"
    run_label = "Show"
    label_width = "190px"

    def __init__(self, curves: Mapping[str, Curve] | None = None, chosen: str | None = None):
        self._curves = dict(curves or {})
        if chosen is not None and chosen not in self._curves:
            raise ConfigError(f"no curve is called {chosen!r:.80}; expected one of {', '.join(self._curves)}")
        self._chosen = next(reversed(self._curves), "") if chosen is None else chosen
        self.advice = widgets.HTML()
        super().__init__()
        self.follow()

    def inputs(self) -> dict[str, widgets.Widget]:
        def choice(label: str, options: Any, value: Any) -> widgets.Dropdown:
            return widgets.Dropdown(options=options, value=value, description=label, **self.look())

        share = widgets.FloatSlider(
            min=0.0, max=1.0, step=0.01, value=0.8, description="Share, where assumed", continuous_update=False,
            **self.look(),
        )  # fmt: skip
        curves = [("one share at every position", ""), *((plain(label), label) for label in self._curves)]
        return {
            "model": choice("Model", list(MODELS), "Qwen3.5-27B"),
            "weights": choice("Weights", list(WEIGHTS), "fp8"),
            "gpu": choice("GPU", list(GPUS), "H200 SXM"),
            "tp": choice("GPUs that share a layer", [1, 2, 4, 8, 16], 1),
            "cache": choice("KV cache", CACHES, "none"),
            "batch": choice("Batch", BATCHES, 8),
            "context": choice("Context", CONTEXTS, 4096),
            "curve": choice("Acceptance", curves, self._chosen),
            "share": share,
        }

    def layout(self) -> widgets.Widget:
        shown = [self.actions(), self.advice, self.figure, self.table]
        return widgets.VBox([self.head(), *self._widgets.values(), *shown])

    def work(self, config: Mapping[str, Any], progress: Progress, cancel: threading.Event) -> Any:
        chosen = config["curve"]
        curve = self._curves[chosen] if chosen else Curve.of_rate(config["share"], DEEPEST)
        setting = Setting(
            model(config["model"]), weights(config["weights"]), gpu(config["gpu"]), config["tp"], config["cache"]
        )
        found = advise(setting, curve, config["batch"], config["context"])
        return found, best_map(setting, curve, *_MAP)

    def draw(self, result: Any) -> None:
        found, cells = result
        self.advice.value = "".join(f"<p>{escape(sentence)}</p>" for sentence in found.sentences)
        self.show_picture(advice_pictures(found, cells))
        self.table.value = advice_table(found)
