"""HTML tables of rows and plans, every text escaped.

Knows nothing of widgets or pages; a table is a string that stands anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mtplab.report.rows import as_records, group_series
from mtplab.report.text import escape, human_bytes, part_words
from mtplab.study.soundness import COLUMNS, quality_cells, quality_notes

__all__ = ["acceptance_table", "below", "html_table", "plan_summary", "plan_table", "size_against"]


def html_table(
    head: Sequence[Any], body: Iterable[Sequence[Any]], caption: str = "", left: int = 1, height: str = "none",
    stacked: bool = False,
) -> str:
    """A table in a box that scrolls sideways on a narrow page; the first `left` columns are text.

    Args:
        head: column titles.
        body: rows of cells, as many as titles; anything is turned into escaped text.
        height: CSS height past which the box scrolls.
        stacked: intervals and ratios stand below their numbers, so that many columns fit a page.
    """

    def line(cells: Sequence[Any], tag: str) -> str:
        scope = " scope=col" if tag == "th" else ""
        # styles stand in the cell, since a widget and an exported page bring different sheets
        sides = ["text-align:left" if at < left else "text-align:right;white-space:nowrap" for at in range(len(cells))]
        styles = [f"{side};padding:3px 14px 3px 4px;line-height:1.4" for side in sides]
        texts = [escape(cell) for cell in cells]
        if stacked and tag == "td":
            texts[left:] = map(below, texts[left:])
        return "".join(
            f'<{tag}{scope} style="{style}">{text}</{tag}>' for text, style in zip(texts, styles, strict=True)
        )

    lines = "".join(f"<tr>{line(row, 'td')}</tr>" for row in body)
    # a caption is as wide as its table, and may lie outside the box in part: its lines are not
    words = f'<span style="display:block;max-width:46em">{escape(caption)}</span>'
    title = f'<caption style="text-align:left;font-weight:600">{words}</caption>' if caption else ""
    return (
        '<div class="mtplab-table" tabindex="0" role="region" style="overflow:auto;max-width:100%;'
        f'max-height:{height}" '
        f'aria-label="{escape(caption or "table")}"><table>{title}'
        f"<thead><tr>{line(head, 'th')}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def below(cell: str) -> str:
    """A number's interval or ratio on a line of its own, in a cell that is escaped already."""
    for sign in ("±", "×"):
        cell = cell.replace(f" {sign} ", f" {sign}").replace(f" {sign}", f"<br>{sign}")
    return cell


def acceptance_table(rows: Any, caption: str = "Acceptance length (tokens per round) by draft depth") -> str:
    """One line per setting, one column per depth, ± half a 95 % interval, and what its target is worth where that was
    measured; broken targets and failed points are told below the table."""
    records = as_records(rows)
    series = group_series(records)
    depths = sorted({record["depth"] for found in series.values() for record in found})
    several = len({record.get("temperature") for record in records}) > 1
    body, first_of = [], []
    for found in series.values():
        # one line per temperature: the same setting at another temperature is another measurement
        for temperature in sorted({record.get("temperature") or 0.0 for record in found}):
            mine = {r["depth"]: r for r in found if (r.get("temperature") or 0.0) == temperature}
            first = next(iter(mine.values()))
            lead = [first["weights_label"], first["policy_label"]] + ([f"{temperature:g}"] if several else [])
            first_of.append(first)
            body.append((lead, [_length(mine.get(depth)) for depth in depths]))
    judged = quality_cells(first_of)
    lines = [[*lead, *([] if judged is None else judged[at]), *cells] for at, (lead, cells) in enumerate(body)]
    head = ["Exclusions", "KV cache"] + (["Temperature"] if several else []) + ([] if judged is None else [*COLUMNS])
    head += [f"k = {d}" for d in depths]
    failed = [record for record in records if record.get("error") is not None]
    notes = "".join(
        f'<p role="alert">{escape(record["series"])}, depth {record["depth"]} failed: {escape(record["error"])}</p>'
        for record in failed[:5]
    )
    if len(failed) > 5:
        notes += f"<p>… and {len(failed) - 5} more failed rows.</p>"
    told = "".join(f"<p>{escape(note)}</p>" for note in quality_notes(records))
    return html_table(head, lines, caption, left=2, stacked=True) + told + notes


def _length(record: Any) -> str:
    if record is None:
        return "–"
    error = record["length_error"]
    return f"{record['acceptance_length']:.2f}" + (f" ±{error:.2f}" if error else "")


def plan_summary(plan: Any, caption: str = "Modules by part and by how they are held") -> str:
    """A few lines for a plan of any length (modules of each part that are FP8, BF16 or F32, and their bytes); all of
    it folded away below."""
    groups: dict[tuple[str, str, str], list[Any]] = {}
    for module in plan.modules:
        groups.setdefault((module.part, module.weight, module.activation), []).append(module)
    body = []
    for (part, weight, activation), found in groups.items():
        kinds = dict.fromkeys(module.name.rsplit(".", 1)[-1] for module in found)
        shown = ", ".join(list(kinds)[:6]) + (", …" if len(kinds) > 6 else "")
        rounded = "FP8" if activation == "fp8" else "–"
        size = human_bytes(sum(getattr(module, "loaded_nbytes", module.nbytes) for module in found))
        body.append((part_words(part), weight.upper(), rounded, shown, len(found), size))
    table = html_table(("Part", "Weight", "Activations", "Among them", "Modules", "Bytes"), body, caption, left=4)
    every = f"All {len(plan.modules)} modules, and the rule that decided each"
    return f"{table}<details><summary>{every}</summary>{plan_table(plan.modules)}</details>"


def size_against(plan: Any, other: Any) -> str:
    """A sentence: how many bytes of weights the plan holds, and what share of the other plan's that is."""
    mine, theirs = plan.loaded_nbytes(), other.loaded_nbytes()
    return (
        f"<p>All weights as planned: {human_bytes(mine)}, {100 * mine / theirs:.0f} % of the {human_bytes(theirs)} of "
        "the original. What is FP8 takes half of BF16 and a scale per block; what stays in BF16 "
        "takes all of it.</p>"
    )


def plan_table(modules: Iterable[Any], caption: str = "Modules", limit: int = 400) -> str:
    """Modules of a plan: how each is stored and held, whether activations are rounded, its bytes and the rule.

    Bytes are those of a run, in the dtype that the plan gives; stored bytes those on disk.
    """
    found = list(modules)
    body = [
        (
            module.name,
            "×".join(str(size) for size in module.shape),
            module.stored,
            module.weight,
            module.activation,
            human_bytes(module.loaded_nbytes),
            human_bytes(module.nbytes),
            module.rule,
        )
        for module in found[:limit]
    ]
    if len(found) > limit:
        body.append((f"… and {len(found) - limit} more", "", "", "", "", "", "", ""))
    head = ("Module", "Shape", "Stored", "Weight", "Activation", "Bytes", "Stored bytes", "Rule that decided")
    return html_table(head, body, caption, height="32em")
