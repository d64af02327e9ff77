"""Figures of advice: speed-up by depth against the break-even line, where a round's time goes, the best depth's map.

Draws what `mtplab.study.advice` worked out; knows no cost and no acceptance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from mtplab.report.figures import WIDTH, line_style, new_figure, style_axes, style_cells
from mtplab.report.palette import GRID, INK, MARKERS, PAPER, SERIES
from mtplab.report.picture import Picture
from mtplab.report.text import plain, plot_label
from mtplab.study.advice import Advice, Cell
from mtplab.study.cost import BINDS
from mtplab.study.curve import Curve
from mtplab.study.words import DEPTH

__all__ = ["advice_pictures", "best_depth_map", "lengths_by_depth", "round_parts", "speedup_by_depth"]

# a part has its colour in every figure, whichever parts a figure has
_PART_COLOURS = dict(zip(BINDS, SERIES, strict=False))
_SHADES = LinearSegmentedColormap.from_list("depth", [PAPER, SERIES[0]])


def speedup_by_depth(advice: Advice | Mapping[str, Advice]) -> Picture:
    """Speed-up over plain decoding by depth, one line each; drafting pays above the dashed line at 1.

    Args:
        advice: one, or label → advice. Points whose caches and states do not fit are hollow.
    """
    figure = new_figure(3.8)
    said = _speedups(figure.add_subplot(), _labelled(advice))
    return Picture(figure, f"Speed-up over plain decoding by draft depth, a model's. {said}.")


def lengths_by_depth(curves: Mapping[str, Curve]) -> Picture:
    """Tokens a round by depth, one line each; the dotted line is what a head that is always right would give."""
    figure = new_figure(3.8)
    axes = figure.add_subplot()
    style_axes(axes, "What a round gives", DEPTH, "Tokens a round (bonus counted)")
    deepest = max(max(curve.depths) for curve in curves.values())
    axes.plot([0, deepest], [1, deepest + 1], color=INK, linewidth=1.0, linestyle=(0, (1, 2)), label="always right")
    said = []
    for index, (label, curve) in enumerate(curves.items()):
        lengths = [curve.length(depth) for depth in curve.depths]
        axes.plot(curve.depths, lengths, label=plot_label(label, 40), **_line(index))
        each = ", ".join(f"{length:.2f} at {depth}" for depth, length in zip(curve.depths, lengths, strict=True))
        said.append(f"{plain(label)}: {each}")
    top = max(length for curve in curves.values() for length in curve.lengths.values())
    axes.set_ylim(0.8, 1.15 * top)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside right upper", frameon=False, fontsize=10)
    return Picture(figure, f"Tokens a round by draft depth. {'; '.join(said)}.")


def best_depth_map(cells: Sequence[Sequence[Cell]], title: str = "") -> Picture:
    """The best depth, and its speed-up, in a cell for every batch (down) and context (across).

    Args:
        cells: as `mtplab.study.advice.best_map` gives them.
    """
    figure = new_figure(1.6 + 0.42 * len(cells))
    said = _map(figure.add_subplot(), cells, title)
    return Picture(figure, f"Best draft depth by batch and context, a model's. {said}.")


def round_parts(advice: Advice) -> Picture:
    """What the time of a round goes to, stacked, by depth."""
    figure = new_figure(3.8)
    said = _parts(figure.add_subplot(), advice)
    figure.legend(loc="outside right upper", frameon=False, fontsize=10)
    return Picture(figure, f"Milliseconds of a round by draft depth, a model's. {said}.")


def advice_pictures(advice: Advice, cells: Sequence[Sequence[Cell]]) -> Picture:
    """Speed-up and map side by side, in one picture with fixed margins: quick enough to follow a control."""
    figure = Figure(figsize=(WIDTH, 3.3), facecolor=PAPER)
    figure.subplots_adjust(left=0.065, right=0.99, bottom=0.17, top=0.9, wspace=0.2)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    said = [_speedups(left, _labelled(advice)), _map(right, cells, "")]
    alt = f"Left, speed-up over plain decoding by draft depth: {said[0]}. Right, best depth by batch: {said[1]}."
    return Picture(figure, alt, dpi=90)


def _labelled(advice: Advice | Mapping[str, Advice]) -> dict[str, Advice]:
    return {"": advice} if isinstance(advice, Advice) else dict(advice)


def _line(index: int) -> dict[str, Any]:
    return {
        "color": SERIES[index % len(SERIES)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": line_style(index),
        "linewidth": 1.8,
        "markersize": 6,
        "markeredgecolor": PAPER,
    }


def _speedups(axes: Axes, found: Mapping[str, Advice]) -> str:
    style_axes(axes, "Speed-up by depth (model)", DEPTH, "Times plain decoding")
    axes.axhline(1, color=INK, linewidth=1.2, linestyle=(0, (6, 3)))
    said = []
    for index, (label, advice) in enumerate(found.items()):
        style = _line(index)
        depths, speeds = [line.depth for line in advice.lines], [line.speedup for line in advice.lines]
        axes.plot(depths, speeds, label=plot_label(label, 44) or None, **style)
        hollow = [line for line in advice.lines if not line.fits]
        marks = {"marker": style["marker"], "markersize": 6, "markerfacecolor": PAPER}
        at, high = [line.depth for line in hollow], [line.speedup for line in hollow]
        axes.plot(at, high, linestyle="none", markeredgecolor=style["color"], **marks)
        each = ", ".join(
            f"{line.speedup:.2f} at {line.depth}{'' if line.fits else ' (does not fit)'}" for line in advice.lines
        )
        said.append(f"{plain(label)}: {each}" if label else each)
    top = max(line.speedup for advice in found.values() for line in advice.lines)
    axes.set_ylim(0, 1.12 * max(top, 1.0))
    axes.annotate("break even", (0, 1), xytext=(2, -13), textcoords="offset points", fontsize=9, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if any(found):
        axes.legend(loc="lower right", frameon=False, fontsize=10)
    return "; ".join(said)


def _map(axes: Axes, cells: Sequence[Sequence[Cell]], title: str) -> str:
    contexts, batches = [f"{cell.context:,}" for cell in cells[0]], [str(line[0].batch) for line in cells]
    name = plot_label(title, 70) or "Best depth (speed-up)"
    style_cells(axes, name, "Context (tokens a sequence)", contexts, "Batch (sequences)", batches)
    deepest = max((cell.depth or 0 for line in cells for cell in line), default=0) or 1
    for y, line in enumerate(cells):
        for x, cell in enumerate(line):
            # up to a shade on which dark text can still be read
            colour = GRID if cell.depth is None else _SHADES(0.08 + 0.62 * cell.depth / deepest if cell.depth else 0.0)
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor=PAPER, linewidth=2))
            text = "does not fit" if cell.depth is None else f"{cell.depth} ({cell.speedup:.2f}×)"
            axes.text(x, y, text, ha="center", va="center", fontsize=9, color=INK)
    rows = []
    for line in cells:
        each = ", ".join(
            f"{cell.context}: {'does not fit' if cell.depth is None else f'{cell.depth} ({cell.speedup:.2f} times)'}"
            for cell in line
        )
        rows.append(f"batch {line[0].batch}, by context {each}")
    return "; ".join(rows)


def _parts(axes: Axes, advice: Advice) -> str:
    style_axes(axes, "What a round's time goes to (model)", DEPTH, "Time of a round (ms)")
    depths = [line.depth for line in advice.lines]
    base = [0.0] * len(depths)
    keys = [key for key in BINDS if any(line.cost.parts[key] > 0.005 * line.cost.seconds for line in advice.lines)]
    for key in keys:
        heights = [1e3 * line.cost.parts[key] for line in advice.lines]
        axes.bar(depths, heights, 0.7, base, color=_PART_COLOURS[key], edgecolor=PAPER, label=BINDS[key])
        base = [low + height for low, height in zip(base, heights, strict=True)]
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return "; ".join(
        f"depth {line.depth}: " + ", ".join(f"{BINDS[key]} {1e3 * line.cost.parts[key]:.2f}" for key in keys)
        for line in (advice.lines[0], advice.lines[-1])
    )
