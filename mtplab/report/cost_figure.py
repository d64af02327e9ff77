"""Figure: what a round gives, in tokens, against what it takes, in rounds of plain decoding.

Reads rows; what a round costs and which timings to believe is worked out in `mtplab.study.speed`.
"""

from __future__ import annotations

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from mtplab.report.figures import new_figure, nothing_drawn, style_axes
from mtplab.report.palette import INK, POLICY_COLOURS, SERIES
from mtplab.report.picture import Picture
from mtplab.report.rows import Record, as_records, at_temperature, group_series
from mtplab.report.text import plain, plot_label
from mtplab.study.fields import fact_of
from mtplab.study.speed import batch_of, by_batch, costs, round_seconds
from mtplab.study.words import DEPTH

__all__ = ["break_even"]

_TITLE = {"x": 0.01, "ha": "left", "fontsize": 12, "fontweight": "bold", "color": INK}


def break_even(rows: Any, temperature: float | None = None, timed: Any = ()) -> Picture:
    """Acceptance length and the cost of a round by depth, in one chart: where the first lies above, drafting pays.

    The acceptance length is that of the first setting; the cost is the median over all settings, timings that break the
    trend left out and marked by crosses.

    Args:
        rows: rows of a sweep, or dicts with the same fields; depth 0 must be among them.
        temperature: which rows to draw; those at the lowest temperature when None.
        timed: rows timed by themselves, at one batch or several: a chart for each, with the same acceptance length.
    """
    studies = [_finished(rows, temperature), *by_batch(_finished(timed, temperature))]
    line = next(iter(group_series(studies[0]).values()), [])
    charts = [(study, costs(study, [record["odd_timing"] for record in study])) for study in studies]
    charts = [(study, cost) for study, cost in charts if sum(record["depth"] in cost for record in line) >= 2]
    figure = new_figure(4.0)
    if not charts:
        axes = figure.add_subplot()
        style_axes(axes, "What a round gives and what it takes", DEPTH, "")
        why = "Cost of a round: there are no timed rows with and without drafts; sweep with method='run' to have them."
        return Picture(nothing_drawn(figure, axes), why)
    said = []
    for axes, (study, cost) in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
        said.append(_panel(axes, [record for record in line if record["depth"] in cost], study, cost))
    axes.legend(loc="upper left", frameon=False, fontsize=10)
    figure.axes[0].set_ylabel("Tokens, and rounds of plain decoding", fontsize=11, color=INK)
    figure.suptitle(f"What a round gives and what it takes ({plot_label(line[0]['series'], 44)})", **_TITLE)
    return Picture(
        figure, f"Line charts for {plain(line[0]['series'])}, tokens of a round against its time. {'; '.join(said)}."
    )


def _panel(axes: Axes, line: list[Record], study: list[Record], cost: Any) -> str:
    """One chart; returns what it says."""
    where = f"batch {batch_of(study[0])}"
    device = fact_of(study[0], "device")
    where = f"{device}, {where}" if device else where
    style_axes(axes, plot_label(where), DEPTH, "")
    depths = [record["depth"] for record in line]
    gives = [record["acceptance_length"] for record in line]
    takes = [cost[depth].ratio for depth in depths]
    colour = POLICY_COLOURS.get(line[0]["policy_label"], SERIES[0])
    errors = [record["length_error"] or math.nan for record in line]
    solid = {"color": colour, "marker": "o", "linewidth": 1.8, "elinewidth": 1.1}
    axes.errorbar(depths, gives, errors, label="gives: tokens per round", **solid)
    dashed = {"color": INK, "linestyle": (0, (6, 3)), "marker": "s", "linewidth": 1.8}
    axes.plot(depths, takes, label="takes: rounds at depth 0", **dashed)
    gain = [more >= less for more, less in zip(gives, takes, strict=True)]
    axes.fill_between(depths, gives, takes, where=gain, color=colour, alpha=0.15, interpolate=True)
    odd = [record for record in study if record["odd_timing"] is not None]
    if odd:
        # against the median of plain decoding; what lies above the chart stays at its edge
        plainly = sorted(round_seconds(r) for r in study if r["depth"] == 0 and r["odd_timing"] is None)
        top = max([*gives, *takes]) * 1.15
        high = [min(round_seconds(r) / plainly[len(plainly) // 2], top) for r in odd]
        label = f"left out: {len(odd)} timings of a busy machine"
        axes.plot([r["depth"] for r in odd], high, "x", color=SERIES[1], label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    each = ", ".join(
        f"depth {depth} gives {given:.2f} and takes {taken:.2f}"
        for depth, given, taken in zip(depths, gives, takes, strict=True)
    )
    left = f" ({len(odd)} timings that break the trend are left out)" if odd else ""
    return f"{plain(where)}: {each}{left}"


def _finished(rows: Any, temperature: float | None) -> list[Record]:
    return [record for record in at_temperature(as_records(rows), temperature) if record.get("error") is None]
