"""Figures of FP8 numerics: what a number loses, what a matrix loses by granularity, and what a product can reach.

Draws what `mtplab.study.granularity` and `roofline` say; quantises nothing itself but the line of numbers it shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import FuncFormatter, NullLocator

from mtplab.report.figures import new_figure, style_axes
from mtplab.report.palette import INK, MARKERS, PAPER, SERIES
from mtplab.report.picture import Picture
from mtplab.report.text import plain, plot_label
from mtplab.study.gpus import GemmShape, Gpu
from mtplab.study.granularity import DAMAGE, GRANULARITIES, MatrixError
from mtplab.study.numbers import percent
from mtplab.study.roofline import roof, turning_point

__all__ = ["granularity_errors", "number_errors", "roofline"]

_PER_CENT = FuncFormatter(lambda value, _: f"{100 * value:.3g} %")
_ROWS = np.unique(np.geomspace(1, 8192, 60).round().astype(int))


def number_errors() -> Picture:
    """Relative rounding error of one value in E4M3, by how far it lies below the largest that shares its scale."""
    import torch

    octaves = np.linspace(0, 20, 4001)
    x = torch.from_numpy(2.0**-octaves).float()
    back = (x * 448).to(torch.float8_e4m3fn).float() / 448
    error = ((back - x) / x).abs().numpy()
    figure = new_figure(3.4)
    axes = figure.add_subplot()
    style_axes(
        axes,
        "What a value loses in E4M3, by its distance from the largest that shares its scale",
        "Distance below the largest value (octaves: powers of two)",
        "Rounding error (share of the value)",
    )
    axes.plot(octaves, error, color=SERIES[0], linewidth=1.0)
    zero = float(octaves[error >= 1].min())
    coarse = float(np.log2(448 * 2**6))
    for at, words in ((0, "full precision: at most 1/17"), (coarse, "bits lost"), (zero, "zero")):
        axes.annotate(words, (at + 0.2, 1.06), fontsize=10, color=INK)
        axes.axvline(at, color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
    axes.set_ylim(0, 1.15)
    axes.set_xlim(0, 20)
    axes.yaxis.set_major_formatter(_PER_CENT)
    return Picture(
        figure,
        f"Rounding error of a value in E4M3: at most 5.9 % of it down to {coarse:.1f} octaves below the largest that "
        f"shares its scale, then growing, and 100 % (the value becomes zero) from {zero:.1f} octaves below.",
    )


def granularity_errors(matrices: Mapping[str, Sequence[MatrixError]], measure: str = "relative") -> Picture:
    """One mark a matrix and granularity.

    Args:
        matrices: name → its `matrix_errors`.
        measure: the field drawn: "relative", "worst_row", "worst_column", "damaged_columns", "flushed" or
            "product".
    """
    words = {
        "relative": "Error of the matrix, ‖w − ŵ‖ / ‖w‖",
        "worst_row": "Error of its worst row",
        "worst_column": "Error of its worst column",
        "damaged_columns": f"Columns that lose more than {percent(DAMAGE)}",
        "flushed": "Share of values that became zero",
        "product": "Error of the product, ‖x(w − ŵ)ᵀ‖ / ‖xwᵀ‖",
    }
    shares = {"damaged_columns": "Share of the columns", "flushed": "Share of the values"}
    figure = new_figure(3.8)
    axes = figure.add_subplot()
    style_axes(axes, f"{words[measure]}, E4M3", "Values that share a scale", shares.get(measure, "Share of the norm"))
    names, said = list(GRANULARITIES), []
    for index, (name, errors) in enumerate(matrices.items()):
        values = [getattr(error, measure) or 0.0 for error in errors]
        shift = (index / max(1, len(matrices) - 1) - 0.5) * 0.3 if len(matrices) > 1 else 0.0
        axes.plot(
            [position + shift for position in range(len(names))],
            values,
            linestyle="none",
            marker=MARKERS[index % len(MARKERS)],
            markersize=9,
            color=SERIES[index % len(SERIES)],
            markeredgecolor=PAPER,
            clip_on=False,
            zorder=3,
            label=plot_label(name, 44),
        )
        said.append(f"{plain(name)}: " + ", ".join(f"{n} {percent(v, 2)}" for n, v in zip(names, values, strict=True)))
    axes.set_xticks(range(len(names)), ["whole tensor", "channel (a row)", "128 × 128 block", "1 × 128 group"])
    axes.set_xlim(-0.5, len(names) - 0.5)
    drawn = [getattr(error, measure) or 0.0 for errors in matrices.values() for error in errors]
    if max(drawn, default=0) > 10 * min(drawn, default=0):
        axes.set_yscale("symlog", linthresh=0.01)
        axes.set_yticks([0, 0.01, 0.03, 0.1, 0.3, 1.0])
        axes.set_ylim(0, 1.5)
    else:
        axes.set_ylim(0, min(1.25 * max(drawn, default=0), 1.05) or 1)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(_PER_CENT)
    figure.legend(loc="outside lower left", frameon=False, fontsize=10, ncols=2)
    return Picture(figure, f"{words[measure]} by values that share a scale. {'; '.join(said)}.")


def roofline(shape: GemmShape, gpu: Gpu, mark: int | None = None) -> Picture:
    """The most TFLOP/s that m rows times one weight can reach in FP8 and BF16, and where memory stops being the limit.

    Args:
        mark: a number of rows to point out.
    """
    figure = new_figure(4.0)
    axes = figure.add_subplot()
    style_axes(
        axes,
        plot_label(f"What {gpu.name} allows for {shape}", 76),
        "Rows m (tokens in the pass; log scale)",
        "TFLOP/s at most (log scale)",
    )
    said = []
    for index, dtype in enumerate(("fp8", "bf16")):
        values = [roof(shape, int(m), gpu, dtype).tflops for m in _ROWS]
        axes.plot(_ROWS, values, color=SERIES[index], linewidth=2, label=f"{dtype.upper()} weights and activations")
        at = turning_point(shape, gpu, dtype)
        if at is not None and at <= _ROWS[-1]:
            top = roof(shape, at, gpu, dtype).tflops
            axes.plot([at], [top], marker="o", color=SERIES[index], markeredgecolor=PAPER, markersize=9)
            above = {"xytext": (8, -16 if index else 7), "textcoords": "offset points", "ha": "left"}
            axes.annotate(f"m = {at}", (at, top), **above, fontsize=10, color=INK)
            said.append(f"{dtype.upper()} is bound by memory below m = {at}, by {top:.0f} TFLOP/s above")
        else:
            said.append(f"{dtype.upper()} is bound by memory at every m drawn")
    if mark is not None:
        fp8, bf16 = (roof(shape, mark, gpu, dtype).seconds for dtype in ("fp8", "bf16"))
        axes.axvline(mark, color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
        ratio, least = bf16 / fp8, fp8 * 1e6
        said.append(f"at m = {mark} FP8 takes at least {least:.1f} µs, {ratio:.2f} times as fast as BF16")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    # a log axis has dozens of them, and laying them out takes longer than all the rest
    axes.minorticks_off()
    axes.set_xlim(1, _ROWS[-1])
    axes.set_ylim(top=3 * gpu.fp8)
    axes.set_xticks([1, 4, 16, 64, 256, 1024, 4096], ["1", "4", "16", "64", "256", "1024", "4096"])
    axes.legend(loc="lower right", frameon=False, fontsize=10)
    return Picture(figure, f"Roofline of {plain(str(shape))} on {plain(gpu.name)}: {'; '.join(said)}.")
