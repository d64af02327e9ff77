"""Figures of a checkpoint's plan: which module is stored how, and where the bytes are.

Reads only a resolved `Plan` (names, kinds, dtypes, sizes); opens no file and knows no rule.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D

from mtplab.checkpoint.names import experts_together, in_layer
from mtplab.report.figures import new_figure, style_axes
from mtplab.report.palette import DTYPE_COLOURS, DTYPE_INK, INK, PAPER
from mtplab.report.picture import Picture
from mtplab.report.text import human_bytes, part_words, plot_label
from mtplab.study.words import ranges

__all__ = ["bytes_by_part", "checkpoint_map", "map_key"]

_NAMES = {"fp8": "FP8 with a scale per block", "bf16": "BF16", "f16": "FP16", "f32": "FP32", "other": "other"}
_BITS = {"fp8": "8", "bf16": "16", "f16": "16", "f32": "32", "other": "?"}

MANY_ROWS = 16  # past this, layers that are held alike share a row

Row = tuple[int, int, str]  # (-1 outside, 0 target layer, 1 draft layer, 2 draft outside), layer, label
Sign = tuple[str, str, str]  # colour, colour of the number, number


def _place(module: Any) -> tuple[Row, str]:
    """(row, column) of a module: rows are layers, target before draft; columns are kinds of module."""
    found = in_layer(module.name)
    draft = module.part == "draft"
    if found:
        layer = int(found.number)
        label = f"draft layer {layer}" if draft else f"layer {layer}"
        return (1 if draft else 0, layer, label), experts_together(found.rest)
    if draft:
        return (2, 0, "draft, outside"), module.name.rsplit(".", 1)[-1]
    return (-1, 0, "outside the layers"), module.name.rsplit(".", 1)[-1]


def _weight(module: Any) -> str:
    return module.weight if module.weight in DTYPE_COLOURS else "other"


def _sign(modules: list[Any]) -> Sign:
    """How a cell looks; all experts of a layer share one, and may differ."""
    weights = sorted({_weight(module) for module in modules}, key=list(DTYPE_COLOURS).index)
    rounded = "·" if all(module.activation == "fp8" for module in modules) else ""
    shown = weights[0] if len(weights) == 1 else "other"
    return DTYPE_COLOURS[shown], DTYPE_INK[shown], "/".join(_BITS[weight] for weight in weights) + rounded


def _cells(plan: Any) -> dict[Row, dict[str, Sign]]:
    """row -> column -> sign, rows in order; many layers that look alike become one row."""
    found: dict[Row, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for module in plan.modules:
        row, column = _place(module)
        found[row][column].append(module)
    rows = {row: {column: _sign(each) for column, each in found[row].items()} for row in sorted(found)}
    if len(rows) <= MANY_ROWS:
        return rows
    alike: dict[Any, list[Row]] = {}
    for row, cells in rows.items():
        alike.setdefault((row[0], tuple(sorted(cells.items()))), []).append(row)
    return {(same[0][0], same[0][1], _together(same)): rows[same[0]] for same in alike.values()}


def _together(rows: list[Row]) -> str:
    """`layers 0–2, 4–6, 8 … (48)`."""
    if len(rows) == 1:
        return rows[0][2]
    texts = ranges((layer for _, layer, _ in rows), "–")
    more = " …" if len(texts) > 3 else ""
    return f"{'draft ' if rows[0][0] == 1 else ''}layers {', '.join(texts[:3])}{more} ({len(rows)})"


def map_key(plan: Any) -> tuple[Any, ...]:
    """All of a plan that its map shows: two plans with one key have one map."""
    return tuple((module.name, module.part, module.weight, module.activation) for module in plan.modules)


def checkpoint_map(plan: Any) -> Picture:
    """Modules of a plan as coloured cells: layers as rows, kinds of module as columns.

    The number in a cell is the bits per weight; a dot after it says that activations are rounded to FP8 too. All
    experts of a layer share a cell, and in a deep model all layers that are held alike share a row.

    Args:
        plan: a resolved plan, with `.modules` (name, part, weight, activation, nbytes).
    """
    rows = _cells(plan)
    order = {_place(module)[1]: None for module in plan.modules}
    columns = {column: at for at, column in enumerate(order)}
    figure = new_figure(max(2.6, 1.9 + 0.34 * len(rows)))
    axes = figure.add_subplot()
    style_axes(axes, "How each module's weight is held", "", "")
    axes.grid(False)
    signs: dict[Sign, list[tuple[float, float]]] = defaultdict(list)
    for y, cells in enumerate(rows.values()):
        for column, sign in cells.items():
            signs[sign].append((columns[column], y))
    # cells that look alike are one thing to draw: a panel draws a map for every move of a control
    for (colour, ink, label), places in signs.items():
        squares = [[(x, y), (x + 1, y), (x + 1, y + 1), (x, y + 1)] for x, y in places]
        axes.add_collection(
            PolyCollection(squares, facecolor=colour, edgecolor=PAPER, linewidth=1.5), autolim=False
        ).set_in_layout(False)
        axes.add_collection(_written(label, ink, places, figure, axes), autolim=False).set_in_layout(False)
    axes.set_xlim(0, len(columns))
    axes.set_ylim(len(rows), 0)
    axes.set_xticks([i + 0.5 for i in range(len(columns))])
    axes.set_xticklabels([plot_label(name, 28) for name in columns], rotation=50, ha="right", rotation_mode="anchor")
    axes.set_yticks([i + 0.5 for i in range(len(rows))])
    axes.set_yticklabels([label for *_, label in rows])
    axes.tick_params(length=0, labelsize=9)
    axes.spines[:].set_visible(False)
    present = [name for name in DTYPE_COLOURS if any(_weight(module) == name for module in plan.modules)]
    named = []
    for name in present:
        if name == "fp8":
            how = {module.activation == "fp8" for module in plan.modules if _weight(module) == name}
            texts = {True: "8·  FP8, activations rounded too", False: "8  FP8, weights only"}
            named += [(name, text) for rounded, text in texts.items() if rounded in how]
        else:
            named.append((name, f"{_BITS[name]}  {_NAMES[name]}"))
    handles = [Patch(facecolor=DTYPE_COLOURS[name], label=text) for name, text in named]
    figure.legend(handles=handles, loc="outside lower center", frameon=False, fontsize=10, ncols=len(handles))
    return Picture(figure, _map_alt(plan))


@cache
def _outline(label: str) -> Path:
    """A cell's text as a path, centred, in points: laid out once instead of in every cell of every map."""
    path, digit = (TextPath((0, 0), text, size=8) for text in (label, "8"))
    box = path.get_extents()
    # by a digit's height, whatever else is in the label: a slash must not move it up
    return path.transformed(Affine2D().translate(-(box.x0 + box.x1) / 2, -digit.get_extents().y1 / 2))


