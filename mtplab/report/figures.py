"""Figures of a study: acceptance length by depth, and acceptance by draft position.

Every function takes result rows and gives a `Picture`. Nothing here measures, reads a file or knows a
model; what a row lacks is left out of the drawing and said in the alt text.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from mtplab.report.palette import DASHES, GRID, INK, MARKERS, PAPER, policy_colours
from mtplab.report.picture import Picture
from mtplab.report.rows import Record, as_records, at_temperature, group_series
from mtplab.report.text import plain, plot_label
from mtplab.study.acceptance_views import FEW_ROUNDS
from mtplab.study.words import DEPTH, LENGTH

__all__ = [
    "Signs",
    "acceptance_by_depth",
    "acceptance_by_position",
    "line_style",
    "new_figure",
    "nothing_drawn",
    "side_by_side",
    "style_axes",
    "style_cells",
]

WIDTH = 9.0  # inches; 990 px at the default dpi, so that it is still readable scaled to 800


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """An empty figure in the house style, laid out so that legends and labels are never cut."""
    return Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)


def style_axes(axes: Axes, title: str, x: str, y: str) -> None:
    """Title, axis labels (with units), a light grid behind the data, no box."""
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK)
    axes.set_xlabel(x, fontsize=11, color=INK)
    axes.set_ylabel(y, fontsize=11, color=INK)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=10, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def style_cells(axes: Axes, title: str, x: str, columns: Sequence[str], y: str, rows: Sequence[str]) -> None:
    """The same for cells of side 1 around whole numbers, the first row above: their names at the sides, no lines."""
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel(x, fontsize=11, color=INK)
    axes.set_ylabel(y, fontsize=11, color=INK)
    axes.tick_params(labelsize=10, colors=INK, length=0)
    axes.spines[:].set_visible(False)


def line_style(index: int) -> Any:
    """matplotlib's line style of the palette's dash `index`; past the last one they begin again."""
    dash = DASHES[index % len(DASHES)]
    return "-" if dash is None else (0, dash)


class Signs:
    """Colour says the cache policy, marker and dash the exclusion set: in every figure, whatever it shows."""

    def __init__(self, records: Sequence[Record]):
        self.policies = list(dict.fromkeys(record["policy_label"] for record in records))
        self.weights = list(dict.fromkeys(record["weights_label"] for record in records))
        self.colours = policy_colours(self.policies)

    def line(self, record: Record) -> dict[str, Any]:
        """Keyword arguments of a matplotlib line for `record`'s series."""
        weights = record["weights_label"]
        return {
            "color": self.colours[record["policy_label"]],
            "marker": self._marker(weights),
            "linestyle": self._dash(weights),
            "markersize": 6,
            "linewidth": 1.8,
            "markeredgecolor": PAPER,
            "markeredgewidth": 0.6,
        }

    def hollow(self, record: Record) -> dict[str, Any]:
        """The same for points of it that say little: an empty marker, no line."""
        look = self.line(record)
        edge = {"markeredgecolor": look["color"], "markersize": look["markersize"]}
        return {"color": PAPER, "marker": look["marker"], "linestyle": "none"} | edge

    def bars(self, axes: Axes, record: Record, x: Sequence[float], y: Sequence[float], error: Sequence[float]) -> None:
        """Intervals of its points."""
        axes.errorbar(x, y, error, fmt="none", ecolor=self.line(record)["color"], elinewidth=1.1, alpha=0.55)

    def _dash(self, weights: str) -> Any:
        return line_style(self.weights.index(weights))

    def _marker(self, weights: str) -> str:
        return MARKERS[self.weights.index(weights) % len(MARKERS)]

    def legend(self, figure: Figure) -> None:
        """One legend beside the axes: policies first, exclusion sets below."""
        policies = [
            Line2D([], [], color=self.colours[name], linewidth=3, label=plot_label(name, 34)) for name in self.policies
        ]
        weights = [
            Line2D([], [], color=INK, marker=self._marker(name), linestyle=self._dash(name), label=plot_label(name, 34))
            for name in self.weights
        ]
        titles = [Line2D([], [], linestyle="none", label=text) for text in ("KV cache", "Exclusions")]
        handles = [titles[0], *policies, titles[1], *weights]
        legend = figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=10, handlelength=3.2)
        for handle, text in zip(handles, legend.get_texts(), strict=True):
            if handle in titles:
                text.set_fontweight("bold")


