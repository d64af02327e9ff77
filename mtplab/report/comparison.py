"""Two or more files of rows side by side: for each matched point both numbers, their difference, and its interval.

`compare` reads and matches; a `Comparison` holds what was found, for programs (`to_dict`, `to_frame`) and, through
`comparison_tables.py` and `comparison_words.py`, for readers. Measures nothing, and draws nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtplab.errors import ConfigError
from mtplab.report.text import escape
from mtplab.study.fields import has_length
from mtplab.study.frame import frame
from mtplab.study.interval import Change, change, holm
from mtplab.study.matching import AXES, Difference, Matched, Pair, display_order, match_rows
from mtplab.study.row import QUALITY_FIELDS, ResultRow
from mtplab.study.rowfile import rows_of_source
from mtplab.study.soundness import faults
from mtplab.study.speed import odd_timings

__all__ = ["Against", "Comparison", "Point", "Source", "compare"]


@dataclass(frozen=True)
class Source:
    """A file of rows, under the name that tables have for it."""

    name: str
    rows: list[ResultRow]
    path: Path | None = None


@dataclass(frozen=True)
class Point:
    """A setting at a depth in two files. `change` is None where its interval cannot be told: one prompt, or rows that
    kept no counts by prompt. `holds`: the difference is beyond chance even when all points are looked at (Holm)."""

    pair: Pair
    change: Change | None
    holds: bool

    @property
    def difference(self) -> float:
        """Acceptance length of the other row less that of the baseline's, in tokens per round."""
        return self.pair.other.acceptance_length - self.pair.base.acceptance_length

    @property
    def beyond(self) -> bool:
        """Whether the difference lies outside its own 95 % interval, all other points left aside."""
        return self.change is not None and abs(self.change.value) > self.change.error

    @property
    def compared(self) -> bool:
        """Whether there is something that chance could explain: equal counts, prompt by prompt, need no explanation."""
        return self.change is not None and not (self.change.value == 0 and self.change.error == 0)


class Against:
    """One file against the baseline."""

    def __init__(self, base: Source, other: Source, by: Sequence[str] | None):
        self.base, self.other = base, other
        self.matched: Matched = match_rows(base.rows, other.rows, by, (base.name, other.name))
        good: list[Pair] = []
        #: pairs of which one row or both have no number
        self.failed: list[Pair] = []
        for pair in self.matched.pairs:
            (good if has_length(pair.base) and has_length(pair.other) else self.failed).append(pair)
        changes = [change(pair.other, pair.base) for pair in good]
        self.points: list[Point] = [Point(pair, found, False) for pair, found in zip(good, changes, strict=True)]
        looked_at = [at for at, point in enumerate(self.points) if point.compared]
        for at, holds in zip(looked_at, holm([changes[at].p for at in looked_at]), strict=True):
            self.points[at] = Point(good[at], changes[at], holds)
        odd = [odd_timings([getattr(pair, side) for pair in good]) for side in ("base", "other")]
        #: by place in `points`: a timing so far off the others' that the machine must have been busy
        self.busy: list[bool] = [any(each) for each in zip(*odd, strict=True)]

        faulty = [faults([getattr(pair, side) for pair in good]) for side in ("base", "other")]
        #: by place in `points`: what broke the other's target that did not break the baseline's
        self.broke: list[str | None] = [now if before is None else None for before, now in zip(*faulty, strict=True)]

    @property
    def differences(self) -> list[Difference]:
        """What else the two files have differently."""
        return self.matched.differences

    @property
    def compared(self) -> list[Point]:
        """The points whose difference chance may or may not explain."""
        return [point for point in self.points if point.compared]

    def lost(self, least: float) -> list[Point]:
        """Points that lost more than `least` tokens per round, beyond chance with all points looked at."""
        return [point for point in self.points if point.holds and -point.difference > least]

    def newly_failed(self) -> list[Pair]:
        """Pairs of which the baseline's row has a number and the other's an error instead."""
        return [pair for pair in self.failed if has_length(pair.base) and pair.other.error is not None]

    def to_dict(self) -> dict[str, Any]:
        """Everything, JSON-ready."""
        return {
            "name": self.other.name,
            "matched_on": ["depth", *self.matched.on],
            "differences": [
                {"name": d.name, "baseline": d.base, "this": d.other, "points": d.pairs} for d in self.differences
            ],
            "compared": len(self.compared),
            "beyond_chance": sum(point.beyond for point in self.compared),
            "beyond_chance_holm": sum(point.holds for point in self.points),
            "broken_targets": sum(fault is not None for fault in self.broke),
            "points": [_as_dict(point) for point in self.points],
            "failed": [
                {**pair.settings, "depth": pair.depth, "baseline": pair.base.error, "this": pair.other.error}
                for pair in self.failed
            ],
            "only_baseline": [_named(row) for row in self.matched.only_base],
            "only_this": [_named(row) for row in self.matched.only_other],
        }


