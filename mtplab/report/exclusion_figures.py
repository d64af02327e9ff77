"""Figures of a search for exclusions: what each module costs in FP8, and bytes against quality.

Draws what was measured; measures nothing. What lies within chance is drawn hollow.
"""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from mtplab.report.figures import new_figure, nothing_drawn, style_axes
from mtplab.report.palette import BLUE, GREEN, INK, ORANGE, PAPER, PURPLE, VERMILLION
from mtplab.report.picture import Picture
from mtplab.report.table import html_table
from mtplab.report.text import human_bytes, plain, plot_label
from mtplab.study.numbers import NATS, rounded
from mtplab.study.sensitivity import shown_cell

__all__ = ["estimate_check", "estimate_table", "pareto", "sensitivity_bars", "sensitivity_table"]

MOST = 40  # bars that still have readable names
_PARTS = {"target": BLUE, "draft": VERMILLION}


def sensitivity_bars(found: Any) -> Picture:
    """KL and change of acceptance length of every group alone in FP8, target and draft in colours of their own.

    Args:
        found: a `Sensitivity`. Of more than 40 groups, those that cost most.
    """
    rows = list(found.rows)
    if len(rows) > MOST:
        cost = {row: (row.kl.value, -row.length.value) for row in rows}
        kept = set(sorted(rows, key=lambda row: cost[row], reverse=True)[:MOST])
        rows = [row for row in rows if row in kept]
    figure = new_figure(1.6 + 0.24 * max(4, len(rows)))
    left, right = figure.subplots(1, 2, sharey=True)
    style_axes(left, "Alone in FP8: target's KL", f"KL from BF16 ({NATS})", "")
    style_axes(right, "Alone in FP8: acceptance", f"Change at depth {found.depth} (tokens per round)", "")
    if not rows:
        return Picture(nothing_drawn(figure, left, right), "Sensitivity of modules: there are none.")
    for at, row in enumerate(rows):
        _bar(left, at, row.kl, _PARTS[row.group.part])
        _bar(right, at, row.length, _PARTS[row.group.part])
    left.set_yticks(range(len(rows)), [plot_label(row.group.name, 52) for row in rows], fontsize=8)
    left.invert_yaxis()
    right.axvline(0, color=INK, linewidth=0.8)
    handles = [Patch(color=colour, label=part) for part, colour in _PARTS.items()]
    handles.append(Patch(facecolor=PAPER, edgecolor=INK, label="within chance"))
    figure.legend(handles=handles, loc="outside lower right", ncols=3, frameon=False, fontsize=10)
    return Picture(figure, _bars_alt(found))


def _bar(axes: Axes, at: int, change: Any, colour: str) -> None:
    fill = PAPER if change.within_chance else colour
    axes.barh(at, change.value, height=0.7, facecolor=fill, edgecolor=colour, linewidth=1.2)
    if change.error:
        axes.errorbar(change.value, at, xerr=change.error, fmt="none", ecolor=INK, elinewidth=0.9)


def _bars_alt(found: Any) -> str:
    worst = max(found.rows, key=lambda row: row.kl.value)
    changed = [row for row in found.rows if not row.length.within_chance]
    lengths = ", ".join(f"{plain(row.group.name)} {row.length.value:+.2f}" for row in changed[:4])
    return (
        f"Bar chart of {len(found.rows)} groups of modules, each alone in FP8. Highest KL: {plain(worst.group.name)}, "
        f"{rounded(worst.kl.value)[0]} {NATS}. Acceptance length changes beyond chance with "
        f"{len(changed)} of them{': ' + lengths if changed else ''}."
    )


def sensitivity_table(found: Any) -> str:
    """HTML: every group's cost alone in FP8 and what keeping it alone brings back, ± half a 95 % interval; and what was
    estimated, where it was."""
    some = any(row.estimated is not None for row in found.rows)
    body = [
        (
            row.group.name,
            row.group.part,
            human_bytes(row.group.nbytes),
            *(shown_cell(change) for change in (row.kl, row.kl_back)),
            *(shown_cell(change) for change in (row.length, row.length_back)),
            *(["" if row.estimated is None else shown_cell(row.estimated)] if some else ()),
        )
        for row in found.rows
    ]
    head = ("Modules", "Part", "FP8 saves", "KL alone", "KL back", "Length alone", "Length back")
    caption = f"KL in {NATS}, acceptance length in tokens per round; within chance in parentheses"
    if some:
        head += ("Estimated",)
        caption += ". Estimated: the target's KL alone; of a draft's modules, the change of its KL from the target"
    return html_table(head, body, caption, left=2, height="32em")


