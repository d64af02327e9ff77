"""Figure: what a round gives, in tokens, against what it takes, in rounds of plain decoding.

Reads rows; what a round costs and which timings to believe is worked out in `mtplab.study.speed`.
"""

from __future__ import annotations

import math
from typing import Any

from matplotlib.ticker import MaxNLocator

from mtplab.report.figures import new_figure, nothing_drawn, style_axes
from mtplab.report.palette import INK, POLICY_COLOURS, SERIES
from mtplab.report.picture import Picture
from mtplab.report.rows import as_records, at_temperature, group_series
from mtplab.report.text import plain, plot_label
from mtplab.study.speed import BATCH, costs, round_seconds

__all__ = ["break_even"]


def break_even(rows: Any, temperature: float | None = None) -> Picture:
    """Acceptance length and the cost of a round by depth, in one chart: where the first lies above, drafting pays.

    The acceptance length is that of the first setting; the cost is the median over all settings, timings that break the
    trend left out and marked by crosses.

    Args:
        rows: rows of a sweep, or dicts with the same fields; depth 0 must be among them.
        temperature: which rows to draw; those at the lowest temperature when None.
    """
    records = [r for r in at_temperature(as_records(rows), temperature) if r.get("error") is None]
    series = group_series(records)
    cost = costs(records, [record["odd_timing"] for record in records])
    first = next(iter(series.values()), [])
    line = [record for record in first if record["depth"] in cost]
    figure = new_figure(4.0)
    axes = figure.add_subplot()
    batch = min(BATCH, first[0]["n_prompts"]) if first else 0
    device = (first[0].get("provenance") or {}).get("device") or "" if first else ""
    where = ", ".join(part for part in (str(device), f"batch {batch}") if part)
    style_axes(axes, f"What a round gives and what it takes ({where})", "Draft depth k (draft tokens per round)", "")
    if len(line) < 2:
        return Picture(nothing_drawn(figure, axes), "Cost of a round: there are no timed rows with and without drafts.")
    depths = [record["depth"] for record in line]
    gives = [record["acceptance_length"] for record in line]
    takes = [cost[depth].ratio for depth in depths]
    colour = POLICY_COLOURS.get(line[0]["policy_label"], SERIES[0])
    errors = [record["length_error"] or math.nan for record in line]
    axes.errorbar(
        depths, gives, errors, color=colour, marker="o", linewidth=1.8, elinewidth=1.1, label="gives: tokens per round"
    )
    takes_look = {"color": INK, "linestyle": (0, (6, 3)), "marker": "s", "linewidth": 1.8}
    axes.plot(depths, takes, label="takes: rounds at depth 0", **takes_look)
    gain = [more >= less for more, less in zip(gives, takes, strict=True)]
    axes.fill_between(depths, gives, takes, where=gain, color=colour, alpha=0.15, interpolate=True)
    odd = [record for record in records if record["odd_timing"] is not None]
    if odd:
        # against the median of plain decoding; what lies above the chart stays at its edge
        plainly = sorted(round_seconds(r) for r in records if r["depth"] == 0 and r["odd_timing"] is None)
        top = max([*gives, *takes]) * 1.15
        high = [min(round_seconds(r) / plainly[len(plainly) // 2], top) for r in odd]
        label = f"left out: {len(odd)} timings of a busy machine"
        axes.plot([r["depth"] for r in odd], high, "x", color=SERIES[1], label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("Tokens, and rounds of plain decoding", fontsize=11, color=INK)
    axes.legend(loc="upper left", frameon=False, fontsize=10, title=plot_label(line[0]["series"], 44), alignment="left")
    said = "; ".join(
        f"depth {depth} gives {given:.2f} and takes {taken:.2f}"
        for depth, given, taken in zip(depths, gives, takes, strict=True)
    )
    left = f" {len(odd)} timings that break the trend are left out." if odd else ""
    name = plain(line[0]["series"])
    return Picture(figure, f"Line chart for {name}, tokens of a round against its time: {said}.{left}")