def side_by_side(index: int, count: int, width: float = 0.26) -> float:
    """Sideways shift of series `index` of `count`, so that points and bars lie side by side, not on top."""
    return 0.0 if count < 2 else (index / (count - 1) - 0.5) * min(width, 0.07 * (count - 1))


def _temperature(series: dict[str, list[Record]]) -> str:
    """How the title says at which temperature the rows were measured."""
    value = next((record.get("temperature") or 0.0 for found in series.values() for record in found), 0.0)
    return "greedy decoding" if value == 0 else f"temperature {value:g}"


def _shown(series: dict[str, list[Record]]) -> str:
    """What all lines have in common, for the title: two figures of one study must not be called the same."""
    records = [found[0] for found in series.values()]
    policies, weights = ({record[key] for record in records} for key in ("policy_label", "weights_label"))
    models = {plot_label(str(record.get("checkpoint") or ""), 30) for record in records}
    parts = sorted(models) if len(models) == 1 and models != {""} else []
    if len(weights) == 1:
        parts.append(f"exclusions: {plot_label(weights.pop(), 30)}")
    if len(policies) == 1:
        parts.append(f"KV cache: {plot_label(policies.pop(), 30)}")
    # broken where it would run into a legend beside the chart
    return textwrap.fill(", ".join([*parts, _temperature(series)]), 62)


def acceptance_by_depth(rows: Any, temperature: float | None = None) -> Picture:
    """Acceptance length (tokens per round) against depth, one line per cache policy × exclusion set.

    Bars are 95 % intervals over prompts, of each setting by itself and not of the difference of two.

    Args:
        rows: rows of a sweep, or dicts with the same fields.
        temperature: which rows to draw; those at the lowest temperature when None.
    """
    series = group_series(at_temperature(as_records(rows), temperature))
    # two lines: a legend beside a narrow chart must not meet its title
    title = f"Acceptance length by draft depth\n{_shown(series)}"
    figure = new_figure(4.4)
    axes = figure.add_subplot()
    style_axes(axes, title, DEPTH, LENGTH)
    if not series:
        return Picture(nothing_drawn(figure, axes), "Acceptance length by depth: there are no finished rows to draw.")
    signs = Signs([found[0] for found in series.values()])
    for index, found in enumerate(series.values()):
        shift = side_by_side(index, len(series))
        # plain decoding is one token a round in every setting: there the lines meet
        x = [record["depth"] + (shift if record["depth"] else 0) for record in found]
        y = [record["acceptance_length"] for record in found]
        axes.plot(x, y, **signs.line(found[0]))
        bars = [(at, value, r["length_error"]) for at, value, r in zip(x, y, found, strict=True) if r["length_error"]]
        if bars:
            signs.bars(axes, found[0], *zip(*bars, strict=True))
    depths = {record["depth"] for found in series.values() for record in found}
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(depths) == 1:  # else the axis would be of the shift between lines
        axes.set_xlim(min(depths) - 0.5, max(depths) + 0.5)
        axes.set_xticks(sorted(depths))
    axes.set_ylim(bottom=min(1.0, *axes.get_ylim()))
    signs.legend(figure)
    return Picture(figure, _depth_alt(series))


def _depth_alt(series: dict[str, list[Record]]) -> str:
    sentences = []
    for name, found in series.items():
        best = max(found, key=lambda record: record["acceptance_length"])
        error = f" ± {best['length_error']:.2f}" if best["length_error"] else ""
        sentences.append(f"{plain(name)}: at most {best['acceptance_length']:.2f}{error} at depth {best['depth']}")
    more = f", and {len(sentences) - 8} more lines" if len(sentences) > 8 else ""
    return f"Line chart, acceptance length in tokens per round by draft depth. {'; '.join(sentences[:8])}{more}."