def estimate_table(check: Any) -> str:
    """HTML: estimated and measured KL of every group alone in FP8, and by how much they differ, text by text.

    Args:
        check: an `EstimateCheck`.
    """
    body = [
        (
            row.group.name,
            row.group.part,
            *(shown_cell(change) for change in (row.estimated, row.measured, row.off)),
            "yes" if row.sound else "no",
        )
        for row in check.rows
    ]
    head = ("Modules", "Part", "Estimated", "Measured", "Measured less estimated", "Sound")
    caption = (
        "Nats: the target's KL per token; of a draft's modules, the change of the draft's KL from its target per "
        "slot. Sound: small enough for an expansion, and off by no more than chance or a third"
    )
    return html_table(head, body, caption, left=2, height="32em")


def estimate_check(found: Any) -> Picture:
    """The sum of single KLs against the KL measured, for every set that a search measured.

    Args:
        found: an `ExclusionSearch`.
    """
    figure = new_figure(3.8, 5.5)
    axes = figure.add_subplot()
    style_axes(axes, "Does KL add up?", f"Measured KL ({NATS})", f"Sum of single KLs ({NATS})")
    pairs = found.sensitivity.estimates(found.points)
    if not pairs:
        return Picture(nothing_drawn(figure, axes), "KL of sets against sums of single KLs: sums are no estimate here.")
    most = max(max(pair) for pair in pairs)
    axes.plot([0, most], [0, most], color=INK, linewidth=0.9, linestyle="--", label="as measured")
    axes.plot(*zip(*pairs, strict=True), "o", color=BLUE, markersize=4.5, label="a set")
    axes.legend(frameon=False, fontsize=10)
    off = sorted(b / a - 1 for a, b in pairs if a)
    return Picture(
        figure,
        f"Scatter chart of {len(pairs)} sets, sum of single KLs against measured KL. The sum is off by "
        f"{100 * off[0]:+.1f} to {100 * off[-1]:+.1f} %, {100 * off[len(off) // 2]:+.1f} % in the median.",
    )


def pareto(found: Any) -> Picture:
    """Bytes of all weights against KL, and against acceptance length: every measured set, and the front.

    Args:
        found: an `ExclusionSearch`. Bars are 95 % intervals of the marked sets, each by itself.
    """
    figure = new_figure(4.6)
    axes = figure.subplots(1, 2)
    style_axes(axes[0], "Bytes against the target's KL", "Weights (MB)", f"KL from BF16 ({NATS})")
    style_axes(axes[1], "Bytes against acceptance", "Weights (MB)", f"Tokens per round at depth {found.depth}")
    marked = _marked(found)
    for panel, axis in ((axes[0], "kl"), (axes[1], "length")):
        value = "mean_kl" if axis == "kl" else "length"
        every = [(point.nbytes / 1e6, getattr(point, value).value) for point in found.points]
        panel.plot(*zip(*every, strict=True), "o", color="#8A939B", markersize=3.5, alpha=0.7)
        front = [(point.nbytes / 1e6, getattr(point, value).value) for point in found.front(axis)]
        panel.plot(*zip(*front, strict=True), drawstyle="steps-post", color=INK, linewidth=1.2)
        for _, point, marker, colour in marked:
            change = getattr(point, value)
            panel.errorbar(
                point.nbytes / 1e6,
                change.value,
                change.error or 0.0,
                fmt=marker,
                color=colour,
                markersize=8,
                elinewidth=1.1,
            )
    axes[0].axhline(found.kl_budget, color=PURPLE, linestyle="--", linewidth=1)
    floor = found.reference.length.value * (1 - found.al_budget)
    axes[1].axhline(floor, color=PURPLE, linestyle="--", linewidth=1)
    handles = [Line2D([], [], marker=m, color=c, linestyle="none", label=name) for name, _, m, c in marked]
    handles += [
        Line2D([], [], marker="o", color="#8A939B", linestyle="none", markersize=4, label="any other set"),
        Line2D([], [], color=INK, label="front"),
        Line2D([], [], color=PURPLE, linestyle="--", label="budget"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return Picture(figure, _pareto_alt(found, marked))


def _marked(found: Any) -> list[tuple[str, Any, str, str]]:
    by_size = sorted(found.points, key=lambda point: len(point.excluded))
    marked = [("all FP8", by_size[0], "s", ORANGE), ("all BF16", found.reference, "D", BLUE)]
    marked.append(("published list", found.published, "^", VERMILLION))
    if found.recommended is not None:
        marked.append(("recommended", found.recommended, "P", GREEN))
    return marked


def _pareto_alt(found: Any, marked: list[tuple[str, Any, str, str]]) -> str:
    parts = [
        f"{name}: {human_bytes(point.nbytes)}, KL {rounded(point.mean_kl.value)[0]} {NATS}, acceptance length "
        f"{point.length.value:.2f}"
        for name, point, _, _ in marked
    ]
    return f"Two scatter charts of {len(found.points)} sets of exclusions, bytes against KL and acceptance. " + (
        "; ".join(parts) + "."
    )