class Comparison:
    """What `compare` found: `sources` (the first is the baseline) and, for each of the others, an `Against`."""

    def __init__(self, sources: Sequence[Source], by: Sequence[str] | None = None):
        self.sources = list(sources)
        self.by = by
        self.against = [Against(self.sources[0], other, by) for other in self.sources[1:]]

    def to_dict(self) -> dict[str, Any]:
        """Everything, JSON-ready: `baseline` and one entry of `against` for each other file."""
        base = self.sources[0]
        return {
            "schema": 1,
            "baseline": {"name": base.name, "rows": len(base.rows)},
            "against": [against.to_dict() for against in self.against],
        }

    def to_frame(self) -> Any:
        """A pandas DataFrame, one line per matched point and file. Raises `ConfigError` without pandas."""
        lines = []
        for against in self.against:
            for point in against.to_dict()["points"]:
                settings, positions = point.pop("settings"), point.pop("per_position")
                lines.append({"name": against.other.name, **settings, **point, **positions})
        return frame(lines, "to_dict() does")

    def to_markdown(self, positions: bool = False) -> str:
        """Sentences and tables as Markdown, for a pull request or a page of CI."""
        from mtplab.report.comparison_words import markdown_of

        return markdown_of(self, positions)

    def to_text(self, positions: bool = False) -> str:
        """Sentences and tables as aligned text; `positions` adds acceptance by draft position."""
        from mtplab.report.comparison_words import text_of

        return text_of(self, positions)

    def save(self, path: str | Path) -> Path:
        """Writes one HTML file that needs no network, and returns its path."""
        from mtplab.report.comparison_page import write_comparison

        return write_comparison(self, path)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        points = sum(len(against.points) for against in self.against)
        beyond = sum(point.holds for against in self.against for point in against.points)
        names = " and ".join(repr(source.name) for source in self.sources[1:])
        return f"Comparison({names} against {self.sources[0].name!r}: {points} points, {beyond} beyond chance)"

    def _repr_html_(self) -> str:
        from mtplab.report.comparison_tables import tables
        from mtplab.report.comparison_words import sentences

        parts = []
        for against in self.against:
            parts += [f"<p>{escape(sentence)}</p>" for sentence in sentences(against)]
            parts += [table.to_html() for table in tables(against)]
        return f"<div>{''.join(parts)}</div>"


def compare(
    *sources: Any,
    names: Sequence[str | None] | None = None,
    by: Iterable[str] | str | None = None,
    between: str | None = None,
) -> Comparison:
    """Puts result files side by side: the first is the baseline, every other one is compared with it.

    Rows are matched on depth and on all settings that vary within a file. A setting that has one value in the baseline
    and another in the other file (another checkpoint, cache policy, prompt set, …) is what is compared. Where both
    files ran the same prompts, differences are paired by prompt; else each file's own spread counts. A ± is half a
    95 % interval (`mtplab.study.interval`).

    Args:
        sources: two or more of: a results folder, a .jsonl or .json file of rows, a page of `mtplab report`, what
            `mtplab.sweep` returned, or a list of rows.
        names: what tables call them, one each; None takes the file's name.
        by: settings to match on instead (`mtplab.study.matching.AXES`), all others may differ; depth always counts.
        between: one of these settings, which takes the place of files: the rows of one source with each value of it are
            one side, the first of them the baseline (`between="engine"`: what ran here against what engines gave).

    Raises:
        ConfigError: fewer than two sources, something that is none, or a file with two rows where one is looked for;
            with `between`, more than one source, a setting that is none or has one value only.
    """
    on = [by] if isinstance(by, str) else None if by is None else list(by)
    if between is not None:
        return Comparison(_sides(sources, names, between), on)
    if len(sources) < 2:
        raise ConfigError(f"{len(sources)} source{'s' * (len(sources) != 1)} to compare; give a baseline and another")
    wanted = list(names) if names is not None else [None] * len(sources)
    if len(wanted) != len(sources) or not all(name is None or (isinstance(name, str) and name) for name in wanted):
        raise ConfigError(f"names is {names!r:.80}; expected {len(sources)} names, or None for a file's own")
    given = [_source(each, name, at) for at, (each, name) in enumerate(zip(sources, wanted, strict=True))]
    return Comparison(_told_apart(given), on)


