"""Figures of a study: acceptance length by depth, and acceptance by draft position.

Every function takes result rows and gives a `Picture`. Nothing here measures, reads a file or knows a
model; what a row lacks is left out of the drawing and said in the alt text.
"""

from __future__ import annotations

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

__all__ = ["acceptance_by_depth", "acceptance_by_position", "new_figure", "style_axes"]

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


class _Signs:
    """Colour says the cache policy and the dash the exclusion set, in every figure; the marker says the policy
    too, or the exclusion set where there is only one policy and colour cannot tell the lines apart."""

    def __init__(self, records: Sequence[Record]):
        self.policies = list(dict.fromkeys(record["policy_label"] for record in records))
        self.weights = list(dict.fromkeys(record["weights_label"] for record in records))
        self.colours = policy_colours(self.policies)
        self._marked = "weights_label" if len(self.policies) == 1 else "policy_label"

    def line(self, record: Record) -> dict[str, Any]:
        """Keyword arguments of a matplotlib line for `record`'s series."""
        marked = self.weights if self._marked == "weights_label" else self.policies
        return {
            "color": self.colours[record["policy_label"]],
            "marker": MARKERS[marked.index(record[self._marked]) % len(MARKERS)],
            "linestyle": self._dash(record["weights_label"]),
            "markersize": 6,
            "linewidth": 1.8,
            "markeredgecolor": PAPER,
            "markeredgewidth": 0.6,
        }

    def _dash(self, weights: str) -> Any:
        dash = DASHES[self.weights.index(weights) % len(DASHES)]
        return "-" if dash is None else (0, dash)

    def legend(self, figure: Figure) -> None:
        """One legend beside the axes: policies first, exclusion sets below."""
        by_weights = self._marked == "weights_label"
        policies, weights = [], []
        for at, name in enumerate(self.policies):
            marker = "" if by_weights else MARKERS[at % len(MARKERS)]
            label = plot_label(name, 34)
            policies.append(Line2D([], [], color=self.colours[name], marker=marker, label=label))
        for at, name in enumerate(self.weights):
            marker = MARKERS[at % len(MARKERS)] if by_weights else ""
            colour = self.colours[self.policies[0]] if by_weights else INK
            label = plot_label(name, 34)
            weights.append(Line2D([], [], color=colour, marker=marker, linestyle=self._dash(name), label=label))
        titles = [Line2D([], [], linestyle="none", label=title) for title in ("KV cache", "Kept out of FP8")]
        handles = [titles[0], *policies, titles[1], *weights]
        legend = figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=10, handlelength=3.2)
        for handle, text in zip(handles, legend.get_texts(), strict=True):
            if handle in titles:
                text.set_fontweight("bold")


def _shift(index: int, count: int, width: float = 0.26) -> float:
    """Sideways shift of series `index` of `count`, so that equal points lie side by side, not on top."""
    return 0.0 if count < 2 else (index / (count - 1) - 0.5) * min(width, 0.07 * (count - 1))


def _temperature(series: dict[str, list[Record]]) -> str:
    """How the title says at which temperature the rows were measured."""
    value = next((record.get("temperature") or 0.0 for found in series.values() for record in found), 0.0)
    return "greedy decoding" if value == 0 else f"temperature {value:g}"


def acceptance_by_depth(rows: Any, temperature: float | None = None) -> Picture:
    """Acceptance length (tokens per round) against depth, one line per cache policy × exclusion set.

    Args:
        rows: rows of a sweep, or dicts with the same fields.
        temperature: which rows to draw; those at the lowest temperature when None.
    """
    series = group_series(at_temperature(as_records(rows), temperature))
    title = f"Acceptance length by draft depth, {_temperature(series)}"
    figure = new_figure(4.4)
    axes = figure.add_subplot()
    style_axes(
        axes,
        title,
        "Draft depth k (draft tokens per round)",
        "Acceptance length (tokens per round)",
    )
    if not series:
        return Picture(_nothing(figure, axes), "Acceptance length by depth: there are no finished rows to draw.")
    signs = _Signs([found[0] for found in series.values()])
    for index, found in enumerate(series.values()):
        shift = _shift(index, len(series))
        axes.plot(
            [record["depth"] + shift for record in found],
            [record["acceptance_length"] for record in found],
            **signs.line(found[0]),
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=min(1.0, *axes.get_ylim()))
    signs.legend(figure)
    return Picture(figure, _depth_alt(series))


def _depth_alt(series: dict[str, list[Record]]) -> str:
    sentences = []
    for name, found in series.items():
        best = max(found, key=lambda record: record["acceptance_length"])
        sentences.append(f"{plain(name)}: at most {best['acceptance_length']:.2f} at depth {best['depth']}")
    more = f", and {len(sentences) - 8} more lines" if len(sentences) > 8 else ""
    return f"Line chart, acceptance length in tokens per round by draft depth. {'; '.join(sentences[:8])}{more}."


def acceptance_by_position(rows: Any, depth: int | None = None, temperature: float | None = None) -> Picture:
    """Acceptance by draft position at one depth, in two panels: unconditional and conditional.

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
        return Picture(_nothing(figure, left, right), "Acceptance by position: there are no rows with a draft.")
    chosen = depth if depth in depths else depths[-1]
    found = [record for rows_ in series.values() for record in rows_ if record["depth"] == chosen]
    signs = _Signs(found)
    for index, record in enumerate(found):
        shift = _shift(index, len(found))
        for axes, key in ((left, "per_position"), (right, "conditional")):
            shares = record.get(key) or []
            axes.plot(
                [j + shift for j in range(1, len(shares) + 1)],
                [float("nan") if share is None else 100 * share for share in shares],
                **signs.line(record),
            )
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(0, 102)
    signs.legend(figure)
    return Picture(figure, _position_alt(found, chosen))


def _position_alt(found: list[Record], depth: int) -> str:
    parts = []
    for record in found[:8]:
        shares = [share for share in record.get("per_position") or [] if share is not None]
        if shares:
            first, last = (f"{100 * share:.0f} % at draft" for share in (shares[0], shares[-1]))
            parts.append(f"{plain(record['series'])}: {first} 1, {last} {len(shares)}")
    more = f", and {len(found) - 8} more lines" if len(found) > 8 else ""
    return (
        f"Two line charts at depth {depth}: share of rounds in which drafts up to j were accepted, and the same "
        f"given that the ones before were. {'; '.join(parts)}{more}."
    )


def _nothing(figure: Figure, *axes: Axes) -> Figure:
    for each in axes:
        each.text(0.5, 0.5, "nothing to draw yet", ha="center", va="center", transform=each.transAxes, color=INK)
    return figure