def acceptance_by_position(rows: Any, depth: int | None = None, temperature: float | None = None) -> Picture:
    """Acceptance by draft position at one depth, in two panels: unconditional and conditional.

    Only rounds that got as far count for the second; how many those were stands below its axis, and a point over fewer
    than `FEW_ROUNDS` is hollow.

    Args:
        rows: rows of a sweep, or dicts with the same fields.
        depth: which depth's rows to draw; the deepest one when not given.
        temperature: which rows to draw; those at the lowest temperature when None.
    """
    series = group_series(at_temperature(as_records(rows), temperature))
    depths = sorted({record["depth"] for found in series.values() for record in found if record["depth"] > 0})
    figure = new_figure(4.4)
    left, right = figure.subplots(1, 2, sharey=True)
    position = "Draft position j in the round"
    style_axes(left, "Drafts 1…j all accepted", position, "Share of rounds (%)")
    style_axes(right, "Draft j, given 1…j−1", position, "")
    if not depths:
        return Picture(nothing_drawn(figure, left, right), "Acceptance by position: there are no rows with a draft.")
    chosen = depth if depth in depths else depths[-1]
    at_depth = [record for rows_ in series.values() for record in rows_ if record["depth"] == chosen]
    # an engine may count rounds and no positions; rows without rounds have none either, and stay in the legend
    found = [r for r in at_depth if not r.get("rounds") or any(s is not None for s in r.get("per_position") or [])]
    if not found:
        return Picture(nothing_drawn(figure, left, right), "Acceptance by position: no row has any.")
    signs = Signs(found)
    for index, record in enumerate(found):
        shift = side_by_side(index, len(found))
        reached = rounds_reaching(record)
        for axes, key in ((left, "per_position"), (right, "conditional")):
            shares = record.get(key) or []
            x = [j + shift for j in range(1, len(shares) + 1)]
            y = [float("nan") if share is None else 100 * share for share in shares]
            axes.plot(x, y, **signs.line(record))
            few = [at for at, n in enumerate(reached[: len(y)]) if n < FEW_ROUNDS] if key == "conditional" else []
            axes.plot([x[at] for at in few], [y[at] for at in few], **signs.hollow(record))
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(0, 102)
    fewest = [min(column) for column in zip(*(rounds_reaching(record) for record in found), strict=True)]
    right.set_xticks(range(1, chosen + 1), [f"{j}\n{n:.0f}" for j, n in enumerate(fewest, 1)])
    right.set_xlabel("Position j, and fewest rounds that got so far", fontsize=11)
    signs.legend(figure)
    return Picture(figure, _position_alt(found, chosen))


def rounds_reaching(record: Record) -> list[float]:
    """[j−1]: rounds in which drafts 1…j−1 were all accepted, over which the conditional share of draft j is taken."""
    rounds, shares = record.get("rounds") or 0, record.get("per_position") or []
    return [rounds, *(round(rounds * (share or 0), 6) for share in shares[:-1])]


def _position_alt(found: list[Record], depth: int) -> str:
    parts = []
    for record in found[:8]:
        shares = [share for share in record.get("per_position") or [] if share is not None]
        if shares:
            first, last = (f"{100 * share:.0f} % at draft" for share in (shares[0], shares[-1]))
            n = rounds_reaching(record)
            parts.append(
                f"{plain(record['series'])}: {first} 1, {last} {len(shares)}, of {n[0]:.0f} rounds, "
                f"of which {n[-1]:.0f} got to draft {len(shares)}"
            )
    more = f", and {len(found) - 8} more lines" if len(found) > 8 else ""
    return (
        f"Two line charts at depth {depth}: share of rounds in which drafts up to j were accepted, and the same "
        f"given that the ones before were. {'; '.join(parts)}{more}."
    )


def nothing_drawn(figure: Figure, *axes: Axes) -> Figure:
    """The figure, with a word in each of its axes that there is nothing in it."""
    for each in axes:
        each.text(0.5, 0.5, "nothing to draw yet", ha="center", va="center", transform=each.transAxes, color=INK)
    return figure