def _sides(sources: Sequence[Any], names: Sequence[str | None] | None, between: str) -> list[Source]:
    """One source's rows, apart by a setting."""
    if len(sources) != 1 or (names is not None and any(names)):
        raise ConfigError(f"between {between!r:.40} puts the rows of one source side by side; {len(sources)} are given")
    if between not in AXES:
        raise ConfigError(f"there is no setting {between!r:.40} to compare between; there are {', '.join(AXES)}")
    rows = sorted(_source(sources[0], None, 0).rows, key=display_order)
    sides: dict[str, list[ResultRow]] = {}
    for row in rows:
        sides.setdefault(AXES[between][1](row), []).append(row)
    if len(sides) < 2:
        raise ConfigError(f"all rows have {between} {next(iter(sides))}; expected two values of it or more")
    return [Source(name, found) for name, found in sides.items()]


def _source(given: Any, name: str | None, at: int) -> Source:
    if isinstance(given, str | Path):
        path = Path(given)
        own = path.name if path.is_dir() or path.name in ("", "..") else path.name.removesuffix(path.suffix)
        own = path.resolve().name if own in ("", ".", "..") else own
        # beside a page lie its rows under the same name
        return Source(name or own.removesuffix(".rows"), rows_of_source(path), path)
    rows = getattr(given, "rows", given)
    if not isinstance(rows, list | tuple) or not rows or not all(isinstance(row, ResultRow) for row in rows):
        raise ConfigError(
            f"source {at + 1} is {given!r:.60}; expected a path, a sweep's result or a list of its rows, not empty"
        )
    return Source(name or f"rows {at + 1}", list(rows))


def _told_apart(sources: list[Source]) -> list[Source]:
    """Two files of one name get the folder they lie in before it, or else a number."""
    found: list[Source] = []
    for source in sources:
        name, taken = source.name, {each.name for each in found}
        if name in taken and source.path is not None:
            name = f"{source.path.resolve().parent.name}/{name}"
        number = 2
        while name in taken:
            name, number = f"{source.name} ({number})", number + 1
        found.append(Source(name, source.rows, source.path))
    return found


def _named(row: ResultRow) -> dict[str, Any]:
    keep = {"checkpoint", "exclude_label", "quant_policy", "draft_quant_policy", "temperature", "depth", "error"}
    return row.model_dump(mode="json", include=keep | {"prompt_set", "n_prompts", "max_new_tokens", "method"})


def _as_dict(point: Point) -> dict[str, Any]:
    pair, found = point.pair, point.change
    base, other = pair.base, pair.other

    def both(name: str) -> dict[str, Any]:
        return {f"{name}_baseline": getattr(base, name), f"{name}_this": getattr(other, name)}

    fields: dict[str, Any] = {
        "settings": pair.settings,
        "depth": pair.depth,
        **both("acceptance_length"),
        "change": point.difference,
        "error": None if found is None else found.error,
        "paired": None if found is None else found.paired,
        "p": None if found is None else found.p,
        "beyond_chance": None if found is None else point.beyond,
        "beyond_chance_holm": None if found is None else point.holds,
        "per_position": both("per_position"),
    }
    for name in (
        *QUALITY_FIELDS,
        "target_weight_bytes",
        "draft_weight_bytes",
        "kv_bytes_per_token",
        "draft_kv_bytes_per_token",
        "state_bytes",
        "tokens_per_second",
    ):
        fields |= both(name)
    return fields