def _written(label: str, ink: str, places: list[tuple[float, float]], figure: Figure, axes: Axes) -> PathCollection:
    """The label in the middle of every place."""
    made = PathCollection(
        [_outline(label)],
        offsets=[(x + 0.5, y + 0.5) for x, y in places],
        offset_transform=axes.transData,
        facecolor=ink,
        linewidth=0,
        gid=label,
    )
    made.set_transform(Affine2D().scale(1 / 72) + figure.dpi_scale_trans)
    return made


def _map_alt(plan: Any) -> str:
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for module in plan.modules:
        counts[module.part][_weight(module)] += 1
    parts = [
        f"{part}: " + ", ".join(f"{count} {_NAMES[weight].split()[0]}" for weight, count in weights.items())
        for part, weights in counts.items()
    ]
    return "Map of the checkpoint, one row per layer and one column per kind of module. " + "; ".join(parts) + "."


def bytes_by_part(plan: Any) -> Picture:
    """Bytes of each part (target, draft, embedding, head) in the dtypes the plan gives, stacked by dtype."""
    sums: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for module in plan.modules:
        sums[module.part][_weight(module)] += getattr(module, "loaded_nbytes", module.nbytes)
    parts = [part for part in ("target", "draft", "embedding", "head") if part in sums]
    parts += [part for part in sums if part not in parts]
    largest = max((sum(sums[part].values()) for part in parts), default=0)
    unit, divisor = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6) if largest >= 1e6 else ("kB", 1e3)
    figure = new_figure(1.5 + 0.42 * max(1, len(parts)))
    axes = figure.add_subplot()
    style_axes(axes, "Where the bytes are", f"Size of the weights, scales included ({unit})", "")
    axes.grid(False, axis="y")
    shown = [name for name in DTYPE_COLOURS if any(sums[part].get(name) for part in parts)]
    for y, part in enumerate(parts):
        left = 0.0
        for name in shown:
            size = sums[part].get(name, 0) / divisor
            axes.barh(y, size, left=left, color=DTYPE_COLOURS[name], height=0.62, edgecolor=PAPER, linewidth=1)
            left += size
        axes.text(left, y, f" {human_bytes(sum(sums[part].values()))}", va="center", fontsize=10, color=INK)
    axes.set_yticks(range(len(parts)), [part_words(part) for part in parts])
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set_xlim(left=0)
    handles = [Patch(facecolor=DTYPE_COLOURS[name], label=_NAMES[name]) for name in shown]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=10)
    said = "; ".join(
        f"{part_words(part)} {human_bytes(sum(sums[part].values()))} ("
        + ", ".join(
            f"{_NAMES[name].split()[0]} {human_bytes(sums[part][name])}" for name in shown if sums[part].get(name)
        )
        + ")"
        for part in parts
    )
    return Picture(figure, f"Bar chart of weight bytes by part and dtype. {said}.")
