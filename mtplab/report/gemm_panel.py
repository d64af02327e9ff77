"""The GEMM panel: one matrix of a checkpoint, spoilt at will, in FP8 by granularity; one shape under a GPU's roof.

Reads one tensor at a time; the arithmetic is `mtplab.study.granularity`'s and `roofline`'s.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import ipywidgets as widgets

from mtplab.errors import CheckpointError
from mtplab.report.gemm_figures import granularity_errors, roofline
from mtplab.report.opened import opened_checkpoint
from mtplab.report.panels import Panel, Progress
from mtplab.report.table import html_table
from mtplab.report.text import plain
from mtplab.study.gpus import GPUS, SHAPES, gpu
from mtplab.study.granularity import GRANULARITIES, matrix_errors, with_outliers
from mtplab.study.numbers import percent

__all__ = ["GemmPanel"]

MEASURES = {
    "the whole matrix": "relative",
    "its worst row": "worst_row",
    "its worst column": "worst_column",
    "columns damaged": "damaged_columns",
    "values that become zero": "flushed",
}


class GemmPanel(Panel):
    """What FP8 costs a matrix, and what a GPU allows its product; shown at once, and anew after every choice.

    Args:
        checkpoint: a path, or a checkpoint that `mtplab.open_checkpoint` gave.
    """

    title = "FP8 matrix and product"
    run_label = "Show"

    def __init__(self, checkpoint: Any):
        self.checkpoint = checkpoint = opened_checkpoint(checkpoint)
        self._names = [m.name for m in checkpoint.plan().modules if m.kind == "linear" and len(m.shape) == 2]
        if not self._names:
            raise CheckpointError(f"{checkpoint.path}: there is no linear weight to look at")
        self.roof = widgets.HTML()
        super().__init__()
        self.follow()

    def inputs(self) -> dict[str, widgets.Widget]:
        def choice(label: str, options: Any, value: Any = None) -> widgets.Dropdown:
            return widgets.Dropdown(options=options, value=value, description=label, **self.look())

        def slider(label: str, low: int, high: int, value: int) -> widgets.IntSlider:
            return widgets.IntSlider(
                min=low, max=high, value=value, description=label, continuous_update=False, **self.look()
            )

        names = [(plain(name), name) for name in self._names]
        shapes = [(str(shape), index) for index, shape in enumerate(SHAPES)]
        return {
            "module": choice("Matrix", names, self._names[0]),
            "columns": slider("Outlier channels", 0, 64, 0),
            "octaves": slider("Outliers × 2^", 0, 16, 8),
            "measure": choice("Error of", list(MEASURES.items()), "relative"),
            "gpu": choice("GPU", list(GPUS), "H200 SXM"),
            "shape": choice("A model's product", shapes, 0),
            "rows": choice("Rows m", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096], 16),
        }

    def layout(self) -> widgets.Widget:
        w = self._widgets
        matrix = [w["module"], w["columns"], w["octaves"], w["measure"], self.actions(), self.figure, self.table]
        return widgets.VBox([self.head(), *matrix, w["gpu"], w["shape"], w["rows"], self.roof])

    def work(self, config: Mapping[str, Any], progress: Progress, cancel: threading.Event) -> Any:
        name = config["module"]
        weight = self.checkpoint.dequantize(f"{name}.weight")
        found = {"as stored": matrix_errors(weight)}
        if config["columns"]:
            spoilt = with_outliers(weight, min(config["columns"], weight.shape[1]), config["octaves"])
            found[f"{config['columns']} input channels × 2^{config['octaves']}"] = matrix_errors(spoilt)
        matrix = (name, config["columns"], config["octaves"] if config["columns"] else None, config["measure"])
        return {"errors": found, "matrix": matrix, "roof": (config["shape"], config["gpu"], config["rows"])}

    def draw(self, result: Any) -> None:
        errors, measure = result["errors"], result["matrix"][-1]
        self.show_if_new(self.figure, result["matrix"], lambda: granularity_errors(errors, measure))
        rows = [
            [label, error.granularity, percent(error.relative, 2), percent(error.worst_row, 2),
             percent(error.worst_column, 2), percent(error.flushed, 2), percent(error.scale_bytes, 3)]
            for label, found in errors.items()
            for error in found
        ]  # fmt: skip
        head = ["Matrix", "Scale for", "Error", "Worst row", "Worst column", "Became zero", "Scale bytes"]
        self.table.value = html_table(head, rows, f"E4M3, {len(GRANULARITIES)} granularities")
        index, name, m = result["roof"]
        self.show_if_new(self.roof, result["roof"], lambda: roofline(SHAPES[index], gpu(name), m))
